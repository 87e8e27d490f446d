"""Traces on their way to the collector: a bounded queue, and a process that makes spans and sends
them.

Owns the queue and the deadlines of the export. Nothing waits for the collector: what finds the
queue full is dropped and counted. OpenTelemetry's SDK runs in a process of its own, since it takes
a large part of the time that a request takes, and would hold the interpreter's lock of the proxy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import msgspec

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError
from pdproxy.kit.process_pool import NoMemoryError, ProcessPool
from pdproxy.kit.text import truncate
from pdproxy.observe.description import Label, counter
from pdproxy.observe.traces import encode_batch

logger = logging.getLogger("pdproxy.traces")

PROCESS = "pdproxy.observe.trace_process"
MAX_TRACES = 4096
"""Traces that may wait."""
MAX_BYTES = 8 << 20
"""Bytes of traces that may wait."""
BATCH = 256
"""Traces that are sent together."""
EVERY = 1.0
"""Seconds between two looks at the queue."""
EXPORT_S = 10.0
"""Seconds that the collector has for a batch."""
START_S = 10.0
"""Further seconds that the process has to start, and to make the spans."""
LAST_S = 2.0
"""Seconds for what waits when the proxy ends."""
MEMORY = 2 << 30
"""Bytes of address space for the process: gRPC reserves much of it for its threads."""
IDLE = 300.0
"""Seconds after which a process without work ends."""
RESULTS = (
    ("exported", "the collector has taken it"),
    ("dropped", "too many traces waited, or it waited at the end of the proxy"),
    ("failed", "the collector refused it, or the process that sends traces failed"),
    ("late", f"it was not taken in {EXPORT_S:g} s"),
)
TRACES = counter(
    "pdproxy_traces_total",
    "traces",
    "Traces of requests that were to be exported (observe.tracing), by what became of them",
    Label("result", RESULTS),
)


class ExportTarget(msgspec.Struct, frozen=True):
    """Where traces are sent, and by whom. `timeout`: seconds for a batch; `instance`: names this
    process of the service.
    """

    endpoint: str
    protocol: str
    service_name: str
    headers_file: str | None
    version: str
    instance: str
    timeout: float = EXPORT_S


class TraceQueue:
    """Encoded traces that wait, in their order. `count(metric, result, by=number)` counts what
    becomes of them.
    """

    def __init__(self, count: Callable[..., None]) -> None:
        self._count = count
        self._waiting: deque[bytes] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, trace: bytes) -> None:
        """Add a trace, or drop it if too much waits."""
        if len(self._waiting) >= MAX_TRACES or self._size + len(trace) > MAX_BYTES:
            self.ended("dropped", 1)
            return
        self._waiting.append(trace)
        self._size += len(trace)

    def take(self) -> list[bytes]:
        """Take the traces of the next batch; none if none waits."""
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        self._size -= sum(map(len, batch))
        return batch

    def ended(self, result: str, number: int) -> None:
        """Count traces that are over."""
        self._count(TRACES, result, by=number)


class TraceExport:
    """Sends the traces of a queue, batch by batch. `clock`: of the deadlines."""

    def __init__(self, queue: TraceQueue, target: ExportTarget, clock: Clock) -> None:
        self.queue = queue
        self._target = msgspec.json.encode(target)
        self._clock = clock
        self._deadline = target.timeout + START_S
        self._process = ProcessPool(
            PROCESS, max_processes=1, waiting=1, memory=MEMORY, idle=IDLE, clock=clock
        )
        self._failure: str | None = None
        """Why the last batch was not taken, None if it was."""

    def __repr__(self) -> str:
        return f"<TraceExport {len(self.queue)} traces wait>"

    async def run(self) -> None:
        """Send traces for as long as the proxy runs."""
        while True:
            await asyncio.sleep(EVERY)
            while (batch := self.queue.take()) and await self._sent(batch, self._deadline):
                pass

    async def close(self) -> None:
        """Send what waits, as far as there is time for it, and end the process."""
        end = self._clock.now() + LAST_S
        while batch := self.queue.take():
            left = end - self._clock.now()
            if left > 0:
                await self._sent(batch, left)
            else:
                self.queue.ended("dropped", len(batch))
        await self._process.close()

    async def _sent(self, batch: list[bytes], seconds: float) -> bool:
        """Send a batch. Return whether the collector has taken it."""
        end = self._clock.now() + seconds
        result, failure = "failed", ""
        try:
            with self._clock.within(seconds):
                answer = await self._process.ask("", self._target, encode_batch(batch), end)
            failure = bytes(answer).decode("utf-8", "replace")
        except TimeoutError:
            result, failure = "late", f"no answer in {seconds:.3g} s"
        except (OverloadedError, NoMemoryError):
            failure = "the process that sends traces ended"
        except asyncio.CancelledError:
            self.queue.ended("dropped", len(batch))
            raise
        self.queue.ended(result if failure else "exported", len(batch))
        if failure and self._failure is None:
            logger.warning("traces are not exported: %s", truncate(failure))
        elif not failure and self._failure is not None:
            logger.info("traces are exported again")
        self._failure = failure or None
        return not failure
