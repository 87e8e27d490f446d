"""Mock engines that send hostile answers to marked requests: `"user": "hostile:KIND"` in a body
names one of `WAYS`.

Usage: hostile_engine.py PORT [PORT ...] [--chunks N] [--itl SECONDS] [--page health|metrics]

All other requests get the answers of mock_engine.py. `--page` makes the page of that name hostile
on all these engines instead. No answer is longer than `MAX_ANSWER` bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import re
from collections.abc import Callable
from typing import Any

import uvloop

import mock_engine

MAX_ANSWER = 1 << 30
BLOCK = 1 << 16
MAX_BODY = 1 << 20
"""Bytes of a request that an engine reads. It refuses a larger one without parsing it: the mock
must not be slow itself.
"""
_ASKED = re.compile(rb'"user": ?"hostile:([a-z0-9]+)(-prefill)?"')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
_JSON, _STREAM = _HEAD % b"application/json", _HEAD % b"text/event-stream"
_LONG = b"content-length: %d\r\n\r\n" % MAX_ANSWER
_TINY = b"data: {}\n\n" * (BLOCK // 10)
_FIRST = (
    b'data: {"id":"c","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
)
_LINE = b'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="%d"} 1.0\n'
_TOO_LONG = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'


def _whole(size: int) -> tuple[bytes, bytes]:
    """Return a right answer with a text of so many bytes."""
    choice = b'{"index":0,"text":"%b","logprobs":null,"finish_reason":"length"}' % (b"a" * size)
    usage = b'{"prompt_tokens":1,"completion_tokens":32,"total_tokens":33}'
    body = (
        b'{"id":"c","object":"text_completion","created":1,"model":"m","choices":[%b],"usage":%b}'
        % (choice, usage)
    )
    return _JSON + b"content-length: %d\r\n\r\n%b" % (len(body), body), b""


WAYS: dict[bytes, tuple[bytes, bytes]] = {
    b"whole60k": _whole(60_000),
    b"whole5m": _whole(5_000_000),
    b"answer1g": (_JSON + _LONG + b'{"choices":[{"text":"', b"a" * BLOCK),
    b"head": (_JSON + b"x-long: ", b"a" * BLOCK),
    b"headers": (_JSON, b"a: b\r\n" * (BLOCK // 6)),
    b"event": (_STREAM + _LONG + _FIRST + b'data: {"id":"', b"a" * BLOCK),
    b"tiny": (_STREAM + _LONG + _FIRST, _TINY),
    b"comments": (_STREAM + _LONG + _FIRST, b":\n\n" * (BLOCK // 3)),
}
"""The beginning of an answer, and the block that is repeated after it."""


@functools.cache
def _page(path: bytes) -> tuple[bytes, bytes]:
    """Return the beginning of a hostile page, and the block that is repeated after it."""
    if path == b"/health":
        return _JSON + _LONG, b"a" * BLOCK
    lines = b"".join([_LINE % number for number in range(1_000_000)])
    return _HEAD % b"text/plain" + b"content-length: %d\r\n\r\n" % len(lines) + lines, b""


class Connection(mock_engine.Connection):
    """A connection to an engine that may be hostile."""

    def __init__(self, engine: mock_engine.Engine, page: bytes | None) -> None:
        super().__init__(engine)
        self.page = page
        self.parts: list[bytes] = []
        self.size = 0
        self.flowing = True
        self.again: Callable[[], None] | None = None

    def on_message_begin(self) -> None:
        """See httptools."""
        self.parts, self.size = [], 0

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self.size += len(body)
        if self.size <= MAX_BODY:
            self.parts.append(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self.body = b"".join(self.parts)
        if self.size > MAX_BODY:
            head = (
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: "
                b"%d\r\n\r\n"
            )
            self.transport.write(head % len(_TOO_LONG) + _TOO_LONG)
        elif self.page is not None and self.path == self.page:
            self._flood(*_page(self.page))
        elif (asked := _ASKED.search(self.body)) and (asked[2] is not None) == (
            b'"do_remote_decode":true' in self.body
        ):
            self._flood(*WAYS[asked[1]])
        else:
            super().on_message_complete()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.flowing = False

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.flowing = True
        if self.again is not None:
            self.again()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.again = None
        super().connection_lost(exc)

    def _flood(self, begin: bytes, block: bytes) -> None:
        """Write an endless answer as fast as it is read, at most MAX_ANSWER bytes."""
        left = MAX_ANSWER // len(block) if block else 0

        def more() -> None:
            nonlocal left
            while self.flowing and left and not self.transport.is_closing():
                left -= 1
                self.transport.write(block)

        self.again = more
        self.transport.write(begin)
        more()


async def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ports", metavar="PORT", type=int, nargs="+")
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--itl", type=float, default=0.02, help="seconds between two chunks")
    parser.add_argument("--page", choices=["health", "metrics"])
    options = parser.parse_args()
    page = None if options.page is None else b"/" + options.page.encode()
    loop: Any = asyncio.get_running_loop()
    for port in options.ports:
        engine = mock_engine.Engine(port, options.chunks, options.itl, 0.0)
        made = functools.partial(Connection, engine, page)
        await loop.create_server(made, "127.0.0.1", port, backlog=4096)
    await loop.create_future()


if __name__ == "__main__":
    uvloop.run(main())
