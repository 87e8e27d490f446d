"""Makes the parts that export traces, where `observe.tracing` asks for traces."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from pdproxy import __version__
from pdproxy.fleet.open_legs import OpenLegs
from pdproxy.fleet.traced_legs import TracedOpenLegs
from pdproxy.kit.clock import Clock
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.observe.trace_export import ExportTarget, TraceExport, TraceQueue
from pdproxy.observe.traces import TraceObserver
from pdproxy.serving.request.traced import TracedRequests
from pdproxy.settings.tracing import Tracing
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.passthrough import PassthroughLegs
from pdproxy.upstream.traced import TracedEngineClient, TracedPassthroughLegs


@dataclass(frozen=True, slots=True)
class TracingParts:
    """What takes the place of other parts, or is added to them, where traces are exported."""

    requests: TracedRequests
    export: TraceExport
    clock: Clock
    passthrough_legs: type[PassthroughLegs] = TracedPassthroughLegs

    def start(self, tasks: TaskOwner) -> None:
        """Send traces from now on."""
        tasks.keep(self.export.run, "export traces")

    def client(self, given: type[EngineClient]) -> type[EngineClient]:
        """Return the class of engines' clients. A class of a tool's own is left as it is."""
        return TracedEngineClient if given is EngineClient else given

    def open_legs(self, url: str) -> OpenLegs:
        """Return the open legs of an engine."""
        return TracedOpenLegs(url, self.clock.now)


def build_tracing(tracing: Tracing, observers: Observers, clock: Clock) -> TracingParts | None:
    """Make them, and have them observe. None: no traces are wanted."""
    if tracing.endpoint is None:
        return None
    target = ExportTarget(
        tracing.url,
        tracing.protocol,
        tracing.service_name,
        tracing.headers_file,
        __version__,
        f"{socket.gethostname()}:{os.getpid()}",
    )
    queue = TraceQueue(observers.count)
    observers.add(TraceObserver(tracing.slow, clock.now, queue.put))
    return TracingParts(
        TracedRequests(tracing.sample_ratio, clock.now), TraceExport(queue, target, clock), clock
    )
