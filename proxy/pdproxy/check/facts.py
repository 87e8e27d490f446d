"""The facts about the engines that the rules judge. Plain values, so that every rule can be tested
without an engine.

Times are in seconds, sizes in tokens; `None` means unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from pdproxy.check.metrics import EngineMetrics
from pdproxy.scheduling.ledger_engine import Evidence
from pdproxy.settings.engines import NodeRole
from pdproxy.settings.schema import Settings
from pdproxy.transfer.detect import DetectedContract, Undecided

TroubleKind = Literal["unreachable", "tls", "silent", "broken", "unhealthy", "key"]
"""No connection; no TLS, or a certificate that is not trusted; no answer in time; an answer that is
not HTTP or not JSON; an unhealthy health route; a refused key.
"""
Reach = Literal["open", "closed", "unresolvable", "untried"]


class Trouble(msgspec.Struct, frozen=True):
    """Why an engine could not be asked any more."""

    kind: TroubleKind
    text: str


class Card(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`. `parent` names an adapter's base model."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class Generated(msgspec.Struct, frozen=True):
    """An engine's greedy completion of a prompt. `details`: whether its usage reports how much was
    cached.
    """

    text: str
    ids: tuple[int, ...] = ()
    details: bool = False
    created: float = 0.0
    kept: bytes | None = None
    """`kv_transfer_params`, if the engine keeps its KV for the next prompt."""

    def same(self, other: Generated) -> bool:
        """Return whether two completions are the same, by their ids where both have them."""
        return self.ids == other.ids if self.ids and other.ids else self.text == other.text


class Side(msgspec.Struct, frozen=True):
    """The side channel that a prefill engine's handles name. `reach`: the result of a connection
    from this machine.
    """

    engine_id: str
    host: str
    port: int
    mode: str = "pull"
    addresses: frozenset[str] = frozenset()
    reach: Reach = "untried"


class HandleExpiry(msgspec.Struct, frozen=True):
    """A handle that was not used for a while. `ended`: when its lease ended, None if it lasted
    longer than `watched`.
    """

    watched: float
    ended: float | None = None


class LoadFailurePolicy(msgspec.Struct, frozen=True):
    """What a decode engine does when KV can't be loaded. `answer` None: not tried, or neither was
    seen.
    """

    answer: Literal["fail", "recompute"] | None = None
    why_not: str = ""


class Encoding(msgspec.Struct, frozen=True):
    """How an encoder engine answered to a picture. `why_not`: why no other engine can use its
    output, "" if one can; `tokens`: how many it generated.
    """

    why_not: str = ""
    tokens: int = 0


class EngineFacts(msgspec.Struct, kw_only=True):
    """One engine. With `trouble` set, what follows it may be missing."""

    url: str
    role: NodeRole
    sources: frozenset[str] = frozenset()
    """URLs of the prefill engines whose KV it takes; empty: all of them."""
    trouble: Trouble | None = None
    version: str = ""
    cards: tuple[Card, ...] = ()
    metrics: EngineMetrics | None = None
    """The first reading."""
    restarted: bool = False
    """Its start time changed during the check, or two of its handles name different engines."""
    block_size: int | None = None
    """As configured, else from its metrics."""
    canary: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    """For each base model the token ids of the canary as a prompt and as a chat; empty where the
    engine refused.
    """
    completions: tuple[Generated, ...] = ()
    """Its completions of the canary prompts."""
    no_output: str = ""
    """Why it did not generate."""
    encoding: Encoding | None = None
    """None: no encoder engine, or not asked."""
    addresses: frozenset[str] = frozenset()
    """IP addresses of its URL's host."""
    clock_skew: float = 0.0
    """How far its clock is at least ahead of ours; its header has whole seconds."""
    side: Side | None = None
    no_handle: str = ""
    """P: why its answer to a prefill leg gave no usable handle."""
    lease: HandleExpiry | None = None
    policy: LoadFailurePolicy | None = None

    @property
    def is_proxy(self) -> bool:
        """Whether it is a pdproxy, not an engine."""
        return self.metrics is not None and self.metrics.pdproxy

    @property
    def could_be_asked(self) -> bool:
        """Whether it is an engine that could be asked."""
        return self.trouble is None and not self.is_proxy

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence that it accepts."""
        return max((card.max_model_len for card in self.cards if card.max_model_len), default=None)

    @property
    def names(self) -> frozenset[str]:
        """All models that it serves, adapters included."""
        return frozenset(card.id for card in self.cards)

    @property
    def base_names(self) -> frozenset[str]:
        """The models that it serves, without adapters."""
        return frozenset(card.id for card in self.cards if card.parent is None)

    def evidence(self) -> Evidence:
        """Return what the proxy's own scheduler would know about it."""
        ids = tuple(part for name in sorted(self.canary) for part in self.canary[name])
        return Evidence(self.names, self.version, self.block_size, ids, 0, 0.0)


PairEnd = Literal["untried", "no_handle", "refused", "silent", "answered"]


Back = Literal["nothing", "kept", "used", "unsure"]
"""What is handed back: D keeps nothing of its answer; D keeps it; D keeps it, and P uses it; D
keeps it, and was too busy for more questions.
"""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One request through a pair. Token counts are from D's own counters; `due` is what should have
    moved.
    """

    end: PairEnd
    text: str = ""
    """Why it was not tried, or what the engine sent instead of an answer."""
    prompt_tokens: int = 0
    due: int = 0
    moved: int = 0
    failed: int = 0
    """KV transfers that D counted as failed during the request."""
    answer: Generated | None = None
    alone: Generated | None = None
    """D's own completion of the same prompt, without P's KV."""
    seconds: float = 0.0
    """From the decode leg's request to its whole answer."""
    kept: bool = False
    """P still held KV at the end, although the handle was loaded or released."""
    counted: bool = True
    """Whether D's counters could be read before and after."""
    back: Back = "nothing"

    @property
    def differs(self) -> bool:
        """Whether the split answer differs from D's own."""
        return (
            self.answer is not None and self.alone is not None and not self.answer.same(self.alone)
        )

    @property
    def kv_moved(self) -> bool:
        """Whether the KV moved."""
        return self.end == "answered" and self.counted and self.moved >= self.due > 0


class PairFacts(msgspec.Struct, kw_only=True):
    """A prefill and a decode engine together. There is a second try if the first answer
    differed.
    """

    prefill: str
    decode: str
    tries: tuple[Split, ...] = ()

    @property
    def last(self) -> Split:
        """The last try, which is the one that is judged."""
        return self.tries[-1]


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that the check runs on. `files`: the hard limit of open files per process, None:
    no limit.
    """

    proxies: Mapping[str, str] = {}
    """Environment variables that name HTTP proxies, with their values (no passwords)."""
    bypassed: frozenset[str] = frozenset()
    """Engines' URLs that `no_proxy` excludes."""
    files: int | None = None
    files_needed: int = 0


class CheckFacts(msgspec.Struct, kw_only=True):
    """All facts. Engines and pairs are in the order of the settings."""

    settings: Settings
    engines: list[EngineFacts]
    pairs: list[PairFacts] = []
    machine: MachineFacts = MachineFacts()
    connector: DetectedContract | Undecided | None = None
    """With connector `auto`: the one that the engines show. None: the settings name one."""
    timeout: float = 10.0

    def by_role(self, *roles: NodeRole) -> list[EngineFacts]:
        """Return the engines of these roles that could be asked. One for any role has all of
        them.
        """
        return [
            engine
            for engine in self.engines
            if engine.role in (*roles, "any") and engine.could_be_asked
        ]

    @property
    def aggregated(self) -> list[EngineFacts]:
        """The aggregated engines that could be asked, without those for any role."""
        return [
            engine
            for engine in self.engines
            if engine.role == "aggregated" and engine.could_be_asked
        ]

    def engine(self, url: str) -> EngineFacts:
        """Return an engine by its URL."""
        return next(engine for engine in self.engines if engine.url == url)

    def asked_pairs(self) -> Iterator[tuple[PairFacts, EngineFacts, EngineFacts]]:
        """Yield the pairs with a result, each with its engines."""
        for pair in self.pairs:
            if pair.tries:
                yield pair, self.engine(pair.prefill), self.engine(pair.decode)
