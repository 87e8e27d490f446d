"""What the scheduler knows of an engine: what was configured, what was seen, and what is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pdproxy.kit.text import truncate


class Role(Enum):
    """What an engine is for. An aggregated engine prefills and decodes, and never takes a KV handle."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"

    __hash__ = object.__hash__  # its members are one of a kind; Enum's own costs a call in Python at each lookup


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """An engine as configured. `url` is `http://host:port` and the engine's identity.

    `sources` are the prefill engines whose KV a decode engine takes, by url; empty: every one's.
    """

    url: str
    role: Role
    sources: frozenset[str] = frozenset()

    def takes_from(self, prefill: NodeSpec) -> bool:
        """Tell whether the two were configured to work together."""
        return not self.sources or prefill.url in self.sources


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an engine said of itself when it was last asked.

    `models` are the names it serves (adapters included), `roots` what its base models were loaded from,
    `block_size` tokens a KV block, `canary` the token ids of a fixed prompt and chat for each base model,
    `template_tokens` how many tokens its chat template adds to one message at the most, `started` the engine's start in
    Unix seconds (a change means a restart), 0 where it doesn't say.
    """

    models: frozenset[str]
    version: str
    block_size: int | None
    canary: tuple[tuple[int, ...], ...]
    template_tokens: int
    started: float

    def same_run(self, later: Evidence, *, was_down: bool) -> bool:
        """Tell whether one run of the engine said both. Where no start tells, only if nothing changed and it was never down."""
        if self.started and later.started:
            return self.started == later.started
        return self == later and not was_down

    def difference(self, other: Evidence) -> str | None:
        """Return why two engines may not share a prompt's KV, None if they are alike."""
        if not self.models & other.models:
            return f"no model in common ({_names(self.models)} / {_names(other.models)})"
        if self.version != other.version:
            return f"different versions ({self.version} / {other.version})"
        if self.block_size != other.block_size:
            return f"different block sizes ({self.block_size} / {other.block_size})"
        if self.canary != other.canary:
            return "different token ids for the same canary prompt: another tokenizer or chat template"
        return None


def _names(models: frozenset[str]) -> str:
    return truncate(",".join(sorted(models))) or "none"


@dataclass(slots=True)
class Node:
    """An engine's mutable state. Owned by the Ledger: nothing else writes to it."""

    spec: NodeSpec
    evidence: Evidence | None = None
    runs: int = 0
    """How many runs of the engine were seen."""
    down_because: str | None = "not probed yet"
    down_since: float = 0.0
    probed: bool = False
    requests: int = 0
    prompt_bytes: int = 0
    failures: int = 0
    closed_until: float = 0.0
    ejected: set[str] = field(default_factory=set)
    load: int = 0
    """What its role is ranked by, less is better: a prefill engine by prompt bytes, others by requests; then by the other."""
    places: list[tuple[list[int], int]] = field(default_factory=list, repr=False)
    """Where the ledger keeps `load` beside those of others, for choosing."""

    @property
    def url(self) -> str:
        """The engine's identity."""
        return self.spec.url

    @property
    def role(self) -> Role:
        """What the engine is for."""
        return self.spec.role

    def serves(self, model: str) -> bool:
        """Tell whether the engine named a model when it was last asked."""
        return self.evidence is not None and model in self.evidence.models

    @property
    def alive(self) -> bool:
        """Whether the engine was well when it was last probed."""
        return self.down_because is None and self.evidence is not None

    def usable(self, now: float) -> bool:
        """Tell whether a request should be sent to the engine: alive, and its breaker not open."""
        return self.alive and now >= self.closed_until

    def down_for(self, now: float) -> float:
        """Return for how many seconds the engine has been down, 0 if it is up."""
        return now - self.down_since if self.down_because is not None else 0.0
