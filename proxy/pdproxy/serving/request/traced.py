"""Begins the traces of requests, where traces are exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pdproxy.observe.traces import begin_trace
from pdproxy.serving.request.incoming import Incoming, IncomingPassthrough

Output = TypeVar("Output")


class TracedRequests:
    """Begins each request's trace in the task that serves the request, or that makes that task.
    `ratio`: as of `Trace`; `now`: the clock's seconds.
    """

    def __init__(self, ratio: float, now: Callable[[], float]) -> None:
        self._ratio = ratio
        self._now = now

    def generating(
        self, serve: Callable[[Incoming, Output], Awaitable[None]]
    ) -> Callable[[Incoming, Output], Awaitable[None]]:
        """Return what serves generating requests as `serve` does, with traces."""

        def traced(incoming: Incoming, output: Output) -> Awaitable[None]:
            incoming.forward = begin_trace(incoming.forward, self._ratio, self._now())
            return serve(incoming, output)

        return traced

    def passed(
        self, serve: Callable[[IncomingPassthrough, Output], Awaitable[None]]
    ) -> Callable[[IncomingPassthrough, Output], Awaitable[None]]:
        """Return the same for requests that one engine serves whole."""

        def traced(incoming: IncomingPassthrough, output: Output) -> Awaitable[None]:
            forward = begin_trace(incoming.forward, self._ratio, self._now())
            return serve(dataclasses.replace(incoming, forward=forward), output)

        return traced
