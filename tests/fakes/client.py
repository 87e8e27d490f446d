"""A raw HTTP client: it shows what was on the wire, and how it ended."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 60.0


@dataclass
class Answer:
    """What came. `pieces` are the HTTP chunks of a chunked body; `ended` says whether the body came
    to its proper end.
    """

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    pieces: list[bytes] = field(default_factory=list)
    ended: bool = False

    def header(self, name: str) -> str | None:
        """The first header of that name (in lower case)."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """The stream's events, whole, without comments."""
        return [
            part + b"\n\n"
            for part in self.body.split(b"\n\n")
            if part and not part.startswith(b":")
        ]

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return self.text_of(0)

    def text_of(self, index: int) -> str:
        """The text of one choice, put together where streamed."""
        if not self.body.startswith((b"data:", b":")):
            choice = next(choice for choice in self.json["choices"] if choice["index"] == index)
            return str(choice.get("text", (choice.get("message") or {}).get("content")))
        found = ""
        for event in self.events:
            payload = event.removeprefix(b"data: ").strip()
            if payload == b"[DONE]":
                continue
            for choice in json.loads(payload).get("choices", ()):
                if choice["index"] == index:
                    found += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        return found


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(
        cls,
        port: int,
        *,
        receive_buffer: int | None = None,
        tls: ssl.SSLContext | None = None,
        address: str = "127.0.0.1",
    ) -> Client:
        """Open a connection from an address of this machine, with a small receive buffer and TLS
        where asked.
        """
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        sock.bind((address, 0))
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        host = None if tls is None else "127.0.0.1"
        return cls(
            *await asyncio.open_connection(
                sock=sock, limit=receive_buffer or 2**20, ssl=tls, server_hostname=host
            )
        )

    def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        self.writer.write(data)

    def post(
        self, path: str, body: object, headers: Sequence[tuple[str, str]] = (), version: str = "1.1"
    ) -> None:
        """Send a POST; a body that is not bytes becomes JSON."""
        self.send(request("POST", path, body, headers, version))

    async def head(self) -> Answer:
        """Read the status line and headers."""
        async with asyncio.timeout(PATIENCE):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        headers = [(name.strip().lower(), value.strip()) for name, _, value in pairs]
        return Answer(int(lines[0].split(" ")[1]), headers)

    async def piece(self) -> bytes:
        """Read one HTTP chunk; b"" is the end of the body."""
        async with asyncio.timeout(PATIENCE):
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def rest(self, answer: Answer, *, head_only: bool = False) -> Answer:
        """Read the body after its head."""
        async with asyncio.timeout(PATIENCE):
            try:
                if head_only:
                    answer.ended = True
                elif answer.header("transfer-encoding") == "chunked":
                    while piece := await self.piece():
                        answer.pieces.append(piece)
                        answer.body += piece
                    answer.ended = True
                elif (length := answer.header("content-length")) is not None:
                    answer.body = await self.reader.readexactly(int(length))
                    answer.ended = True
                else:
                    answer.body = await self.reader.read(-1)
            except (asyncio.IncompleteReadError, ConnectionError):
                answer.ended = False
        return answer

    async def answer(self, *, head_only: bool = False) -> Answer:
        """Read one whole answer."""
        return await self.rest(await self.head(), head_only=head_only)

    async def closed(self) -> bool:
        """Wait until the server closes the connection, reading what comes; False if it does not."""
        try:
            async with asyncio.timeout(PATIENCE):
                while await self.reader.read(65536):
                    pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        """Leave."""
        self.writer.transport.abort()

    def reset(self) -> None:
        """Leave with an RST."""
        with socket.socket(fileno=os.dup(self.writer.get_extra_info("socket").fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def exchange(port: int, data: bytes) -> Answer:
    """Send bytes to a port of this machine, on a connection of their own. Return the answer."""
    client = await Client.connect(port)
    try:
        client.send(data)
        return await client.answer()
    finally:
        client.close()


def request(
    method: str,
    path: str,
    body: object,
    headers: Sequence[tuple[str, str]] = (),
    version: str = "1.1",
) -> bytes:
    """A request's bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "host: proxy", f"content-length: {len(content)}"]
    if not any(name.lower() == "content-type" for name, _ in headers):
        lines.append("content-type: application/json")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


def bearer(key: str) -> list[tuple[str, str]]:
    """The headers of a client with a key."""
    return [("authorization", f"Bearer {key}")]
