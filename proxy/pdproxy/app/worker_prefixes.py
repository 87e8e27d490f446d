"""Wiring of what workers tell each other of engines' prefix caches: when it is sent, and how it is
taken in small steps.

A worker that starts asks the process that leads for what it knows, one part after the other. What
is sent meanwhile, by others or by itself, waits until that was taken in: so it counts as used
later, and engines' least recently used blocks go first here, too.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from pdproxy.scheduling.prefix.prompts import MAX_KEYS
from pdproxy.scheduling.prefix.worker_knowledge import (
    SentPrompt,
    WorkerKnowledge,
    decode,
    decode_part,
    encode,
)

SEND_EVERY = 0.02
"""Seconds between two messages: 3 MiB per second at most."""
AT_ONCE = MAX_KEYS
"""Keys after which other work has its turn: one or two milliseconds."""
MAX_QUEUED = 512 << 10
"""Keys of others that wait to be taken in: 4 MiB. What comes beyond is dropped."""
PATIENCE = 10.0
"""Seconds for all that another worker knows. Then a worker goes on with what it has got."""
AGAIN = 0.1
"""Seconds until a worker looks again whether engines were probed, or whether anybody answers."""

logger = logging.getLogger("pdproxy.workers")
_decode_urls = msgspec.msgpack.Decoder(list[str]).decode


class SharingPrefixes:
    """Tells other workers what this one has sent to engines, and takes in what they tell. `now`:
    monotonic seconds.
    """

    def __init__(
        self, knowledge: WorkerKnowledge, tell: Callable[[bytes], None], now: Callable[[], float]
    ) -> None:
        self._knowledge = knowledge
        self._waits = False
        """Whether what was sent meanwhile waits for what another worker knows."""
        self._tell = tell
        self._now = now
        self._timer: asyncio.TimerHandle | None = None
        self._queue: deque[tuple[float, SentPrompt]] = deque()
        self._queued = 0
        self._taking = False
        self.is_behind: Callable[[], bool] = lambda: False
        """Whether so much waits to be sent that what is to be told waits in `knowledge`, which has
        a bound for it.
        """
        self.dropped = 0
        """Prompts of others that were dropped. Read only."""
        self.age = 0.0
        """How long before it was taken in the last prompt of another worker was sent, in seconds.
        Read only.
        """
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
        if self.is_behind():
            self._due()
            return
        if (batch := self._knowledge.batch()) is not None:
            self._tell(batch)
            if self._waits:
                self.received(batch)  # it was noted already, as used before what is still to come
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
        if self._queue and not self._taking and not self._waits:
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

    # -- a worker that starts

    def answer(self, about: str) -> bytes:
        """Return what a worker that starts asks for: "" for the engines to which something was
        sent, "NUMBER URL" for a part.
        """
        number, _, url = about.partition(" ")
        if not number:
            return encode(self._knowledge.sent_to())
        return encode(self._knowledge.part(url, int(number)))

    async def catch_up(
        self, ask: Callable[[str], Awaitable[bytes | None]] | None, ready: Callable[[], bool]
    ) -> None:
        """Take in what others know. `ask` returns their answer, None if there is none; None: they
        know nothing more. `ready`: engines were probed.

        How much an engine holds is known once it was probed.
        """
        if ask is None:
            return
        self._waits = True
        try:
            async with asyncio.timeout(PATIENCE):
                while not ready():  # noqa: ASYNC110 - engines have no common signal, and this lasts milliseconds
                    await asyncio.sleep(AGAIN)
                urls = _decode_urls(await self._asked(ask, ""))
                for url in urls:
                    await self._restore(url, ask)
                if urls:
                    logger.info(
                        "knows what another worker knew of the prefix caches of %d engines",
                        len(urls),
                    )
        except TimeoutError:
            logger.warning(
                "what other workers know of engines' prefix caches has not come within %g s",
                PATIENCE,
            )
        finally:
            self._waits = False
            self._go_on()

    async def _restore(self, url: str, ask: Callable[[str], Awaitable[bytes | None]]) -> None:
        place, parts, of_ids = self._knowledge.place_of(url), list[list[int]](), False
        while place is not None:
            part = decode_part(await self._asked(ask, f"{len(parts)} {url}"))
            keys, of_ids = array("q", part.keys).tolist(), part.of_ids or of_ids
            if not keys:
                break
            parts += [keys]
        for keys in reversed(parts):
            for begin in reversed(range(0, len(keys), AT_ONCE)):
                if self._knowledge.place_of(url) != place:
                    return  # it was removed, or has started again: its cache is empty
                self._knowledge.restore(url, keys[begin : begin + AT_ONCE], of_ids=of_ids)
                await asyncio.sleep(0)

    @staticmethod
    async def _asked(ask: Callable[[str], Awaitable[bytes | None]], about: str) -> bytes:
        while (answer := await ask(about)) is None:  # noqa: ASYNC110 - who would answer has ended
            await asyncio.sleep(AGAIN)
        return answer
