"""The events that pdproxy emits, and the protocol of their observers.

Events have names in the past tense and hold plain values only. Observers are called in the event
loop, once per request or state change and never per chunk, and must not raise or wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from pdproxy.kit.errors import Wait
from pdproxy.observe.description import Description, Label, Samples, counter
from pdproxy.observe.weighed import Weighed

ITL_BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
"""Upper bounds in seconds of the buckets in which gaps between tokens are counted."""


class Gaps(msgspec.Struct):
    """Gaps between stream events of one request, counted in buckets (one more than `ITL_BOUNDS`),
    `total` in seconds.
    """

    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(ITL_BOUNDS) + 1))
    total: float = 0.0


class LegTimes(msgspec.Struct, omit_defaults=True):
    """The legs of one prompt's last attempt so far: engines by URL, durations in seconds, None if a
    phase did not happen.

    `why_alone`: the rule or failure because of which one engine served it alone. `tokenize_s`: for
    which it waited for the prompt's token ids, before its first attempt. `encode_s`: from
    asking encoder engines for its media to the last answer, and `encoders` those that answered,
    each with its seconds. `prefill_s`: from
    the prefill leg's start to its answer. Of a stream, `first_s`: from asking the engine that
    answers to its first data (after a prefill by another engine: the KV transfer and one step; two
    for several answers), and `decode_s`: from there to the stream's end. Of an answer that is not
    streamed, `whole_s`: from asking to the whole answer. Where both engines were asked at once,
    both count from the prefill engine's answer, and `overlap_s` is the time in which both had been
    asked before that. `attempts`: how often engines were asked for it. `decision`: the placement's
    reason, None where the pool has none; `weighed`: what it was based on, None where it predicts
    nothing.

    `continued`: how often another engine went on with the stream; `continued_by`: the kind of
    failure that first cut it; `pause_s`: seconds without data because of that. `beside_idle`:
    whether a decode engine served it alone although a prefill engine had no request.
    """

    prefill: str | None = None
    decode: str | None = None
    why_alone: str | None = None
    prefill_s: float | None = None
    first_s: float | None = None
    decode_s: float | None = None
    whole_s: float | None = None
    overlap_s: float | None = None
    attempts: int = 0
    decision: str | None = None
    weighed: Weighed | None = None
    continued: int = 0
    continued_by: str | None = None
    pause_s: float | None = None
    encode_s: float | None = None
    encoders: tuple[tuple[str, float], ...] = ()
    beside_idle: bool = False
    tokenize_s: float | None = None


class RequestEnded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request has ended. `outcome` is "ok", "client_left", or the fault that ended it.

    `first_s`: seconds to the first data of a stream; None for other answers. `stream`: whether the
    client asked for one, None if that is not known. `client`: its address; `key`: the name of its
    API key, None without keys. `reason`: why it was refused, one of `kit.errors.RefusalReason`;
    None for all other ends. `tenant`: to whom its tokens count, None where nobody has a name.
    """

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
    method: str = "POST"
    stream: bool | None = None
    client: str | None = None
    key: str | None = None
    reason: str | None = None
    tenant: str | None = None


class Refused(msgspec.Struct, frozen=True):
    """A request was refused before its body was complete, or for its key; or a connection was.

    `reason`: as in pdproxy_early_refusals_total; `client`: the client's address. `overload`: one of
    `kit.errors.RefusalReason`, None if the same request would be refused at any time.
    """

    reason: str
    client: str
    overload: str | None = None


class ServedAlone(msgspec.Struct, frozen=True):
    """A prompt was given to one engine alone."""

    reason: str


ALONE = (
    ("n", "several choices, to several prompts, or where no decode engine keeps what it loads"),
    ("echo", "the client wants its prompt back"),
    ("prompt_logprobs", "the client wants log probabilities of its prompt"),
    ("beam_search", "beam search"),
    ("non_text", "media that the body only names or the connector cannot take, or unknown parts"),
    ("prompt_ids", "the prompt comes as token ids in kv_transfer_params"),
    ("built_in_tools", "the request names a tool that an engine may run by itself"),
    ("route", "the connector cannot work on this route"),
    ("short_prompt", "the prompt is too short to be split"),
    ("unusual", "a request that cannot be split for another reason"),
    ("no_pair", "no prefill engine was free or could be paired with a decode engine"),
    ("not_encoded", "media were not encoded, and the connector's engines cannot do so themselves"),
    ("prefill_refused", "a prefill engine refused the prompt"),
    ("prefill_failed", "the prefill failed"),
    ("no_handle", "the prefill engine gave no usable handle"),
    ("no_tokens", "the prompt's token ids, which the connector needs, could not be made"),
    ("kv_buffer", "the KV does not fit into a receive buffer"),
    ("kv_late", "the notice that the KV is ready did not come in time"),
    ("kv_failed", "decode engines could not load the KV of this prompt, and one try was left"),
    ("first_token", "the prefill engine's first token cannot begin the answer"),
    ("decided", "the placement chose one engine: the prompt could have been split"),
)
ALONES = counter(
    "pdproxy_alone_total",
    "prompts",
    "Prompts given to one engine alone on routes that can be split; one counts again if its "
    "reason changes",
    Label("reason", ALONE),
    of=ServedAlone,
)


class MediaEncoded(msgspec.Struct, frozen=True):
    """The encoder stage of a prompt is over. `result`: as in pdproxy_encoded_media_total; `count`:
    media with this result.
    """

    result: str
    count: int


ENCODED = (
    ("encoded", "an encoder engine has encoded it, or had done so before"),
    ("refused", "an encoder engine refused it, or made two outputs where only one can be pushed"),
    ("failed", "the encoder engines that were asked failed"),
    ("late", "the output was not there in time (deadlines.encode)"),
    ("no_engine", "no encoder engine could be asked"),
)
ENCODED_MEDIA = counter(
    "pdproxy_encoded_media_total",
    "media",
    "Media of prompts in pools with encoder engines, by what came of the encoder stage; the engine "
    "that computes the prompt encodes the others, where its connector lets it",
    Label("result", ENCODED),
    of=MediaEncoded,
    by="count",
)


class Decided(msgspec.Struct, frozen=True):
    """A placement has decided about an attempt. `choice`: whole, split or refused; `reason`: one of
    a few words of its own.
    """

    choice: str
    reason: str


class StreamContinued(msgspec.Struct, frozen=True):
    """The engine of a stream has failed. `result`: as in pdproxy_continuations_total.

    `reason`: the kind of failure if the client gets its whole answer all the same, else why it does
    not. `seconds`: without data, where another engine has gone on.
    """

    result: str
    reason: str
    seconds: float | None = None
    request_id: str = ""


class DeadlinePassed(msgspec.Struct, frozen=True):
    """A wait ended by its deadline."""

    wait: str
    node: str | None = None


_OTHER_WAITS = {
    Wait.STALLED: "health.stalled_after",
    Wait.ENGINE: "deadlines.queue, for an engine that stands still",
    Wait.CANARY: "health.canary_timeout",
    Wait.DNS: "dns.timeout",
    Wait.KUBERNETES: "kubernetes.timeout",
    Wait.WATCH: "kubernetes.silence",
    Wait.PONG: "20 s, for a WebSocket's client that answers no ping",
}
WAITS = tuple((wait.value, _OTHER_WAITS.get(wait, f"deadlines.{wait.value}")) for wait in Wait)
DEADLINES = counter(
    "pdproxy_deadline_total",
    "waits",
    "Waits ended by their deadline",
    Label("wait", WAITS),
    of=DeadlinePassed,
)


class SilenceAllowed(msgspec.Struct, frozen=True):
    """A deadline on an engine's silence has come, and the engine was seen to work: the wait goes on
    for as long again.
    """

    wait: str
    node: str


class HandleEnded(msgspec.Struct, frozen=True):
    """A KV handle has ended. `end`: as in pdproxy_kv_handles_ended_total."""

    end: str
    prefill: str
    age_s: float


class LegFailed(msgspec.Struct, frozen=True):
    """A leg to an engine failed; `will_retry`: whether another engine is asked; `status`: with
    which the engine refused it.
    """

    request_id: str
    node: str
    phase: str
    error: str
    will_retry: bool
    status: int | None = None


class EngineLost(msgspec.Struct, frozen=True):
    """An engine has disappeared under a request. `fingerprint`: of the request, "" if that is not
    known.

    `losses`: engines that were lost under this fingerprint alone, 0 where this one counts for none;
    `several`: whether other requests were under way there.
    """

    request_id: str
    node: str
    fingerprint: str
    losses: int
    several: bool


class NodeChanged(msgspec.Struct, frozen=True):
    """An engine has another state. `up`: it gets requests as before; else `state` says why it gets
    none, or few.
    """

    node: str
    role: str
    up: bool
    reason: str
    state: str = "down"


class MemberChanged(msgspec.Struct, frozen=True):
    """An engine was added, drained or removed. `change`: as in pdproxy_member_changes_total; `by`:
    who asked for it; `pod`: the name of its pod on Kubernetes, None: it has none.
    """

    node: str
    role: str
    change: str
    by: str
    pod: str | None = None


class PairEjected(msgspec.Struct, frozen=True):
    """Two engines counted different prompt lengths for one request and are not paired again."""

    prefill: str
    decode: str
    prefill_tokens: int
    decode_tokens: int


class TransferFaultSeen(msgspec.Struct, frozen=True):
    """KV does not move to or from an engine, or between two, or moves again (`over`). `kind`:
    prefill, decode or link.

    `prefill`, `decode`: URLs, None for whichever engine.
    """

    kind: str
    prefill: str | None
    decode: str | None
    reason: str
    over: bool


class KvShortfall(msgspec.Struct, frozen=True):
    """A decode engine received fewer prompt tokens by KV transfer than were sent to it: it computed
    them again.
    """

    node: str
    tokens: int
    expected: int


class KvCounted(msgspec.Struct, frozen=True):
    """A scrape accounted for prompt tokens that should have moved to a decode engine."""

    node: str
    moved: int
    missing: int


class KvNoticed(msgspec.Struct, frozen=True):
    """An engine sent a notice about a KV transfer. `result`: what the proxy did with it.

    awaited; double (its rank had sent one); early (nothing waits yet); late (nothing waits any
    more); unknown (early, and nothing waited later); given_up (its client had left, and the KV is
    released); undecodable. About a handle: known, or over (the handle had ended for the proxy).
    """

    event: str
    result: str


class KvTransferred(msgspec.Struct, frozen=True):
    """A decode engine reported that it has loaded a prompt's KV, with the duration and the size;
    None: not reported.
    """

    seconds: float | None
    bytes: int | None


class TurnKept(msgspec.Struct, frozen=True):
    """A decode engine's handle of a finished turn is kept for the conversation's next prompt.
    `tokens`: whose KV it names.
    """

    node: str
    tokens: int


class TurnReused(msgspec.Struct, frozen=True):
    """A prefill engine has answered a prompt, and has pulled the KV of `tokens` of its tokens from
    a decode engine.

    `trimmed`: the decode engine kept KV of more. `saved_s`: seconds that the prefill engine would
    have taken, an estimate.
    """

    tokens: int
    trimmed: bool
    saved_s: float


class TurnDropped(msgspec.Struct, frozen=True):
    """A turn's KV at a decode engine (`node`) will not be used. `reason`: as in
    pdproxy_turns_dropped_total.
    """

    node: str
    reason: str


class TurnReleased(msgspec.Struct, frozen=True):
    """A release of a turn's KV has ended. `result`: released, or left: the decode engine frees it
    after its own time.
    """

    result: str


class KvWaited(msgspec.Struct, frozen=True):
    """A wait for notices of a prefill engine has ended. `result`: ready or timeout; `missing`: the
    ranks that sent none.
    """

    node: str
    result: str
    seconds: float
    missing: Sequence[str] = ()


class Tokenized(msgspec.Struct, frozen=True):
    """Token ids of a prompt were requested before an engine gets it.

    `source`: here, or an engine (its `/tokenize`); `result`: as in pdproxy_tokenize_total;
    `seconds` from the request for ids to the result.
    """

    source: str
    result: str
    seconds: float
    tokens: int = 0


class TokenizerJudged(msgspec.Struct, frozen=True):
    """An engine's token ids of canary prompts were compared with those made here. `agrees` None:
    there was nothing to compare.

    Prompts are tokenized here for the engine only if they agree.
    """

    node: str
    model: str
    agrees: bool | None
    reason: str


class BootstrapAsked(msgspec.Struct, frozen=True):
    """The bootstrap server of a prefill engine was asked for the engine's workers.

    `result`: `complete`, `incomplete` (it has not named all of them, or names them in vain), or
    `failed`.
    """

    node: str
    result: str


class Evicted(msgspec.Struct, frozen=True):
    """A client that held more than its share while others waited lost something.

    `what`: queue (a request that waited for a place), body (one that was not whole), connection (an
    idle one), reader (a stream that was read too slowly), answer (a whole one that was not read).
    """

    what: str


EVICTED = (
    ("queue", "a request that waited for a place"),
    ("body", "a body that was not complete"),
    ("connection", "an idle connection"),
    ("reader", "a stream that was read too slowly"),
    ("answer", "an answer that was not read"),
)
EVICTIONS = counter(
    "pdproxy_evicted_total",
    "evictions",
    "What was taken from clients that held more than their share while others waited",
    Label("what", EVICTED),
    of=Evicted,
)


class LoopBeat(msgspec.Struct, frozen=True):
    """The event loop called a timer `late_s` seconds after its time.

    `swallowed`: an earlier event has reported the delay that caused it. `cpu_s`: CPU seconds of the
    loop's thread since the timer before. If they are few, the thread waited, or the machine did not
    run it.
    """

    late_s: float
    swallowed: bool = False
    cpu_s: float = 0.0


Event = (
    RequestEnded
    | Refused
    | Evicted
    | LoopBeat
    | ServedAlone
    | MediaEncoded
    | Decided
    | DeadlinePassed
    | SilenceAllowed
    | StreamContinued
    | HandleEnded
    | LegFailed
    | EngineLost
    | NodeChanged
    | MemberChanged
    | PairEjected
    | KvShortfall
    | TransferFaultSeen
    | KvCounted
    | KvNoticed
    | KvTransferred
    | KvWaited
    | TurnKept
    | TurnReused
    | TurnDropped
    | TurnReleased
    | Tokenized
    | TokenizerJudged
    | BootstrapAsked
)


class Observer(Protocol):
    """Gets events. One with an attribute `only`, a tuple of types, gets no others: some come with
    each request.
    """

    def notify(self, event: Event) -> None:
        """Process an event, quickly."""


@runtime_checkable
class Counting(Protocol):
    """An observer that has metrics: `observe.metrics.Metrics`, which describes its methods."""

    def counters_of(self, kind: type[Event]) -> Sequence[Callable[[Any], None]]:
        """Return what is called with each event of a type, in place of `notify`."""

    def count(self, metric: Description, *labels: str, by: float = 1) -> None:
        """Add to a counter, or observe a histogram's value."""

    def show(self, metric: Description, read: Callable[[], Samples]) -> None:
        """Show what `read` yields at each scrape."""


class Observers:
    """All observers. Each event goes in order to those that want it; what is only counted, to those
    that have metrics.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._metrics = [one for one in self._observers if isinstance(one, Counting)]
        self._of_type: dict[type[Event], tuple[Callable[[Any], None], ...]] = {}
        """What takes an event, by its type."""

    def add(self, *observers: Observer) -> None:
        """Pass events to more observers, after those that are there."""
        self._observers += observers
        self._metrics += [one for one in observers if isinstance(one, Counting)]
        self._of_type.clear()

    def count(self, metric: Description, *labels: str, by: float = 1) -> None:
        """Count what is no event: add to a counter, or observe a histogram's value. `labels`: the
        values of its labels.
        """
        for one in self._metrics:
            one.count(metric, *labels, by=by)

    def show(self, metric: Description, read: Callable[[], Samples]) -> None:
        """Show a gauge, or a counter that its owner keeps, for as long as the process runs: `read`
        is called at each scrape.
        """
        for one in self._metrics:
            one.show(metric, read)

    def notify(self, event: Event) -> None:
        """Pass an event to every observer that wants it."""
        kind = type(event)
        found = self._of_type.get(kind)
        if found is None:
            found = self._of_type[kind] = tuple(self._takers(kind))
        for take in found:
            take(event)

    def _takers(self, kind: type[Event]) -> Iterator[Callable[[Any], None]]:
        for one in self._observers:
            if isinstance(one, Counting):
                yield from one.counters_of(kind)
            elif kind in getattr(one, "only", (kind,)):
                yield one.notify
