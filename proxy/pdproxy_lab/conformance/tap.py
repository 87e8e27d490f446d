"""Records what a proxy does, in order: the requests that it sends to engines, and its events.

Owns the log. Requests are recorded as the bytes that engines get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from pdproxy.app.watch import Watch
from pdproxy.observe.events import Event, RequestEnded
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.connection import Message
from pdproxy.wire.sent_body import SentBody, joined

_E = TypeVar("_E")


class TappedLeg(msgspec.Struct, frozen=True):
    """A request that is about to be sent to an engine."""

    url: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def release(self) -> bool:
        """Whether it only releases a handle."""
        return b'"max_tokens":0' in self.body


class Tap:
    """Records what one proxy does. The proxy must be built with `watch`."""

    def __init__(self) -> None:
        self.log: list[TappedLeg | Event] = []
        self._more = asyncio.Event()

    @property
    def watch(self) -> Watch:
        """What the proxy must be built with."""
        return Watch((self,), _tapped(self.note))

    def notify(self, event: Event) -> None:
        """Record an event."""
        self.note(event)

    def note(self, entry: TappedLeg | Event) -> None:
        """Record an entry, and wake those that wait for it."""
        self.log.append(entry)
        self._more.set()

    def mark(self) -> int:
        """Return the current end of the log."""
        return len(self.log)

    def legs(self, since: int, url: str | None = None) -> list[TappedLeg]:
        """Return the requests to engines (to one engine) since a place in the log, without those
        that only release a handle.
        """
        legs = (entry for entry in self.log[since:] if isinstance(entry, TappedLeg))
        return [leg for leg in legs if not leg.release and url in (None, leg.url)]

    def events(self, kind: type[_E], since: int) -> list[_E]:
        """Return the events of one kind since a place in the log."""
        return [entry for entry in self.log[since:] if isinstance(entry, kind)]

    def place(self, wanted: Callable[[TappedLeg | Event], bool], since: int) -> int | None:
        """Return the place of the first such entry since a place in the log, None if there is
        none.
        """
        return next((at for at, entry in self._since(since) if wanted(entry)), None)

    async def until(self, condition: Callable[[], object], within: float) -> bool:
        """Wait until a condition holds that only changes with an entry, `within` seconds at most.
        Return whether it holds.
        """
        try:
            async with asyncio.timeout(within):
                while not condition():
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            return False
        return True

    async def ended(self, request_id: str, within: float) -> RequestEnded | None:
        """Return the proxy's event at the end of a request; None if it has not ended `within`
        seconds from now.
        """

        def found() -> RequestEnded | None:
            events: Sequence[RequestEnded] = self.events(RequestEnded, 0)
            return next((event for event in events if event.request_id == request_id), None)

        await self.until(found, within)
        return found()

    def _since(self, since: int) -> Iterator[tuple[int, TappedLeg | Event]]:
        return enumerate(self.log[since:], since)


def _tapped(note: Callable[[TappedLeg], None]) -> type[EngineClient]:
    """Return clients that have their requests noted as they are made, which is when there is a
    connection for them.
    """

    class TappedClient(EngineClient):
        def request(
            self, path: str, headers: tuple[tuple[bytes, bytes], ...], body: SentBody
        ) -> Message:
            note(TappedLeg(self.url, path, headers, joined(body)))
            return super().request(path, headers, body)

    return TappedClient
