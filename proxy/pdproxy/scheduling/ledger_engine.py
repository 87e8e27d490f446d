"""What the scheduler knows about an engine: its configuration, the result of probes, and its
load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from pdproxy.kit.text import truncate
from pdproxy.scheduling.transfer_faults import TransferFaults


class Role(Enum):
    """What an engine is for, or what it does for one request: then not `ANY`.

    An encoder engine encodes media for others. An aggregated engine prefills and decodes, and never
    takes a KV handle. An engine for `ANY` may do all but encode for others, for different requests
    at the same time: it prefills for another engine, decodes for another one, or serves a request
    whole.
    """

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    ANY = "any"

    # each member exists once; Enum's own hash is a Python call at each lookup
    __hash__ = object.__hash__


ENCODE, PREFILL, DECODE = Role.ENCODE, Role.PREFILL, Role.DECODE
"""For what each request does: a look-up in an enumeration costs ten times as much as one in a
module.
"""

_USES = {
    Role.ENCODE: frozenset({Role.ENCODE}),
    Role.PREFILL: frozenset({Role.PREFILL}),
    Role.DECODE: frozenset({Role.DECODE}),
    Role.AGGREGATED: frozenset({Role.AGGREGATED}),
    Role.ANY: frozenset({Role.PREFILL, Role.DECODE, Role.AGGREGATED}),
}
_PREFILL_OR_WHOLE = frozenset({Role.PREFILL, Role.AGGREGATED})
ALL_USES = (*_USES.values(), _PREFILL_OR_WHOLE)
"""What `LedgerEngine.uses` can be."""
_FOR_OTHERS = frozenset({Role.ENCODE, Role.PREFILL})
"""The roles whose engines answer no client, but for prefill engines that may serve whole."""

REVISION = "revision"
"""The label by which engines share work unless the settings name others. While engines have several
values of it, `scheduling.revisions` chooses among these, too.
"""

STATES = (
    "up",
    "down",
    "draining",
    "stalled",
    "asleep",
    "excluded",
    "half_open",
    "kv_failing",
    "slow_start",
)
"""What `LedgerEngine.state` can be."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as configured. `url` is `http://host:port` and the engine's identity.

    `sources` are the URLs of the prefill engines whose KV a decode engine takes; empty: all of
    them. `places`: how many requests it may have before it gets no more prompts with another
    engine's KV; None: any number. `serves_whole`: whether a prefill engine may serve requests
    whole, too. `within`: some of its labels, with their values: it shares work only with engines
    that have the same.
    """

    url: str
    role: Role
    sources: frozenset[str] = frozenset()
    places: int | None = None
    serves_whole: bool = False
    within: tuple[tuple[str, str | None], ...] = ()

    @property
    def revision(self) -> str | None:
        """Its revision, None if it has none or may share work with those of another one."""
        return dict(self.within).get(REVISION)

    def takes_from(self, prefill: EngineSpec) -> bool:
        """Return whether this decode engine is configured to work with a prefill engine."""
        return self.has_source(prefill.url) and self.within == prefill.within

    def has_source(self, prefill: str) -> bool:
        """Return whether this decode engine takes the KV of the prefill engine of this URL,
        wherever that is.
        """
        return not self.sources or prefill in self.sources


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an engine reported about itself at its last full probe.

    `models`: the names that it serves, adapters included. `block_size`: tokens in a KV block, None
    where unknown. `canary`: the token ids of a fixed prompt and a fixed chat, for each base model.
    `template_tokens`: the largest number of tokens that its chat template adds to one message.
    `started`: when it was started, in Unix seconds (another value means a restart); 0 where it
    reports none. `max_model_len`: how many tokens a prompt and its answer may have together, None
    where unknown. `adapters`: those of the models that are LoRA adapters. `kv_blocks`: how many KV
    blocks it has, None where unknown. `derenders`: it can parse a chat behind any of its tokens
    (`--enable-scale-out` with a parser). `counts`: how many tokens a fixed message has, for each
    base model; None where that is not known, empty where nobody asks.
    `caches_prefixes`: a prompt that comes again finds its KV there.
    """

    models: frozenset[str]
    version: str
    block_size: int | None
    canary: tuple[tuple[int, ...], ...]
    template_tokens: int
    started: float
    max_model_len: int | None = None
    adapters: frozenset[str] = frozenset()
    kv_blocks: int | None = None
    derenders: bool = False
    counts: tuple[int | None, ...] = ()
    caches_prefixes: bool = False

    def same_run(self, later: Evidence, *, was_down: bool) -> bool:
        """Return whether both come from one run of the engine.

        Without start times: only if nothing changed and the engine was not down in between.
        """
        if self.started and later.started:
            return self.started == later.started
        return self == later and not was_down

    def difference(self, other: Evidence) -> str | None:
        """Return why two engines may not share a prompt's KV, None if they may."""
        if not self.models & other.models:
            return f"no model in common ({_names(self.models)} / {_names(other.models)})"
        if self.version != other.version:
            return f"different versions ({self.version} / {other.version})"
        if self.block_size != other.block_size:
            return f"different block sizes ({self.block_size} / {other.block_size})"
        if self.canary != other.canary:
            return (
                "different token ids for the same canary prompt: another tokenizer or chat template"
            )
        if self._counts_otherwise(other):
            return "different lengths of the same canary message: other options for /v1/messages"
        return None

    def renders_as(self, other: Evidence) -> bool:
        """Return whether two engines make the same of what is fixed, as far as they can be
        compared.
        """
        if not self.models & other.models:
            return True
        return self.canary == other.canary and not self._counts_otherwise(other)

    def _counts_otherwise(self, other: Evidence) -> bool:
        """Return whether two engines are known to count the fixed message differently."""
        pairs = zip(self.counts, other.counts, strict=False)
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def _names(models: frozenset[str]) -> str:
    return truncate(",".join(sorted(models))) or "none"


@dataclass(slots=True, eq=False)
class LedgerEngine:
    """An engine's mutable state. Only the ledger writes to it, but for `window`; policies read
    it.
    """

    spec: EngineSpec
    url: str = field(init=False, repr=False)
    """The engine's identity."""
    role: Role = field(init=False, repr=False)
    """What the engine is for."""
    uses: frozenset[Role] = field(init=False, repr=False)
    """What it may do for a request; a decode engine may also serve whole where the contract allows
    it.
    """
    revision: str | None = field(init=False, repr=False)
    """Its revision, None if that does not count."""
    for_others: bool = field(init=False, repr=False)
    """Whether it only works for other engines, and answers no client."""
    evidence: Evidence | None = None
    """What its last full probe found, also while it is down. None: never probed with success."""
    run_number: int = 0
    """The number of its present run: no two runs of any engines of a ledger have the same. A
    restart begins another one.
    """
    down_because: str | None = "not probed yet"
    """Why it is down, None while it is up."""
    down_since: float = 0.0
    """When it went down, in monotonic seconds."""
    probed: bool = False
    """Whether any probe has ended, with success or not."""
    requests: int = 0
    """Open leases."""
    prompt_bytes: int = 0
    """The sum of the open leases' prompt bytes."""
    of_replicas: tuple[int, int] = (0, 0)
    """The part of `requests` and of `prompt_bytes` that is an estimate of other replicas' leases; 0
    in a `Ledger`.
    """
    lent: tuple[int, int] = (0, 0)
    """The part that other processes of this proxy have asked for."""
    window: float | None = None
    """How many requests it should have at once, None for any number. Written by `app.capacity`."""
    failures: int = 0
    """Failed legs since the last good one."""
    open_until: float = 0.0
    """When its breaker's cooldown ends, in monotonic seconds; 0 while the breaker is closed, and in
    a slow start.
    """
    excluded_because: str | None = None
    """Why its breaker was opened, None if for failures in a row."""
    trial_places: int = 0
    """How many requests it may have behind the cooldown: 1 until one was good, more in a slow
    start; 0: any number.
    """
    trials: int = 0
    """Open leases of these."""
    trial_number: int = 0
    """The number of its last time of trials, 0 before the first one."""
    slow_until: float = 0.0
    """When its slow start ends, in monotonic seconds; 0: it is in none."""
    stalled: str | None = None
    """Why it gets no requests although it answers probes; None: it does not stand still."""
    asleep: str | None = None
    """How it sleeps, as it reports itself; None: it is awake."""
    draining: str | None = None
    """Why it gets no more requests although it serves those that it has; None: it is not being
    drained.
    """
    kv_not_ready: str | None = None
    """Why it can't take part in KV transfer yet, None if it can."""
    kv_mode: str | None = None
    """The direction of its transfers in its connector's own words, None if that connector has only
    one.
    """
    kv_tp_size: int | None = None
    """The tensor-parallel size that it reports, None if its connector reports none."""
    ejected: set[str] = field(default_factory=set)
    """URLs of engines that it must not work with."""
    transfers: TransferFaults | None = field(default=None, repr=False)
    """What its ledger knows of KV that does not move. None: the engine is in no ledger."""

    def __post_init__(self) -> None:
        # Attributes, not properties: every request reads them several times.
        self.url, self.role = self.spec.url, self.spec.role
        self.revision = self.spec.revision
        also_whole = self.role is Role.PREFILL and self.spec.serves_whole
        self.uses = _PREFILL_OR_WHOLE if also_whole else _USES[self.role]
        self.for_others = self.uses <= _FOR_OTHERS

    def serves(self, model: str) -> bool:
        """Return whether the engine named a model at its last full probe."""
        return self.evidence is not None and model in self.evidence.models

    @property
    def up(self) -> bool:
        """Whether the engine was up at its last probe."""
        return self.down_because is None and self.evidence is not None

    @property
    def available(self) -> bool:
        """Whether the engine may get requests at all: it is up and awake, does not stand still, and
        is not being drained.
        """
        in_use = (
            self.down_because is None
            and self.stalled is None
            and self.asleep is None
            and self.draining is None
        )
        return in_use and self.evidence is not None

    @property
    def returns(self) -> bool:
        """Whether the engine may get requests, at the latest once it moves again."""
        return self.down_because is None and self.draining is None and self.evidence is not None

    @property
    def full(self) -> bool:
        """Whether all its places are taken."""
        return self.spec.places is not None and self.requests >= self.spec.places

    @property
    def crowded(self) -> bool:
        """Whether it has as many of our requests as it should: engines with room are better."""
        return self.window is not None and self.known_load[0] >= self.window

    def usable(self, now: float) -> bool:
        """Return whether the engine is in use: it is available, and its breaker is not open."""
        return self.available and now >= self.open_until

    def takes(self, now: float) -> bool:
        """Return whether a request should be sent to the engine: it is in use, and its breaker
        leaves it a place.
        """
        return self.usable(now) and (not self.trial_places or self.trials < self.trial_places)

    def half_open(self, now: float) -> bool:
        """Return whether its cooldown is over, and no request has shown yet that it serves
        again.
        """
        return self.trial_places == 1 and now >= self.open_until

    @property
    def known_load(self) -> tuple[int, int]:
        """Open leases of this proxy, as far as this process knows them, and their prompt bytes."""
        requests, size = self.of_replicas
        return self.requests - requests, self.prompt_bytes - size

    @property
    def own_load(self) -> tuple[int, int]:
        """Open leases of requests that this process serves, and their prompt bytes."""
        (requests, size), (lent, lent_size) = self.known_load, self.lent
        return requests - lent, size - lent_size

    def lend(self, requests: int, prompt_bytes: int) -> None:
        """Note so many more leases of other processes."""
        self.lent = self.lent[0] + requests, self.lent[1] + prompt_bytes

    def state(self, now: float) -> str:
        """Return which of `STATES` the engine is in."""
        if self.down_because is not None:
            return "down"
        if self.draining is not None:
            return "draining"
        if self.stalled is not None:
            return "stalled"
        if self.asleep is not None:
            return "asleep"
        if now < self.open_until:
            return "excluded"
        if self.half_open(now):
            return "half_open"
        if self.transfers is not None and self.transfers.of(self.url):
            return "kv_failing"
        return "slow_start" if now < self.slow_until else "up"

    def down_for(self, now: float) -> float:
        """Return for how many seconds the engine has been down, 0 if it is up."""
        return now - self.down_since if self.down_because is not None else 0.0


def in_common(engines: Iterable[LedgerEngine]) -> tuple[int | None, frozenset[str], int, bool]:
    """Return what the evidence of all engines with KV says: the smallest KV block, all adapters,
    the longest template, whether prefixes are cached. See `Ledger`.
    """
    found = [(engine.evidence, engine.uses) for engine in engines if engine.role is not ENCODE]
    known = [one for one, _ in found if one is not None]
    caching = all(one.caches_prefixes for one, uses in found if one and Role.DECODE in uses)
    block_size = min((one.block_size for one in known if one.block_size), default=None)
    adapters = frozenset[str]().union(*(one.adapters for one in known))
    return block_size, adapters, max((one.template_tokens for one in known), default=0), caching
