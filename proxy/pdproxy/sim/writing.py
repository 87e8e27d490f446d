"""How an answer's bytes get onto the wire: as uvicorn writes them, slowly, cut into pieces, or several in one.

Owns the bytes between uvicorn and the socket. uvicorn still makes them, so that they are right whatever their size.
"""

from __future__ import annotations

import random
from asyncio import Lock, sleep
from dataclasses import dataclass
from itertools import pairwise

from starlette.types import Message, Send

from pdproxy.sim.transport import Line


@dataclass(frozen=True, slots=True)
class Style:
    """The manner of writing. Seconds, counts."""

    delay: float = 0.0
    """Before every write."""
    cuts: int | None = None
    """Places at which a write is cut; 0: everywhere, None: nowhere."""
    cut_delay: float = 0.0
    join: int | None = None
    """Chunks in a write; 0: all."""
    chance: random.Random | None = None


PLAIN = Style()


def cut(data: bytes, cuts: int, chance: random.Random) -> list[bytes]:
    """Cut data at so many places drawn by chance, or everywhere."""
    most = len(data) - 1
    places = range(1, most + 1) if not cuts or cuts >= most else sorted(chance.sample(range(1, most + 1), cuts))
    edges = [0, *places, len(data)]
    return [data[start:end] for start, end in pairwise(edges) if end > start]


class Writer:
    """Writes one answer."""

    def __init__(self, line: Line, send: Send) -> None:
        self._line, self._send = line, send
        self.style = PLAIN
        self.head_out = False
        self._joined: list[bytes] = []
        self._writing = Lock()

    async def idle(self) -> None:
        """Wait until nothing is being written."""
        async with self._writing:
            return

    async def send(self, message: Message) -> None:
        """Write one ASGI message in the answer's style."""
        async with self._writing:
            await self._send_styled(message)

    async def _send_styled(self, message: Message) -> None:
        starts = message["type"] == "http.response.start"
        if self.style is PLAIN and not self._joined:
            await self._send(message)
        else:
            last = not starts and not message.get("more_body")
            data, closes = await self.rendered(message)
            await self._write(data, last=last or starts)
            if closes:
                self._line.wire.close()
            self._line.written()
        self.head_out = self.head_out or starts

    async def rendered(self, message: Message) -> tuple[bytes, bool]:
        """Return the bytes that uvicorn makes of a message, and whether it closes the connection behind them."""
        with self._line.rendering() as rendered:
            await self._send(message)
        return rendered.data, rendered.closes

    async def raw(self, data: bytes) -> None:
        """Write bytes as they are, behind those that wait to be joined."""
        await self.flush()
        self._line.wire.write(data)
        await self._line.drain()

    async def flush(self) -> None:
        """Write what waits to be joined."""
        joined, self._joined = self._joined, []
        if joined:
            await self._put(b"".join(joined))

    async def _write(self, data: bytes, *, last: bool) -> None:
        if data:
            self._joined.append(data)
        wanted = self.style.join
        if last or wanted is None or (wanted and len(self._joined) >= wanted):
            await self.flush()

    async def _put(self, data: bytes) -> None:
        style = self.style
        pieces = [data] if style.cuts is None else cut(data, style.cuts, style.chance or random.Random(0))
        if style.delay:
            await sleep(style.delay)
        for number, piece in enumerate(pieces):
            if number and style.cut_delay:
                await sleep(style.cut_delay)
            elif number:  # a reader in the same event loop gets its turn, too
                await sleep(0)
                await sleep(0)
            self._line.wire.write(piece)
            await self._line.drain()
