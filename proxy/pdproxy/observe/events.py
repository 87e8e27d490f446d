"""The events that pdproxy emits, and the protocol of those who hear them.

Events say what happened in the past tense and hold plain values only. Observers are called in the event loop, once a
request or a state change and never once a chunk, and must not raise or wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds of the buckets in which gaps between tokens are counted."""


class Gaps(msgspec.Struct):
    """Gaps between stream events of one request, counted in buckets (one more than `ITL_BOUNDS`), `total` in seconds."""

    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(ITL_BOUNDS) + 1))
    total: float = 0.0


class LegTimes(msgspec.Struct, frozen=True):
    """One prompt's way: engines by url, durations in seconds, None where a phase did not happen.

    `prefill_s` from the prefill leg's start to its answer, `kv_s` from the decode leg's start to its first data (the
    transfer and the first step), `why_alone` the rule or failure by which one engine served it.
    """

    prefill: str | None = None
    decode: str | None = None
    why_alone: str | None = None
    prefill_s: float | None = None
    kv_s: float | None = None
    attempts: int = 1


class RequestEnded(msgspec.Struct, frozen=True):
    """A request is over. `outcome` is "ok", "client_left", or the fault that ended it; `first_s` is the time to first token."""

    request_id: str
    endpoint: str
    model: str | None
    outcome: str
    status: int
    legs: Sequence[LegTimes]
    queue_s: float
    first_s: float | None
    total_s: float
    prompt_tokens: int | None
    completion_tokens: int | None
    gaps: Gaps
    error: str | None = None


class ServedAlone(msgspec.Struct, frozen=True):
    """A prompt was given to one engine alone."""

    reason: str


class DeadlinePassed(msgspec.Struct, frozen=True):
    """A wait ended by its deadline."""

    wait: str
    node: str | None = None


class HandleEnded(msgspec.Struct, frozen=True):
    """A KV handle is over. `end`: loaded, released, refused (the decode engine released it), aborted or lost."""

    end: str
    prefill: str
    age_s: float


class LegFailed(msgspec.Struct, frozen=True):
    """A leg to an engine failed; `will_retry` says whether another engine is asked."""

    request_id: str
    node: str
    phase: str
    error: str
    will_retry: bool


class NodeChanged(msgspec.Struct, frozen=True):
    """An engine came up, went down or was shut out."""

    node: str
    role: str
    up: bool
    reason: str


class PairEjected(msgspec.Struct, frozen=True):
    """Two engines counted different prompt lengths for one request and are not paired again."""

    prefill: str
    decode: str
    prefill_tokens: int
    decode_tokens: int


class KvShortfall(msgspec.Struct, frozen=True):
    """A decode engine received fewer prompt tokens by KV transfer than were sent to it: it recomputed them, silently."""

    node: str
    tokens: int
    expected: int


class KvCounted(msgspec.Struct, frozen=True):
    """A scrape accounted for prompt tokens that should have moved to a decode engine."""

    node: str
    moved: int
    missing: int


class KvNoticed(msgspec.Struct, frozen=True):
    """An engine told something of a KV transfer. `result`: what became of it.

    awaited; double (its rank had been heard); early (nobody waits yet); late (nobody waits any more); unknown (early, and
    nobody came); undecodable. Of a handle's later life: known, or over (it had ended for us).
    """

    event: str
    result: str


class KvTransferred(msgspec.Struct, frozen=True):
    """A decode engine told that it has loaded a prompt's KV: in how many seconds, and how many bytes; None: it doesn't say."""

    seconds: float | None
    bytes: int | None


class KvWaited(msgspec.Struct, frozen=True):
    """A wait for notices of a prefill engine is over. `result`: ready or timeout; `missing`: the ranks that were silent."""

    node: str
    result: str
    seconds: float
    missing: Sequence[str] = ()


class Tokenized(msgspec.Struct, frozen=True):
    """A prompt was to become token ids before an engine sees it.

    `source`: here, or an engine (its `/tokenize`); `result`: ok, unsure (only an engine can tell what it would make of the
    request), rejected (by the template, or by the engine), late, busy or failed; `seconds` from the wish to the result.
    """

    source: str
    result: str
    seconds: float
    tokens: int = 0


class TokenizerJudged(msgspec.Struct, frozen=True):
    """An engine's token ids of canary prompts were compared with ours. `agrees` None: there was nothing to compare.

    Unless they agree, prompts are not tokenized here for it.
    """

    node: str
    model: str
    agrees: bool | None
    reason: str


class Evicted(msgspec.Struct, frozen=True):
    """Something was taken from a client that held more than its share while others waited.

    `what`: queue (a request that waited for a place), body (one that was not whole), connection (an idle one), reader (an
    stream that was read too slowly), answer (a whole one that was not read).
    """

    what: str


class LoopBeat(msgspec.Struct, frozen=True):
    """The event loop was to call back at a certain time, and did so this many seconds later.

    `swallowed`: at that time it was held up by what an event before this one has reported.
    """

    late_s: float
    swallowed: bool = False


Event = (
    RequestEnded
    | Evicted
    | LoopBeat
    | ServedAlone
    | DeadlinePassed
    | HandleEnded
    | LegFailed
    | NodeChanged
    | PairEjected
    | KvShortfall
    | KvCounted
    | KvNoticed
    | KvTransferred
    | KvWaited
    | Tokenized
    | TokenizerJudged
)


class Observer(Protocol):
    """Hears events."""

    def notify(self, event: Event) -> None:
        """Take note of an event, quickly."""


class Observers:
    """Passes each event to all observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def add(self, *observers: Observer) -> None:
        """Pass events to more observers, after those that are there."""
        self._observers += observers

    def notify(self, event: Event) -> None:
        """Tell every observer."""
        for observer in self._observers:
            observer.notify(event)
