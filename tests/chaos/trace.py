"""A digest of all that happens in a run: two runs of one seed that differ anywhere have different
digests.

Of data on the network only times and sizes count: ids that libraries make may differ.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import IO

from pdproxy.observe.events import Event, LoopBeat, RequestEnded, StreamContinued
from tests.chaos.clients import Outcome


class Trace:
    """Takes what happens, and keeps the proxy's events. `file`: gets each line as well; None:
    nothing does.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._digest = hashlib.blake2b(digest_size=8)
        self._file: IO[str] | None = None if file is None else file.open("w")
        self.events: list[Event] = []
        self.reports: list[tuple[float, RequestEnded]] = []
        """The ends of requests, each with its time."""
        self.decisions: list[tuple[float, StreamContinued]] = []
        """What became of streams whose engine failed, each with its time."""
        self.deliveries = 0

    def delivered(self, number: int, size: int) -> None:
        """Data has arrived at the peer of a transport."""
        self.deliveries += 1
        self._line(f"net {number} {size}")

    def notify(self, event: Event) -> None:
        """The proxy has emitted an event."""
        if isinstance(event, LoopBeat):
            return
        self.events.append(event)
        more = ""
        if isinstance(event, RequestEnded):
            self.reports.append((asyncio.get_running_loop().time(), event))
            more = f" {event.request_id} {event.outcome} {event.status}"
        elif isinstance(event, StreamContinued):
            self.decisions.append((asyncio.get_running_loop().time(), event))
            more = f" {event.request_id} {event.result} {event.reason}"
        self._line(f"event {type(event).__name__}{more}")

    def ended(self, outcome: Outcome) -> None:
        """A client's request has ended."""
        self._line(f"client {outcome.ident} {outcome.how} {outcome.detail}")

    def mark(self, what: str) -> None:
        """Something else has happened."""
        self._line(what)

    def _line(self, text: str) -> None:
        line = f"{asyncio.get_running_loop().time():.6f} {text}\n"
        self._digest.update(line.encode())
        if self._file is not None:
            self._file.write(line)

    @property
    def digest(self) -> str:
        """16 hex digits."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
