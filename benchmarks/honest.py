"""Honest clients of a proxy in front of mock engines: every answer is checked. Or one client that
measures how late `/health` is.

Usage: honest.py URL --seconds N [--clients 16] [--chunks 32] [--key KEY]
       honest.py URL --seconds N --late

The first one shows the results of requests, gaps, and times to first tokens; `--late` the delays of
/health every 20 ms, on a kept connection.

Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import uvloop

from load import percentile
from stage import any_certificate

WORD = " hello"
"""The text of each of the mock engines' chunks."""
ANSWER_TIMEOUT = 10.0
"""Seconds for one answer. A real client would not wait longer."""
HEALTH_INTERVAL = 0.02
"""Seconds between two requests to `/health`."""
REQUESTS_PER_CONNECTION = 6
"""Then the client opens a new connection, so that the result shows whether the proxy accepts
any.
"""


@dataclass
class Tally:
    """Results of all clients. Times in seconds."""

    right: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    refusals: list[tuple[float, str]] = field(default_factory=list)
    """The first and the last refusal: seconds since the start, and the answer's body."""
    gaps: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))


class WrongError(Exception):
    """An answer that a client can't use."""


class Client:
    """One client: one request at a time, most of them on a kept connection."""

    def __init__(
        self, url: str, number: int, chunks: int, tally: Tally, key: str | None = None
    ) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.tls = any_certificate() if parts.scheme == "https" else None
        self.more = f"authorization: Bearer {key}\r\n" if key else ""
        self.number = number
        self.began = time.monotonic()
        self.chunks = chunks
        self.tally = tally
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def run(self, end: float) -> None:
        """Send requests until the time is over."""
        asked = 0
        while time.monotonic() < end:
            asked += 1
            if asked % REQUESTS_PER_CONNECTION == 0:
                self.close()
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT):
                    refused = await (self._health() if asked % 5 == 0 else self._ask())
                self.tally.right += not refused
                self.tally.refused += refused
                if refused:
                    self.close()
                    await asyncio.sleep(0.1)
            except (
                OSError,
                EOFError,
                TimeoutError,
                ValueError,
                KeyError,
                IndexError,
                WrongError,
            ) as error:
                text = f"{type(error).__name__} {error}".strip()
                self.tally.wrong[text[:80]] += 1
                self.close()
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self.writer is not None:
            self.writer.transport.abort()
        self.reader = self.writer = None

    async def _health(self) -> bool:
        status, _, body = await self._answer(
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", time.monotonic()
        )
        if status == 503:
            return self._refused(body)
        if (status, body) != (200, b""):
            raise WrongError(f"/health answered {status}")
        return False

    def _refused(self, body: bytes) -> bool:
        self.tally.refusals[1:] = [
            (round(time.monotonic() - self.began, 1), body[:200].decode(errors="replace"))
        ]
        return True

    async def _ask(self) -> bool:
        chat, stream = self.number % 2 == 0, self.number % 4 != 1
        text = f"{self.number} the quick brown fox jumps over the lazy dog " * 6
        asked: dict[str, Any] = {"model": "m", "max_tokens": self.chunks, "stream": stream}
        asked |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        body = json.dumps(asked).encode()
        path = "/v1/chat/completions" if chat else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"{self.more}content-length: {len(body)}\r\n\r\n"
        status, kind, answer = await self._answer(head.encode() + body, time.monotonic())
        if status == 503:
            return self._refused(answer)
        if status != 200:
            raise WrongError(f"status {status}")
        (self._check_stream if stream else self._check_whole)(answer, chat, kind)
        return False

    def _check_whole(self, answer: bytes, chat: bool, _: bytes) -> None:
        choice = json.loads(answer)["choices"][0]
        if (choice["message"]["content"] if chat else choice["text"]) != WORD * self.chunks:
            raise WrongError("another text")

    def _check_stream(self, answer: bytes, chat: bool, kind: bytes) -> None:
        events = [part.removeprefix(b"data: ") for part in answer.split(b"\n\n") if part]
        if b"text/event-stream" not in kind or not events or events[-1] != b"[DONE]":
            raise WrongError("no [DONE]")
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        text = "".join(
            (choice["delta"].get("content") or "") if chat else choice["text"] for choice in choices
        )
        if text != WORD * self.chunks or choices[-1]["finish_reason"] != "length":
            raise WrongError("another text in a stream")

    async def _answer(self, request: bytes, began: float) -> tuple[int, bytes, bytes]:
        """Send a request; return the status, the head and the body of its answer."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(
                self.host, self.port, ssl=self.tls
            )
        assert self.reader is not None
        reader = self.reader
        self.writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1])
        body = bytearray()
        if b"transfer-encoding: chunked" in head:
            before = 0.0
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
                now = time.monotonic()
                if not before:
                    self.tally.first.append(now - began)
                elif now - before > 0.0005:  # no gap between chunks of one read
                    self.tally.gaps.append(now - before)
                before = now
            await reader.readexactly(2)
        else:
            body += await reader.readexactly(
                int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            )
        if b"connection: close" in head:
            self.close()
        return status, head, bytes(body)


async def clients(
    url: str, count: int, chunks: int, seconds: float, key: str | None = None
) -> dict[str, Any]:
    """Run the clients and return their results."""
    tally, end = Tally(), time.monotonic() + seconds
    await asyncio.gather(
        *(Client(url, number, chunks, tally, key).run(end) for number in range(count))
    )
    return {
        "right": tally.right,
        "wrong": dict(tally.wrong),
        "refused": tally.refused,
        "refusals": tally.refusals,
        "gap_p99_ms": percentile(tally.gaps, 0.99),
        "first_p99_ms": percentile(tally.first, 0.99),
    }


def late(url: str, seconds: float) -> dict[str, Any]:
    """Request /health repeatedly; return how late its answers are, in milliseconds.

    Requests that would have been due during a wait count as sent: each waits correspondingly less.
    """
    parts = urlsplit(url)
    delays, lost, end = array("d"), 0, time.monotonic() + seconds
    tls = any_certificate() if parts.scheme == "https" else None
    connection: socket.socket | None = None
    while (began := time.monotonic()) < end:
        try:
            if connection is None:
                connection = socket.create_connection(
                    (parts.hostname or "127.0.0.1", parts.port or 80), ANSWER_TIMEOUT
                )
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    connection = tls.wrap_socket(connection)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"\r\n\r\n"):
                if not (more := connection.recv(4096)):
                    raise EOFError
                answer += more
        except (OSError, EOFError):
            lost += 1
            if connection is not None:
                connection.close()
            connection = None
        waited = time.monotonic() - began
        delays.extend(
            [waited - n * HEALTH_INTERVAL for n in range(int(waited / HEALTH_INTERVAL) + 1)]
        )
        time.sleep(
            max(HEALTH_INTERVAL - waited, 0.0) if connection is not None else HEALTH_INTERVAL
        )
    ranks = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        **{f"late_{name}_ms": percentile(delays, rank) for name, rank in ranks.items()},
        "late_lost": lost,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument(
        "--chunks", type=int, default=32, help="tokens per answer: the engines' own setting"
    )
    parser.add_argument("--key", help="API key of all clients")
    parser.add_argument("--late", action="store_true", help="measure /health")
    options = parser.parse_args()
    if options.late:
        print(json.dumps(late(options.url, options.seconds)))
    else:
        asked = clients(options.url, options.clients, options.chunks, options.seconds, options.key)
        print(json.dumps(uvloop.run(asked)))


if __name__ == "__main__":
    main()
