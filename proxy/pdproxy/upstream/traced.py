"""Requests to engines where traces are exported: each leg's `traceparent` names the leg's own span,
so that an engine's spans are below the leg that has asked it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdproxy.observe.traces import leg_lines
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.connection import Message
from pdproxy.upstream.passthrough import EngineWebSocket, PassthroughLeg, PassthroughLegs
from pdproxy.wire.body_bounds import Body
from pdproxy.wire.sent_body import SentBody


class TracedEngineClient(EngineClient):
    """A client whose legs have a `traceparent` of their own."""

    def request(
        self, path: str, headers: tuple[tuple[bytes, bytes], ...], body: SentBody
    ) -> Message:
        """See `EngineClient`."""
        return EngineClient.request(self, path, leg_lines(headers), body)  # `super()` costs more


class TracedPassthroughLegs(PassthroughLegs):
    """Legs of requests that one engine serves whole, with a `traceparent` of their own."""

    async def send(
        self, method: str, url: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: Body
    ) -> PassthroughLeg:
        """See `PassthroughLegs`."""
        return await super().send(method, url, path, leg_lines(tuple(headers)), body)

    async def open_websocket(
        self, url: str, path: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> EngineWebSocket:
        """See `PassthroughLegs`."""
        return await super().open_websocket(url, path, leg_lines(tuple(headers)))
