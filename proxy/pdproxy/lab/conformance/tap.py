"""What a proxy does, written down in order: the requests that it makes for engines, and the events that it tells of.

Owns the log. Requests are noted as the bytes that engines get, so that what is claimed of them is claimed of the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from pdproxy.app.watch import Watch
from pdproxy.observe.events import Event, RequestEnded
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.connection import Message

_E = TypeVar("_E")


class Leg(msgspec.Struct, frozen=True):
    """A request that is about to be sent to an engine."""

    url: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def release(self) -> bool:
        """Whether it only gives a handle back."""
        return b'"max_tokens":0' in self.body


class Tap:
    """Notes what one proxy does. `watch` is what the proxy must be built with."""

    def __init__(self) -> None:
        self.log: list[Leg | Event] = []
        self._more = asyncio.Event()

    @property
    def watch(self) -> Watch:
        """What the proxy must be built with."""
        return Watch((self,), partial(_TappedClient, self.note))

    def notify(self, event: Event) -> None:
        """Note an event."""
        self.note(event)

    def note(self, entry: Leg | Event) -> None:
        """Note something, and wake who waits for it."""
        self.log.append(entry)
        self._more.set()

    def mark(self) -> int:
        """Return the place in the log that is now its end."""
        return len(self.log)

    def legs(self, since: int, url: str | None = None) -> list[Leg]:
        """Return the requests for engines (for one engine) since a place in the log, those aside that only give back."""
        legs = (entry for entry in self.log[since:] if isinstance(entry, Leg))
        return [leg for leg in legs if not leg.release and url in (None, leg.url)]

    def events(self, kind: type[_E], since: int) -> list[_E]:
        """Return the events of one kind since a place in the log."""
        return [entry for entry in self.log[since:] if isinstance(entry, kind)]

    def place(self, wanted: Callable[[Leg | Event], bool], since: int) -> int | None:
        """Return where the first such entry stands since a place in the log, None if there is none."""
        return next((at for at, entry in self._since(since) if wanted(entry)), None)

    async def until(self, condition: Callable[[], object], within: float) -> bool:
        """Wait until something holds that only changes with an entry, `within` seconds at most. Return whether it does."""
        try:
            async with asyncio.timeout(within):
                while not condition():
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            return False
        return True

    async def ended(self, request_id: str, within: float) -> RequestEnded | None:
        """Return what the proxy told of a request when it was over; None if it isn't, `within` seconds from now."""

        def found() -> RequestEnded | None:
            events: Sequence[RequestEnded] = self.events(RequestEnded, 0)
            return next((event for event in events if event.request_id == request_id), None)

        await self.until(found, within)
        return found()

    def _since(self, since: int) -> Iterator[tuple[int, Leg | Event]]:
        return enumerate(self.log[since:], since)


class _TappedClient(EngineClient):
    """A client whose requests are noted as they are made, which is when there is a connection for them."""

    def __init__(self, note: Callable[[Leg], None], url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._note = note

    def request(self, path: str, headers: tuple[tuple[bytes, bytes], ...], body: bytes) -> Message:
        """Note the request, and return it."""
        self._note(Leg(self.url, path, headers, body))
        return super().request(path, headers, body)
