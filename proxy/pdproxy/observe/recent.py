"""The requests that run, and the last ones that have ended, each with its timeline. For operators:
nothing here reads them.

Owns their number, and what is kept of each: no prompt, no answer, no key.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.kit.text import truncate
from pdproxy.observe.events import Event, LegFailed, LegTimes, RequestEnded, StreamContinued

KEPT = 256
"""Requests that are kept once they have ended, and as many are shown of those that run."""
RUNNING = "running"
MAX_LEGS = 8
"""Prompts of one request whose engines and times are kept: a list of prompts may have thousands."""
MAX_FAILURES = 16
"""Failed legs of one request that are kept."""
MAX_OPEN = 1024
"""Requests under way whose failures are kept. The oldest ones make place."""


class RecentFailure(msgspec.Struct, frozen=True):
    """A leg that failed, or a stream whose engine failed."""

    at_s: Annotated[float, Meta(description="seconds since the request came")]
    engine: str | None
    phase: Annotated[
        str,
        Meta(
            description="prefill, decode or alone; continued for a stream that another engine went "
            "on "
            "with"
        ),
    ]
    error: str
    retried: bool


class RecentPrompt(msgspec.Struct, frozen=True):
    """One prompt's last attempt. Times in seconds, null where a phase did not happen."""

    prefill: Annotated[str | None, Meta(description="the engine that made the KV")]
    decode: Annotated[str | None, Meta(description="the engine that answered")]
    why_alone: Annotated[str | None, Meta(description="why one engine served it")]
    attempts: int
    tokenize_s: Annotated[
        float | None, Meta(description="for which it waited for the prompt's token ids")
    ]
    encode_s: Annotated[
        float | None, Meta(description="from asking encoder engines to their last answer")
    ]
    prefill_s: Annotated[
        float | None, Meta(description="from the prefill leg's start to its answer")
    ]
    first_s: Annotated[
        float | None, Meta(description="from asking the engine that answers to its first data")
    ]
    decode_s: Annotated[float | None, Meta(description="from there to the end of the stream")]
    whole_s: Annotated[
        float | None,
        Meta(description="of an answer that is not streamed: from asking to all of it"),
    ]
    decision: Annotated[str | None, Meta(description="the placement's reason")]
    continued: Annotated[int, Meta(description="how often another engine went on with the stream")]
    pause_s: Annotated[float | None, Meta(description="seconds without data because of that")]


class RecentRequest(msgspec.Struct, frozen=True):
    """A request that runs or has ended."""

    id: str
    ended_s: Annotated[float | None, Meta(description="seconds since it ended, null while it runs")]
    phase: Annotated[
        str | None,
        Meta(
            description="while it runs: waiting (its body is read, or it waits for a place), "
            "working "
            "(at "
            "engines, without data) "
            "or streaming"
        ),
    ]
    method: str
    path: str
    model: str | None
    status: Annotated[int, Meta(description="0 while it is not known")]
    outcome: Annotated[str, Meta(description="ok, client_left, whose fault ended it, or running")]
    error: str | None
    reason: Annotated[str | None, Meta(description="why it was refused for now")]
    stream: bool | None
    client: Annotated[str | None, Meta(description="the client's address")]
    key: Annotated[str | None, Meta(description="the name of its key")]
    tenant: str | None
    queue_s: Annotated[
        float, Meta(description="seconds until it had a place, or for which it waits")
    ]
    first_s: Annotated[float | None, Meta(description="seconds until the first data of its stream")]
    total_s: Annotated[float, Meta(description="seconds from its begin to its end, or until now")]
    prompt_tokens: int | None
    completion_tokens: int | None
    prompts: Annotated[list[RecentPrompt], Meta(description="the first 8 of a list")]
    prompt_count: int
    failures: Annotated[list[RecentFailure], Meta(description="the first 16 legs that failed")]


class SoFar(NamedTuple):
    """What is known of a request that runs. Times in monotonic seconds, None for what has not
    happened yet.
    """

    request_id: str
    method: str
    endpoint: str
    model: str | None
    status: int
    stream: bool | None
    client: str | None
    key: str | None
    tenant: str | None
    received: float
    admitted: float | None
    first: float | None
    legs: Sequence[LegTimes]


class RunningRequest(Protocol):
    """A request that runs."""

    def so_far(self) -> SoFar:
        """Return what is known of it."""


class _Kept(NamedTuple):
    at: float
    event: RequestEnded
    prompts: int
    failures: Sequence[tuple[float, LegFailed | StreamContinued]]


class Recent:
    """An observer that keeps the last `KEPT` requests. `now`: monotonic seconds."""

    only = (RequestEnded, LegFailed, StreamContinued)

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.running: OrderedSet[RunningRequest] = OrderedSet()
        """The requests that run, in the order in which they came: whoever serves them adds and
        removes them.
        """
        self._ended: deque[_Kept] = deque(maxlen=KEPT)
        self._failures: OrderedDict[str, list[tuple[float, LegFailed | StreamContinued]]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._ended)

    def notify(self, event: Event) -> None:
        """Keep a request that has ended, and what failed on the way."""
        if isinstance(event, RequestEnded):
            count = len(event.legs)
            if count > MAX_LEGS:
                event = msgspec.structs.replace(event, legs=event.legs[:MAX_LEGS])
            self._ended.append(
                _Kept(self._now(), event, count, self._failures.pop(event.request_id, ()))
            )
        elif isinstance(event, (LegFailed, StreamContinued)):
            kept = self._failures.setdefault(event.request_id, [])
            if len(kept) < MAX_FAILURES:
                kept.append((self._now(), event))
            if len(self._failures) > MAX_OPEN:
                self._failures.popitem(last=False)

    def shown(
        self, limit: int = 2 * KEPT, *, request_id: str | None = None, outcome: str | None = None
    ) -> list[RecentRequest]:
        """Return the requests that run, the longest-running first, and then those that have ended,
        the newest first.

        `request_id`, `outcome`: only those that have it.
        """
        return list(islice(self._all(request_id, outcome), limit))

    def _all(self, request_id: str | None, outcome: str | None) -> Iterator[RecentRequest]:
        now = self._now()
        if outcome in (None, RUNNING):
            running = (one.so_far() for one in self.running)
            wanted = (one for one in running if request_id in (None, one.request_id))
            yield from (
                _running(one, now, self._failures.get(one.request_id, ()))
                for one in islice(wanted, KEPT)
            )
        for kept in reversed(self._ended):
            if request_id in (None, kept.event.request_id) and outcome in (
                None,
                kept.event.outcome,
            ):
                yield _shown(kept, now - kept.at)


def _running(
    one: SoFar, now: float, failures: Sequence[tuple[float, LegFailed | StreamContinued]]
) -> RecentRequest:
    total, first = now - one.received, one.first
    return RecentRequest(
        id=one.request_id,
        ended_s=None,
        phase="waiting" if one.admitted is None else "working" if first is None else "streaming",
        method=one.method,
        path=one.endpoint,
        model=None if one.model is None else truncate(one.model),
        status=one.status,
        outcome=RUNNING,
        error=None,
        reason=None,
        stream=one.stream,
        client=one.client,
        key=one.key,
        tenant=one.tenant,
        queue_s=round(total if one.admitted is None else one.admitted - one.received, 4),
        first_s=_rounded(None if first is None else first - one.received),
        total_s=round(total, 4),
        prompt_tokens=None,
        completion_tokens=None,
        prompts=[_prompt(times) for times in one.legs[:MAX_LEGS]],
        prompt_count=len(one.legs),
        failures=[_failure(at - one.received, failed) for at, failed in failures],
    )


def _shown(one: _Kept, age: float) -> RecentRequest:
    event = one.event
    began = one.at - event.total_s
    return RecentRequest(
        id=event.request_id,
        ended_s=round(age, 3),
        phase=None,
        method=event.method,
        path=event.endpoint,
        model=None if event.model is None else truncate(event.model),
        status=event.status,
        outcome=event.outcome,
        error=None if event.error is None else truncate(event.error, 1000),
        reason=event.reason,
        stream=event.stream,
        client=event.client,
        key=event.key,
        tenant=event.tenant,
        queue_s=round(event.queue_s, 4),
        first_s=_rounded(event.first_s),
        total_s=round(event.total_s, 4),
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        prompts=[_prompt(times) for times in event.legs],
        prompt_count=one.prompts,
        failures=[_failure(max(0.0, at - began), failed) for at, failed in one.failures],
    )


def _prompt(times: LegTimes) -> RecentPrompt:
    return RecentPrompt(
        prefill=times.prefill,
        decode=times.decode,
        why_alone=times.why_alone,
        attempts=times.attempts,
        tokenize_s=_rounded(times.tokenize_s),
        encode_s=_rounded(times.encode_s),
        prefill_s=_rounded(times.prefill_s),
        first_s=_rounded(times.first_s),
        decode_s=_rounded(times.decode_s),
        whole_s=_rounded(times.whole_s),
        decision=times.decision,
        continued=times.continued,
        pause_s=_rounded(times.pause_s),
    )


def _failure(at: float, event: LegFailed | StreamContinued) -> RecentFailure:
    if isinstance(event, StreamContinued):
        return RecentFailure(
            round(at, 4), None, "continued", event.reason, event.result == "continued"
        )
    return RecentFailure(
        round(at, 4), event.node, event.phase, truncate(event.error, 1000), event.will_retry
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
