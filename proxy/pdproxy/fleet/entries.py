"""What an operator is shown of the engines: one entry for each, as the admin API sends it.

Owns the names and meanings of these fields, and an engine's short name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.member import Member, MemberState, UnknownMemberError
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.slow_engines import SlowEngines
from pdproxy.kit.text import truncate
from pdproxy.observe.prompt_shares import PoolPrompts, PromptShares
from pdproxy.observe.slow import MOVES_NOT
from pdproxy.scheduling.compatibility import may_share
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.revisions import Revisions
from pdproxy.settings.engines import engine_url
from pdproxy.settings.errors import SettingsError

ID_LENGTH = 12
MAX_MODELS = 64
"""Models of an engine that are shown."""
MAX_NOT_PAIRED = 16
"""Engines with which one is not paired that are shown in a list."""
MAX_WITH_PAIRS = 512
"""Engines of a list that is shown with pairs: each is compared with each."""
AT_ONCE = 512
"""Pairs that are compared in one turn of the event loop: a millisecond."""


def engine_id(url: str) -> str:
    """Return an engine's short name: the first digits of the SHA-256 of its URL, which stay the
    same for ever.
    """
    return hashlib.sha256(url.encode()).hexdigest()[:ID_LENGTH]


class EngineHealth(msgspec.Struct, frozen=True):
    """Whether it serves: what probes and its legs have shown."""

    state: Annotated[
        str,
        Meta(
            description="up, down, draining, stalled, asleep, excluded, half_open, kv_failing or "
            "slow_start"
        ),
    ]
    reason: Annotated[str | None, Meta(description="why it is not up, null if it is")]


class EngineLoad(msgspec.Struct, frozen=True):
    """What it has to do."""

    requests: Annotated[int, Meta(description="requests that it has now")]
    prompt_bytes: Annotated[int, Meta(description="bytes of their prompts that it works on")]
    window: Annotated[
        float | None,
        Meta(description="how many requests it should have at once, null for any number"),
    ]
    kv_usage: Annotated[
        float | None,
        Meta(
            description="the part of its KV blocks that are in use, 0 to 1, as it has reported "
            "last; null if it is down, or does not report it"
        ),
    ]


class EngineBreaker(msgspec.Struct, frozen=True):
    """Its breaker, which is opened by failures in a row, or where it is worse than its peers."""

    failures: Annotated[int, Meta(description="failed legs since the last good one")]
    open_for_s: Annotated[
        float, Meta(description="seconds for which it is excluded, 0 if it is not")
    ]
    reason: Annotated[
        str | None, Meta(description="why it is excluded, null for failures in a row")
    ]
    places: Annotated[
        int | None,
        Meta(description="requests that it may have in a slow start, null for any number"),
    ]


class NotPaired(msgspec.Struct, frozen=True):
    """An engine with which it shares no prompt."""

    url: str
    why: str


class EnginePairs(msgspec.Struct, frozen=True):
    """The engines with which it can share a prompt's work."""

    paired: Annotated[int, Meta(description="with how many engines it can share prompts")]
    not_paired: Annotated[
        list[NotPaired], Meta(description="with which ones it can not; in a list, the first ones")
    ]
    not_paired_count: int


class EngineDrain(msgspec.Struct, frozen=True):
    """Why it gets no more requests."""

    by: Annotated[str, Meta(description="the source that wants it")]
    since_s: float
    left_s: Annotated[float, Meta(description="seconds until its requests are ended")]
    removes: Annotated[bool, Meta(description="whether it is removed then")]
    waits_for: Annotated[str | None, Meta(description="requests, kv, or null: nothing is left")]


class EngineEntry(msgspec.Struct, frozen=True):
    """One engine."""

    id: Annotated[
        str, Meta(description="its short name: the first 12 digits of the SHA-256 of its URL")
    ]
    url: str
    pool: Annotated[str, Meta(description="the name of its pool")]
    role: Annotated[str, Meta(description="encode, prefill, decode, aggregated or any")]
    source: Annotated[
        str,
        Meta(
            description="who has added it: settings, admin, or the URL of a source; only that one "
            "removes it"
        ),
    ]
    also_wanted_by: Annotated[
        list[str], Meta(description="the first of these owns it if its source gives it up")
    ]
    state: Annotated[
        str, Meta(description="joining, probing, warming, serving, draining or drained")
    ]
    since_s: Annotated[float, Meta(description="seconds since it was added")]
    health: EngineHealth
    models: Annotated[list[str], Meta(description="the models that it serves, the first 64")]
    version: Annotated[str | None, Meta(description="vLLM's version, null while it is not known")]
    block_size: Annotated[
        int | None, Meta(description="tokens in a KV block, null while it is not known")
    ]
    load: EngineLoad
    breaker: EngineBreaker
    pairs: Annotated[
        EnginePairs | None,
        Meta(description="null in a list of more than 512 engines, and where not asked for"),
    ]
    drain: EngineDrain | None
    labels: dict[str, str]
    waits: Annotated[
        str | None, Meta(description="why its revision gets no requests, null if it gets some")
    ]
    slow: Annotated[list[str], Meta(description="why requests are slow there, as /ready says it")]


class PoolEngines(NamedTuple):
    """The engines of one pool, and who wants them there. `scaling()`: which are missing, or are too
    many, a sentence each.
    """

    name: str
    membership: Membership
    engines: EngineRegistry
    shares: PromptShares
    slow: SlowEngines
    revisions: Revisions
    scaling: Callable[[], Sequence[str]] = list

    def prompts(self) -> PoolPrompts:
        """Return how its last prompts were served."""
        return PoolPrompts(self.name, self.shares.window())

    def ledger_engines(self) -> list[LedgerEngine]:
        """Return what the ledger knows of them."""
        return [engine.in_ledger for engine in self.engines.values()]


class EngineEntries:
    """The entries of all pools' members. An engine is in one pool at a time. `now`: monotonic
    seconds.
    """

    def __init__(self, pools: Sequence[PoolEngines], now: Callable[[], float]) -> None:
        self.pools = pools
        self._now = now

    def prompts(self) -> list[PoolPrompts]:
        """Return how the pools' last prompts were served."""
        return [pool.prompts() for pool in self.pools]

    def scaling(self, of: PoolEngines | None = None) -> list[str]:
        """Return which engines are missing, or are too many, in all pools or in one of them."""
        several = len(self.pools) > 1
        return [
            f"pool {pool.name}: {text}" if several else text
            for pool in (self.pools if of is None else [of])
            for text in pool.scaling()
        ]

    def find(self, name: str) -> tuple[PoolEngines, str]:
        """Return a member's pool and its URL, by its id or its URL.

        Raises:
            UnknownMemberError: there is none.
        """
        spelled = name
        with contextlib.suppress(SettingsError):
            spelled = engine_url(name, ("url",))
        for pool in self.pools:
            if spelled in pool.membership.members:
                return pool, spelled
        if len(name) == ID_LENGTH:
            for pool in self.pools:
                for url in pool.membership.members:
                    if engine_id(url) == name:
                        return pool, url
        raise UnknownMemberError(f"{truncate(name)} is no engine of {self._here()}")

    def _here(self) -> str:
        return "this pool" if len(self.pools) == 1 else "any pool"

    def entry(self, url: str, *, pairs: bool = True) -> EngineEntry:
        """Return one engine's entry. `pairs`: whether it shows all its pairs.

        Raises:
            UnknownMemberError: there is no such member.
        """
        for pool in self.pools:
            if url in pool.membership.members:
                ledger_engines = pool.ledger_engines() if pairs else ()
                found = (
                    _pairs(pool.engines[url].in_ledger, ledger_engines, len(ledger_engines))
                    if pairs
                    else None
                )
                return self._entry(pool, url, found, pool.slow.texts())
        raise UnknownMemberError(f"{url} is no engine of {self._here()}")

    async def all(
        self, *, pairs: bool = True, of: PoolEngines | None = None
    ) -> AsyncIterator[EngineEntry]:
        """Yield all entries, or those `of` one pool: pool by pool, in the order in which engines
        were added.

        Others get their turn in between.
        """
        compared = 0
        for pool in self.pools if of is None else [of]:
            ledger_engines = pool.ledger_engines()
            slow = pool.slow.texts()
            compare = pairs and len(ledger_engines) <= MAX_WITH_PAIRS
            for url in list(pool.membership.members):
                compared += len(ledger_engines) if compare else 1
                if compared >= AT_ONCE:
                    compared = 0
                    await asyncio.sleep(0)
                if url in pool.membership.members:
                    found = (
                        _pairs(pool.engines[url].in_ledger, ledger_engines, MAX_NOT_PAIRED)
                        if compare
                        else None
                    )
                    yield self._entry(pool, url, found, slow)

    def _entry(
        self,
        pool: PoolEngines,
        url: str,
        pairs: EnginePairs | None,
        slow: Mapping[str, list[str]],
    ) -> EngineEntry:
        now, member, engine = self._now(), pool.membership.members[url], pool.engines[url]
        ledger_engine = engine.in_ledger
        evidence = ledger_engine.evidence
        return EngineEntry(
            id=engine_id(url),
            url=url,
            pool=pool.name,
            role=ledger_engine.role.value,
            source=member.source,
            also_wanted_by=list(member.heirs),
            state=member.state(ledger_engine).value,
            since_s=round(now - member.since, 1),
            health=EngineHealth(ledger_engine.state(now), _why(ledger_engine, now)),
            models=[]
            if evidence is None
            else [truncate(name) for name in sorted(evidence.models)[:MAX_MODELS]],
            version=None if evidence is None else evidence.version or None,
            block_size=None if evidence is None else evidence.block_size,
            load=_load(engine),
            breaker=EngineBreaker(
                ledger_engine.failures,
                round(max(0.0, ledger_engine.open_until - now), 1),
                ledger_engine.excluded_because if now < ledger_engine.open_until else None,
                ledger_engine.trial_places or None,
            ),
            pairs=pairs,
            drain=self._drain(member, ledger_engine, now),
            labels=dict(member.settings.labels),
            waits=pool.revisions.waiting().get(ledger_engine.revision),
            slow=slow.get(url, []),
        )

    def _drain(self, member: Member, engine: LedgerEngine, now: float) -> EngineDrain | None:
        if (drain := member.drain) is None:
            return None
        left = max(0.0, drain.deadline - now)
        waits_for = "requests" if engine.requests else "kv"
        over = member.state(engine) is MemberState.DRAINED
        return EngineDrain(
            drain.by,
            round(now - drain.since, 1),
            0.0 if over else round(left, 1),
            drain.removes,
            None if over else waits_for,
        )


def _load(engine: Engine) -> EngineLoad:
    known = engine.in_ledger
    return EngineLoad(*known.known_load, known.window, engine.kv_usage if known.up else None)


def _why(engine: LedgerEngine, now: float) -> str | None:
    """Return why an engine is not up."""
    found = engine.down_because or engine.draining or engine.stalled or engine.asleep
    if found is not None:
        return truncate(found, 1000)
    if now < engine.open_until:
        return engine.excluded_because or f"failed {engine.failures} times in a row"
    if engine.half_open(now):
        return "gets one request at a time until one shows that it serves again"
    faults = [] if engine.transfers is None else engine.transfers.of(engine.url)
    return "; ".join(f"{MOVES_NOT.words}: {fault.tells(now)}" for fault in faults) or None


def _pairs(engine: LedgerEngine, ledger_engines: Sequence[LedgerEngine], shown: int) -> EnginePairs:
    """Compare an engine with those that could share a prompt with it by their roles."""
    paired, count, wrong = 0, 0, list[NotPaired]()
    for other in ledger_engines:
        why = _difference(engine, other)
        if why is None:
            paired += 1
        elif why:
            count += 1
            if len(wrong) < shown:
                wrong.append(NotPaired(other.url, truncate(why, 1000)))
    return EnginePairs(paired, wrong, count)


def _difference(engine: LedgerEngine, other: LedgerEngine) -> str | None:
    """Return why two engines share no prompt, None if they do, "" if their roles or revisions are
    not for that.
    """
    if engine is other or engine.revision != other.revision:
        return ""
    found: str | None = ""
    for prefill, decode in ((engine, other), (other, engine)):
        if Role.PREFILL in prefill.uses and Role.DECODE in decode.uses:
            found = may_share(prefill, decode)
            if found is None:
                return None
    return found
