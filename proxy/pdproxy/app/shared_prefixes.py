"""Wiring of what workers tell each other of engines' prefix caches: when it is sent, and how it is taken in small steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pdproxy.scheduling.prefix.prompts import MAX_KEYS
from pdproxy.scheduling.prefix.shared import Sent, SharedKnowledge, decode

SEND_EVERY = 0.02
"""Seconds between two messages: 3 MiB per second at most."""
AT_ONCE = MAX_KEYS
"""Keys after which other work has its turn: one or two milliseconds."""
MAX_QUEUED = 512 << 10
"""Keys of others that wait to be taken in: 4 MiB. What comes beyond is dropped."""


class SharingPrefixes:
    """Tells other workers what this one has sent to engines, and takes in what they tell. `now`: monotonic seconds."""

    def __init__(self, knowledge: SharedKnowledge, tell: Callable[[bytes], None], now: Callable[[], float]) -> None:
        self._knowledge = knowledge
        self._tell = tell
        self._now = now
        self._timer: asyncio.TimerHandle | None = None
        self._queue: deque[tuple[float, Sent]] = deque()
        self._queued = 0
        self._taking = False
        self.dropped = 0
        """Prompts of others that were dropped. Read only."""
        self.age = 0.0
        """How long before it was taken in the last prompt of another worker was sent, in seconds. Read only."""
        knowledge.due = self._due

    def __repr__(self) -> str:
        return f"<SharingPrefixes: {self._queued} keys to be taken in>"

    def stop(self) -> None:
        """Tell nothing more."""
        self._knowledge.due = lambda: None
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SEND_EVERY, self._send)

    def _send(self) -> None:
        self._timer = None
        if (batch := self._knowledge.batch()) is not None:
            self._tell(batch)
            self._due()  # there may be more: a message has a bound

    def received(self, body: bytes) -> None:
        """Queue what another worker tells."""
        batch = decode(body)
        for sent in batch.sent:
            count = len(sent.keys) // 8
            if self._queued + count > MAX_QUEUED:
                self.dropped += 1
                continue
            self._queued += count
            self._queue.append((batch.since, sent))
        self._go_on()

    def _go_on(self) -> None:
        if self._queue and not self._taking:
            self._taking = True
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        self._taking = False
        now, taken = self._now(), 0
        while self._queue and taken < AT_ONCE:
            since, sent = self._queue.popleft()
            taken += self._knowledge.take(sent, now)
            self.age = now - since
        self._queued -= taken
        self._go_on()
