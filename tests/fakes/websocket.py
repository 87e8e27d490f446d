"""A client's WebSocket on `/v1/realtime`, frame by frame: it shows what was on the wire, and sends
what no client should.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, Protocol, State

from tests.fakes.client import PATIENCE, Answer, Client, request

REALTIME = "/v1/realtime"
OFFER = [
    ("upgrade", "websocket"),
    ("connection", "Upgrade"),
    ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ("sec-websocket-version", "13"),
]
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""The answer to that key (RFC 6455, 1.3)."""
_SILENT = logging.Logger("websockets", logging.CRITICAL + 1)
Event = dict[str, Any]


def handshake(headers: Sequence[tuple[str, str]] = (), path: str = REALTIME) -> bytes:
    """The head of a request that opens one."""
    return request("GET", path, b"", [*OFFER, *headers])


def update(model: str = "tiny") -> Event:
    """The event that names the model."""
    return {"type": "session.update", "model": model}


def audio(seconds: float = 1.0, number: int = 0) -> Event:
    """An event with audio, another one for each number."""
    samples = bytes((at * 7 + number * 13) % 251 for at in range(int(16_000 * seconds) * 2))
    return {"type": "input_audio_buffer.append", "audio": base64.b64encode(samples).decode()}


def commit(*, final: bool = False) -> Event:
    """The event that has the audio written down, or ends it."""
    return {"type": "input_audio_buffer.commit", "final": final}


def frame(data: bytes, opcode: Opcode = Opcode.TEXT, *, last: bool = True) -> bytes:
    """A frame as a client sends it."""
    return Frame(opcode, data, last).serialize(mask=True)


class WebSocketClient:
    """One WebSocket. `code`: with which it was closed, None while it is open."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._frames = Protocol(CLIENT, max_size=None, logger=_SILENT)
        self._messages: deque[bytes] = deque()
        self.head = Answer()
        self.pings = 0

    @classmethod
    async def open(
        cls, client: Client, headers: Sequence[tuple[str, str]] = (), behind: bytes = b""
    ) -> WebSocketClient:
        """Open one. `behind`: what is sent together with the handshake."""
        made = cls(client)
        client.send(handshake(headers) + behind)
        made.head = await client.head()
        assert made.head.status == 101, await client.rest(made.head)
        assert made.head.header("sec-websocket-accept") == ACCEPT
        assert (await made.event())["type"] == "session.created"
        return made

    def send(self, *events: Event) -> None:
        """Send events, a message each."""
        for event in events:
            self.raw(frame(json.dumps(event).encode()))

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.client.send(data)

    async def event(self) -> Event:
        """The next event."""
        async with asyncio.timeout(PATIENCE):
            while not self._messages:
                assert await self._read(), f"closed: {self.closed_with}"
        found: Event = json.loads(self._messages.popleft())
        return found

    async def until(self, kind: str) -> list[Event]:
        """The next events, up to one of this kind."""
        found = [await self.event()]
        while found[-1]["type"] != kind:
            found.append(await self.event())
        return found

    async def closed(self) -> int | None:
        """Wait for the end; return the code of the close frame, None without one."""
        async with asyncio.timeout(PATIENCE):
            while await self._read():
                pass
        self.client.close()
        return self.closed_with

    @property
    def closed_with(self) -> int | None:
        """The code of the close frame that has come, None while there is none."""
        return None if self._frames.close_rcvd is None else self._frames.close_rcvd.code

    def close(self, code: int = 1000) -> None:
        """Send a close frame."""
        self._frames.send_close(code)
        self.raw(b"".join(self._frames.data_to_send()))

    async def _read(self) -> bool:
        """Read some more. Return whether it is open still."""
        try:
            data = await self.client.reader.read(65536)
        except ConnectionError:
            data = b""
        if not data:
            return False
        self._frames.receive_data(data)
        for found in self._frames.events_received():
            assert isinstance(found, Frame)
            if found.opcode is Opcode.TEXT:
                self._messages.append(bytes(found.data))
            self.pings += found.opcode is Opcode.PING
        if self._frames.state is State.OPEN:
            self.raw(b"".join(self._frames.data_to_send()))
        return True
