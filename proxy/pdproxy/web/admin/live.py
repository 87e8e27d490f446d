"""`GET /admin/v1/live`: what the page of the admin listener shows, as server-sent events.

Owns how often it is looked, and how many may watch. A snapshot is made for all viewers at once, and
only while there is one: without a viewer there is no timer, no task and nothing kept. Nothing of
the past is kept at all: a page makes its charts of the snapshots that it has got itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pdproxy import __version__
from pdproxy.deciding.local_admission import INFLIGHT, PLACES, QUEUE
from pdproxy.fleet.audit import KV_MOVED
from pdproxy.kit.errors import LimitError, PdproxyError, RefusalReason
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.description import Description, MergeRule, gauge
from pdproxy.observe.recent import RecentRequest
from pdproxy.observe.requests import ITL, NODE_LEGS, NODE_SECONDS, REQUESTS, TOKENS, TTFT
from pdproxy.observe.snapshot import Snapshot
from pdproxy.scheduling.decisions import KeptDecisions
from pdproxy.serving.dispatch.following import CONTINUATIONS
from pdproxy.serving.kv.custodian import HANDLES_ENDED, KV_BYTES, KV_HANDLES, KV_STUCK
from pdproxy.web.admin.api import AdminApi
from pdproxy.web.admin.decided import DecisionList, decisions_of
from pdproxy.web.admin.shapes import EngineList
from pdproxy.web.operation import Readiness

MAX_VIEWERS = 8
"""Pages that may be open at once."""
INTERVAL, MOST_OF_TIME = 1.0, 0.05
"""Seconds between two snapshots, and the part of the time that may go to making them: with many
engines they come more rarely.
"""
MAX_WITH_PAIRS = 128
"""Engines of a snapshot with pairs: each is compared with each."""
ROWS, DECISIONS = 30, 20
"""Requests that run, requests that have ended, and decisions, in a snapshot."""
STILL = "pdproxy.why_no_more"
"""The key of an ASGI scope under which it is found what returns why the request's key opens the API
no more, None if it does. An answer that takes long asks it.
"""
VIEWERS = gauge(
    "pdproxy_admin_viewers",
    "pages",
    "Pages of the admin listener that are open, and get what they show",
    workers=MergeRule.SUM,
)
_COUNTS = (
    (REQUESTS, "outcome"),
    (TOKENS, "kind"),
    (INFLIGHT, ""),
    (QUEUE, ""),
    (PLACES, ""),
    (CONTINUATIONS, "result"),
    (KV_HANDLES, "state"),
    (HANDLES_ENDED, "end"),
    (KV_MOVED, "result"),
    (KV_BYTES, ""),
    (KV_STUCK, ""),
)
"""The metrics that are shown, each by the values of one label: those of other labels are added."""
_TIMES = (TTFT, ITL)


class Times(msgspec.Struct):
    """A histogram: upper bounds of its buckets in seconds, and the counts of each, one more."""

    bounds: tuple[float, ...]
    counts: list[int]


class Judged(msgspec.Struct, array_like=True):
    """A stream that has ended, for whoever counts those that were in time. Seconds."""

    ended_s: float
    is_ok: bool
    ttft: float | None
    tpot: float | None


class Goals(msgspec.Struct):
    """What the settings want of requests' times (`pools[].slo`), in seconds."""

    ttft: float | None = None
    tpot: float | None = None


class ReadyShown(msgspec.Struct):
    """The answer of /ready."""

    state: str
    reason: str | None
    details: list[str]


class LiveSnapshot(msgspec.Struct):
    """What a page shows. `now`: when it was made, in monotonic seconds.

    `counts`: metrics by their names on /metrics, each by the values of one label; `legs`: by
    engine and phase, how many and their seconds. `running` and `ended`: the first requests of
    `running_count` and `ended_count`; `phases`: how many of those that run are in which phase.
    """

    version: str
    now: float
    next_s: float
    ready: ReadyShown
    listed: EngineList
    counts: dict[str, dict[str, float]]
    times: dict[str, Times]
    legs: dict[str, dict[str, tuple[float, float]]]
    running: list[RecentRequest]
    running_count: int
    phases: dict[str, int]
    ended: list[RecentRequest]
    ended_count: int
    judged: list[Judged]
    goals: Goals
    decisions: DecisionList


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSource:
    """What a snapshot is made of: what the routes of the admin listener answer with.

    `decisions`: the last ones of the pools' placements; `goals`: what the settings want; `now`:
    monotonic seconds.
    """

    api: AdminApi
    readiness: Callable[[], Awaitable[Readiness]]
    metrics: Callable[[], Awaitable[Snapshot]]
    decisions: Callable[[], KeptDecisions]
    goals: Callable[[], Goals]
    now: Callable[[], float]

    async def snapshot(self, next_s: float) -> LiveSnapshot:
        """Return a snapshot. `next_s`: seconds until the one behind it.

        Raises:
            PdproxyError: with several workers, their supervisor does not answer.
        """
        ready = await self.readiness()
        count = sum(len(pool.engines) for pool in self.api.service.entries.pools)
        listed = await self.api.engines(pairs=count <= MAX_WITH_PAIRS)
        metrics = await self.metrics()
        requests = (await self.api.requests(1024, None, None)).requests
        running = [one for one in requests if one.ended_s is None]
        ended = [one for one in requests if one.ended_s is not None]
        phases: dict[str, int] = {}
        for one in running:
            phases[one.phase or ""] = phases.get(one.phase or "", 0) + 1
        kept = self.decisions()
        last = KeptDecisions(kept.placement, kept.now, kept.decisions[-DECISIONS:])
        return LiveSnapshot(
            version=__version__,
            now=self.now(),
            next_s=next_s,
            ready=ReadyShown(ready.state.value, ready.reason, ready.details),
            listed=listed,
            counts={one.name: _by_label(one, label, metrics) for one, label in _COUNTS},
            times={one.name: _times(one, metrics) for one in _TIMES},
            legs=_legs(metrics),
            running=running[:ROWS],
            running_count=len(running),
            phases=phases,
            ended=ended[:ROWS],
            ended_count=len(ended),
            judged=[judged for one in ended if (judged := _judged(one)) is not None],
            goals=self.goals(),
            decisions=decisions_of(last, requests, listed.silent_workers),
        )


def _by_label(one: Description, label: str, metrics: Snapshot) -> dict[str, float]:
    at = one.label_names.index(label) if label else None
    found: dict[str, float] = {}
    for labels, value in metrics.values.get(one.name, {}).items():
        key = "" if at is None else labels[at]
        found[key] = found.get(key, 0) + value
    return found


def _times(one: Description, metrics: Snapshot) -> Times:
    counts = [0] * (len(one.bounds) + 1)
    for buckets in metrics.histograms.get(one.name, {}).values():
        counts = [a + b for a, b in zip(counts, buckets.counts, strict=True)]
    return Times(one.bounds, counts)


def _legs(metrics: Snapshot) -> dict[str, dict[str, tuple[float, float]]]:
    seconds: Mapping[tuple[str, ...], float] = metrics.values.get(NODE_SECONDS.name, {})
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for labels, count in metrics.values.get(NODE_LEGS.name, {}).items():
        if count:
            node, phase = labels
            found.setdefault(node, {})[phase] = count, round(seconds.get(labels, 0.0), 4)
    return found


def _judged(one: RecentRequest) -> Judged | None:
    """Return what counts of a request that has ended; None if it was no stream, or if its client is
    why it has ended.
    """
    if not one.stream or one.ended_s is None or one.outcome in ("client", "client_left"):
        return None
    decode = max((prompt.decode_s or 0.0 for prompt in one.prompts), default=0.0)
    tokens = (one.completion_tokens or 0) / max(1, one.prompt_count) - 1
    tpot = round(decode / tokens, 4) if tokens >= 1 else None
    return Judged(one.ended_s, one.outcome == "ok", one.first_s, tpot)


class Feed:
    """The snapshots of all viewers."""

    def __init__(self, source: LiveSource) -> None:
        self._source = source
        self._making = asyncio.Lock()
        self._number = 0
        """Of the last event."""
        self._last = b""
        self._due = -math.inf
        """When the next event is to be made, in monotonic seconds."""
        self.viewers = 0

    def __repr__(self) -> str:
        return f"<Feed {self.viewers} viewers>"

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Take a place of those for viewers.

        Raises:
            LimitError: there is none left.
        """
        if self.viewers >= MAX_VIEWERS:
            raise LimitError(
                f"{MAX_VIEWERS} pages are open: close one of them", RefusalReason.CONNECTIONS
            )
        self.viewers += 1
        try:
            yield
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._last, self._due = b"", -math.inf

    async def events(self, why_no_more: Callable[[], PdproxyError | None]) -> AsyncIterator[bytes]:
        """Yield events for one viewer, until its key opens the API no more.

        A viewer that reads slowly gets the last one, without those between.
        """
        seen = -1
        while why_no_more() is None:
            seen, event = await self._behind(seen)
            if why_no_more() is None:
                yield event

    async def _behind(self, seen: int) -> tuple[int, bytes]:
        """Return an event that is newer than number `seen`, and its number. One viewer makes it,
        the others wait.
        """
        if self._has_newer(seen):
            return self._number, self._last
        async with self._making:
            if not self._has_newer(seen):
                await asyncio.sleep(max(0.0, self._due - self._source.now()))
                self._last = await self._made()
                self._number += 1
            return self._number, self._last

    def _has_newer(self, seen: int) -> bool:
        return bool(self._last) and self._number != seen

    async def _made(self) -> bytes:
        began = self._source.now()
        self._due = began + INTERVAL
        try:
            shown = await self._source.snapshot(INTERVAL)
            shown.next_s = self._later(began)
            event, data = b"snapshot", msgspec.json.encode(shown)
        except PdproxyError as error:
            drop_traceback(error)
            event, data = b"problem", msgspec.json.encode({"message": error.message})
        self._due = began + self._later(began)
        return b"event: %b\ndata: %b\n\n" % (event, data)

    def _later(self, began: float) -> float:
        return max(INTERVAL, (self._source.now() - began) / MOST_OF_TIME)


class LiveResponse(StreamingResponse):
    """The answer to one viewer."""

    def __init__(self, feed: Feed, why_no_more: Callable[[], PdproxyError | None]) -> None:
        super().__init__(
            feed.events(why_no_more),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises LimitError before anything is sent."""
        with self._feed.viewer():
            await super().__call__(scope, receive, send)
