"""A client that sees single reads of a socket, and how the connection ended."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, cast

PATIENCE = 30.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Raw(asyncio.Protocol):
    """One connection. `ended` is "eof" or "reset", "" while it is open."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended = ""
        self._news = asyncio.Event()

    @classmethod
    async def connect(cls, port: int) -> Raw:
        _, made = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = "reset" if exc is not None else "eof"
        self._news.set()

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    def leave(self) -> None:
        self.transport.abort()

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    async def until(self, condition: Callable[[], object]) -> Raw:
        """Wait until what was received fulfils a condition."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._news.clear()
                await self._news.wait()
        return self

    async def end(self) -> Raw:
        """Wait until the connection has ended."""
        return await self.until(lambda: self.ended)

    async def whole(self) -> Raw:
        """Wait until the last answer is whole, or the connection has ended."""
        return await self.until(lambda: self.ended or Answer(self.data).complete)

    @property
    def answer(self) -> Answer:
        return Answer(self.data)


class Answer:
    """What can be read of an answer's bytes, however far they go."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        head, mark, self.body = data.partition(b"\r\n\r\n")
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        if mark and head.startswith(b"HTTP/1.1 "):
            first, *lines = head.decode("latin-1").split("\r\n")
            self.status = int(first.split(" ")[1])
            self.headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
        self.chunks: list[bytes] = []
        self.rest = self.body
        self.complete = False
        if self.headers.get("transfer-encoding") == "chunked":
            self._read_chunks()
        elif self.status == 204:
            self.complete = True
        elif "content-length" in self.headers:
            self.complete = len(self.body) >= int(self.headers["content-length"])

    def _read_chunks(self) -> None:
        while (found := re.match(rb"([0-9a-f]+)\r\n", self.rest)) is not None:
            size, start = int(found[1], 16), found.end()
            if len(self.rest) < start + size + 2:
                return
            piece, self.rest = self.rest[start : start + size], self.rest[start + size + 2 :]
            if not size:
                self.complete = True
                return
            self.chunks.append(piece)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def texts(self) -> list[str]:
        """The text of each event with output; `[DONE]`, `error` and `role` for those."""
        found = []
        for event in b"".join(self.chunks).split(b"\n\n")[:-1]:
            payload = event.removeprefix(b"data: ")
            if payload == b"[DONE]":
                found.append("[DONE]")
                continue
            value = json.loads(payload)
            if "error" in value:
                found.append("error")
            elif value["choices"]:
                choice = value["choices"][0]
                delta = choice.get("delta", {})
                found.append(
                    "role" if "role" in delta else delta.get("content", choice.get("text"))
                )
        return found


def post(path: str, headers: str = "", **body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(data)}\r\n{headers}\r\n"
    )
    return head.encode() + data


def completion(stream: bool = False, **body: Any) -> bytes:
    fields = {
        "prompt": "one two three four",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    return post(COMPLETIONS, **{**fields, **body})


def chat(stream: bool = False, **body: Any) -> bytes:
    fields = {
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    return post(CHAT, **{**fields, "stream": stream, **body})


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: sim\r\n\r\n".encode()


async def ask(port: int, data: bytes) -> Raw:
    """Ask, and wait for the whole answer or the end of the connection; the connection stays
    open.
    """
    client = await Raw.connect(port)
    client.send(data)
    return await client.whole()


async def turns(count: int = 50) -> None:
    """Let everything that can happen without waiting happen."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)
