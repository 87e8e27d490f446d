"""One hostile client of a kind. It stops by itself after `--seconds`, or when it has sent
`--bytes`.

Usage: hostile_clients.py KIND [--seconds 20] [--bytes 20000000000] [--largest 66060288]
[--connections 2]
    [--address 127.0.1.1]

Prints `ready` when its bodies are made, waits for the proxy's URL on its standard input, and at the
end prints a line of JSON: bytes sent, connections, and counts of answers by status. Its kinds are
in `KINDS`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import socket
import ssl
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import uvloop

from stage import any_certificate, raise_files
from tests.fuzz.cost.shapes import BODIES

MIB = 1 << 20
BLOCK = 256 * 1024
POST = "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{}"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PASSED = ("/v1/embeddings", "/tokenize", "/v1/responses", "/v1/messages")
ANSWER_TIMEOUT = 10.0
"""Seconds for an answer; then the client sends the next request on another connection."""
LARGE_STALLED, SMALLER_STALLED = 21, 18
"""Bodies that lack their last byte: of the largest size, and of 1/2, 1/4 and so on of it, down to
256 bytes.
"""
KEYS = [f"key{number}" for number in range(LARGE_STALLED + SMALLER_STALLED)]
"""Keys of hostile clients; the proxy accepts them."""
HANDSHAKES = 4000
"""TLS handshakes that are under way at once: more than the proxy lets be."""
Request = Sequence[bytes]
"""The parts of a request: a head, and a body."""


class Client:
    """The shared state of all connections of a client: its limits and its results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.at = "127.0.0.1", 80
        self.seconds, self.left, self.largest = options.seconds, options.bytes, options.largest
        self.connections, self.address = options.connections, options.address
        self.sent = self.opened = 0
        self.answers: Counter[str] = Counter()
        self.end = 0.0

    @property
    def over(self) -> bool:
        """Whether its time or its bytes are used up."""
        return time.monotonic() >= self.end or self.left <= 0

    def request(self, path: str, body: bytes, more: str = "") -> Request:
        """Return a POST."""
        return POST.format(path, more).encode() + b"content-length: %d\r\n\r\n" % len(body), body

    async def open(self, *, address: str | None = None, buffer: int | None = None) -> socket.socket:
        """Return a connection from the client's address or another. `buffer`: size of its receive
        buffer in bytes.
        """
        made = socket.socket()
        made.setblocking(False)
        try:
            if buffer is not None:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            made.bind((address or self.address, 0))
            async with asyncio.timeout(ANSWER_TIMEOUT):
                await asyncio.get_running_loop().sock_connect(made, self.at)
        except BaseException:
            made.close()
            raise
        self.opened += 1
        return made

    async def send(self, connection: socket.socket, data: bytes) -> None:
        """Send bytes; raise TimeoutError when the limits are reached."""
        view = memoryview(data)
        for at in range(0, len(view), BLOCK):
            if self.over:
                raise TimeoutError
            part = view[at : at + BLOCK]
            await asyncio.get_running_loop().sock_sendall(connection, part)
            self.sent += len(part)
            self.left -= len(part)

    async def read_status(self, connection: socket.socket) -> str:
        """Return the status of an answer when its head has arrived, or "closed"."""
        loop = asyncio.get_running_loop()
        answer = b""
        async with asyncio.timeout(ANSWER_TIMEOUT):
            while b"\r\n\r\n" not in answer and (more := await loop.sock_recv(connection, BLOCK)):
                answer += more
        return answer[9:12].decode("latin-1") if answer else "closed"

    async def drain(self, connection: socket.socket) -> None:
        """Read until the end of the connection, for `ANSWER_TIMEOUT` at most."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(ANSWER_TIMEOUT):
                while await asyncio.get_running_loop().sock_recv(connection, BLOCK):
                    pass

    async def ask(self, requests: Iterator[Request], *, drain: bool = False) -> None:
        """Send requests one after the other, each on a new connection, and count the answers."""
        while not self.over:
            connection: socket.socket | None = None
            status: asyncio.Task[str] | None = None
            try:
                connection = await self.open()
                status = asyncio.ensure_future(self.read_status(connection))
                for part in next(requests):
                    async with asyncio.timeout(ANSWER_TIMEOUT + len(part) / MIB):
                        await self.send(connection, part)
                self.answers[await status] += 1
                if drain:
                    await self.drain(connection)
            except (OSError, TimeoutError) as error:
                answered = (
                    status is not None
                    and status.done()
                    and not status.cancelled()
                    and status.exception() is None
                )
                self.answers[
                    status.result() if answered and status is not None else type(error).__name__
                ] += 1
                await asyncio.sleep(0.05)
            finally:
                if status is not None:
                    status.cancel()
                    await asyncio.wait([status])
                    if not status.cancelled():
                        status.exception()
                if connection is not None:
                    connection.close()

    async def wait(self) -> None:
        """Wait until the time is over."""
        await asyncio.sleep(max(0.0, self.end - time.monotonic() - 0.5))

    async def held(
        self, count: int, begin: Callable[[int, socket.socket], Awaitable[None]], **options: Any
    ) -> None:
        """Open `count` connections, call `begin` on each, and hold them until the time is over.
        `options` go to `open`.
        """

        opening = asyncio.Semaphore(100)

        async def one(number: int) -> None:
            try:
                given = {
                    name: value(number) if callable(value) else value
                    for name, value in options.items()
                }
                async with opening:
                    connection = await self.open(**given)
            except (OSError, TimeoutError) as error:
                self.answers[type(error).__name__] += 1
                return
            with connection:
                with suppress(OSError, TimeoutError):
                    await begin(number, connection)
                await self.wait()
                try:
                    answer = connection.recv(4096)
                except BlockingIOError:
                    self.answers["held"] += 1
                except OSError as error:
                    self.answers[type(error).__name__] += 1
                else:
                    self.answers[answer[9:12].decode("latin-1") if answer else "closed"] += 1

        await asyncio.gather(*(one(number) for number in range(count)))


Run = Callable[[], Awaitable[None]]
Kind = Callable[[Client], Run]
"""Makes the bodies, and returns the function that sends them."""


def bodies(*named: tuple[str, str, float], connections: int | None = None) -> Kind:
    """A client that posts bodies in turns: (path, name in tests/fuzz/cost/shapes.py, maximum
    MiB).
    """

    def kind(client: Client) -> Run:
        render = functools.cache(
            lambda name, size: BODIES[name].render(min(client.largest, int(size * MIB)))
        )
        made = [client.request(path, render(name, size)) for path, name, size in named]

        async def run() -> None:
            turns = itertools.cycle(made)
            await asyncio.gather(
                *(client.ask(turns) for _ in range(connections or client.connections))
            )

        return run

    return kind


def asking(way: str, *, stream: bool, **more: object) -> Kind:
    """A client that requests the answers of hostile engines (hostile_engine.py): of the decode and
    of the prefill engine.
    """

    def kind(client: Client) -> Run:
        asked = [
            {
                "model": "m",
                "prompt": "x" * 400,
                "max_tokens": 32,
                "stream": stream,
                "user": f"hostile:{way}{leg}",
                **more,
            }
            for leg in ("", "-prefill")
        ]

        async def run() -> None:
            # Otherwise each answer would be drained for as long as its connection is kept.
            more = "connection: close\r\n"
            turns = itertools.cycle(
                [client.request(COMPLETIONS, json.dumps(one).encode(), more) for one in asked]
            )
            await asyncio.gather(
                *(client.ask(turns, drain=True) for _ in range(client.connections))
            )

        return run

    return kind


def stalled(more: Callable[[int], str], address: Callable[[int], str | None]) -> Kind:
    """A client that sends 21 bodies of the largest size without their last byte, then smaller ones
    into the memory left.
    """

    def kind(client: Client) -> Run:
        size = client.largest if client.largest < 60 * MIB else 64 * MIB

        async def begin(number: int, connection: socket.socket) -> None:
            halved = max(0, number - LARGE_STALLED + 1)
            if halved:
                await asyncio.sleep(client.seconds / 4 + 0.1 * halved)
            left = (size >> halved) - 1
            head = POST.format(COMPLETIONS, more(number)) + f"content-length: {left + 1}\r\n\r\n"
            await client.send(connection, head.encode())
            block = b" " * MIB
            while left:
                await client.send(connection, block[:left])
                left -= min(left, MIB)

        return lambda: client.held(LARGE_STALLED + SMALLER_STALLED, begin, address=address)

    return kind


def keyless(count: int) -> Kind:
    """A client without a key that sends halves of bodies, to routes of each kind."""

    def kind(client: Client) -> Run:
        half = b" " * MIB

        async def begin(number: int, connection: socket.socket) -> None:
            path = _KEYLESS[number % len(_KEYLESS)]
            await client.send(
                connection, POST.format(path, f"content-length: {2 * len(half)}\r\n\r\n").encode()
            )
            await client.send(connection, half)

        return lambda: client.held(count, begin)

    return kind


_KEYLESS = (
    COMPLETIONS,
    CHAT,
    *PASSED,
    "/invocations",
    "/api/v1/telemetry",
    "/health",
    "/ready",
    "/metrics",
    "/unknown",
)


def _wrong_keys() -> Iterator[Request]:
    """Small requests, each with another key that is not valid."""
    for number in itertools.count():
        head = POST.format(
            COMPLETIONS, f"authorization: Bearer wrong{number}\r\ncontent-length: 15\r\n\r\n"
        )
        yield head.encode(), b'{"prompt":"xx"}'


def wrong_keys(client: Client) -> Run:
    """A client that tries one key after the other."""

    async def run() -> None:
        turns = _wrong_keys()
        await asyncio.gather(*(client.ask(turns) for _ in range(2 * client.connections)))

    return run


def _hello() -> bytes:
    """The first message of a client's handshake."""
    out = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        any_certificate().wrap_bio(ssl.MemoryBIO(), out, server_hostname="127.0.0.1").do_handshake()
    return out.read()


def tls_handshakes(client: Client) -> Run:
    """A client that begins one handshake after the other and ends none. The oldest ones beyond
    `HANDSHAKES` are closed.
    """
    hello = _hello()
    begun: deque[socket.socket] = deque()

    def close() -> None:
        with begun.popleft() as oldest:
            try:
                answer = oldest.recv(1)
            except BlockingIOError:
                client.answers["none"] += 1
            except OSError as error:
                client.answers[type(error).__name__] += 1
            else:
                client.answers["hello" if answer else "closed"] += 1

    async def begin() -> None:
        while not client.over:
            try:
                begun.append(await client.open())
                await client.send(begun[-1], hello)
            except OSError as error:  # a TimeoutError among them
                client.answers[type(error).__name__] += 1
                await asyncio.sleep(0.05)
            while len(begun) > HANDSHAKES:
                close()

    async def run() -> None:
        try:
            await asyncio.gather(*(begin() for _ in range(64)))
        finally:
            while begun:
                close()

    return run


def drip(client: Client) -> Run:
    """Bodies at one byte per second, and bodies in chunks of one byte."""
    chunked = POST.format(COMPLETIONS, "transfer-encoding: chunked\r\n\r\n").encode()
    flood = b"1\r\n \r\n" * (min(client.largest, 24 * MIB) // 6)

    async def begin(number: int, connection: socket.socket) -> None:
        await client.send(
            connection, POST.format(COMPLETIONS, "content-length: 100000\r\n\r\n").encode()
        )
        while not client.over:
            await client.send(connection, b" ")
            await asyncio.sleep(1)

    async def run() -> None:
        flooding = (
            client.ask(itertools.repeat((chunked, flood))) for _ in range(client.connections)
        )
        await asyncio.gather(client.held(60, begin), *flooding)

    return run


def readers(client: Client) -> Run:
    """500 streams with long first events, each read at one byte per second."""
    body = json.dumps(
        {
            "model": "m",
            "prompt": "x" * 200_000,
            "stream": True,
            "return_token_ids": True,
            "max_tokens": 32,
        }
    )
    request = b"".join(client.request(COMPLETIONS, body.encode()))

    async def begin(number: int, connection: socket.socket) -> None:
        await client.send(connection, request)
        while not client.over and await asyncio.get_running_loop().sock_recv(connection, 1):
            await asyncio.sleep(1)

    return lambda: client.held(500, begin, buffer=4096)


def idle(count: int) -> Kind:
    """Connections that send nothing, or half a head."""

    def kind(client: Client) -> Run:
        async def begin(number: int, connection: socket.socket) -> None:
            if number % 2:
                await client.send(connection, b"POST /v1/completions HTTP/1.1\r\nhost: ")

        return lambda: client.held(count, begin)

    return kind


def pipeline(client: Client) -> Run:
    """64 requests on each of 64 connections; no answer is read."""
    one = b"".join(
        client.request(
            COMPLETIONS, b'{"model":"m","prompt":"' + b"x" * 2000 + b'","max_tokens":32}'
        )
    )
    pipelines = [one * 64, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 64]

    async def begin(number: int, connection: socket.socket) -> None:
        await client.send(connection, pipelines[number % 2])

    return lambda: client.held(64, begin, buffer=4096)


def unread(way: str, connections: int, *, every: float, rate: int = 0) -> Kind:
    """A client that sends the next request on a connection after a while, and reads `rate` bytes
    per second of the answers.
    """

    def kind(client: Client) -> Run:
        body = json.dumps(
            {"model": "m", "prompt": "x" * 400, "max_tokens": 32, "user": f"hostile:{way}"}
        )
        one = b"".join(client.request(COMPLETIONS, body.encode()))

        async def read(connection: socket.socket) -> None:
            while await asyncio.get_running_loop().sock_recv(connection, max(1, int(rate * every))):
                await asyncio.sleep(every)

        async def ask() -> None:
            while not client.over:
                reading: asyncio.Task[None] | None = None
                try:
                    with await client.open(buffer=4096) as connection:
                        if rate:
                            reading = asyncio.ensure_future(read(connection))
                        while True:
                            await client.send(connection, one)
                            await asyncio.sleep(every)
                except OSError as error:  # a TimeoutError among them: its time is over
                    client.answers[type(error).__name__] += 1
                finally:
                    if reading is not None:
                        reading.cancel()
                        await asyncio.wait([reading])

        async def run() -> None:
            await asyncio.gather(*(ask() for _ in range(connections)))

        return run

    return kind


def small(*requests: bytes) -> Kind:
    """A client that sends small requests one after the other, as fast as they are answered."""

    def kind(client: Client) -> Run:
        async def run() -> None:
            turns = itertools.cycle([(one,) for one in requests])
            await asyncio.gather(*(client.ask(turns) for _ in range(2 * client.connections)))

        return run

    return kind


_BAD_REQUEST = POST.format(COMPLETIONS, "content-length: 2\r\n\r\n").encode() + b"[]"
_UNUSUAL_TARGETS = (
    "/v1/completions#a", "/v1/completions?#", "http://x/v1/completions#a",
    "http://[/v1/completions", "http://", "//", "*", "x",
    "/v1/completions%", "/%00", "/v1/\u00e9", "http://x:99999999/", "/v1/completions;a=b",
    "http:///v1/completions", "?", "#",
)  # fmt: skip


def _unusual_requests() -> Iterator[bytes]:
    for target in _UNUSUAL_TARGETS:
        yield (
            POST.format(target, "content-length: 15\r\n\r\n").encode("latin-1") + b'{"prompt":"xx"}'
        )
        yield f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode("latin-1")


KINDS: dict[str, Kind] = {
    "prompts": bodies(
        (COMPLETIONS, "prompts of a letter", 1), (COMPLETIONS, "prompts of a letter", 63)
    ),
    "keys": bodies((COMPLETIONS, "top-level keys", 63)),
    "nested": bodies((CHAT, "arrays in response_format", 63)),
    "messages": bodies((CHAT, "empty messages", 63), (CHAT, "short messages", 63)),
    "parts": bodies((CHAT, "content parts", 63), (CHAT, "empty content parts", 63)),
    "nan": bodies((COMPLETIONS, "NaN", 63), (CHAT, "one NaN in a long text", 63)),
    "utf16": bodies((COMPLETIONS, "UTF-16", 63), (COMPLETIONS, "UTF-16 of a long text", 63)),
    "anew": bodies((COMPLETIONS, "UTF-16 of letters beyond ASCII", 63), connections=4),
    "xargs": bodies(
        (COMPLETIONS, "keys of vllm_xargs", 63), (COMPLETIONS, "keys of extra_args", 63)
    ),
    "numbers": bodies((COMPLETIONS, "token ids", 60), (COMPLETIONS, "a number of many digits", 60)),
    "deep": bodies((COMPLETIONS, "arrays in each other", 63), (CHAT, "objects in each other", 63)),
    "model": bodies(
        (COMPLETIONS, "a long model", 16), (COMPLETIONS, "a model of control characters", 16)
    ),
    "stalled": stalled(lambda _: "", lambda _: None),
    "stalled-keys": stalled(lambda n: f"authorization: Bearer {KEYS[n]}\r\n", lambda _: None),
    "stalled-addresses": stalled(lambda _: "", lambda n: f"127.0.2.{n + 1}"),
    "keyless": keyless(250),
    "wrong-keys": wrong_keys,
    "tls-handshakes": tls_handshakes,
    "drip": drip,
    "readers": readers,
    "idle": idle(4000),
    "pipeline": pipeline,
    "unread": unread("whole60k", 12, every=0.02),
    "dribble": unread("whole60k", 12, every=0.02, rate=900),
    "unread-large": unread("whole5m", 2, every=0.1),
    "passed": bodies(
        *(
            (path, name, 63)
            for path in PASSED
            for name in ("inputs of embeddings", "top-level keys", "NaN", "token ids")
        )
    ),
    "logpipe": small(_BAD_REQUEST),
    "files": idle(500),
    "fragments": small(*_unusual_requests()),
    "answer1g": asking("answer1g", stream=False),
    "head": asking("head", stream=True),
    "headers": asking("headers", stream=False),
    "event": asking("event", stream=True),
    "tiny": asking("tiny", stream=True),
    "comments": asking("comments", stream=True),
}
"""Kinds by name. Those that call `asking` or `unread` need hostile_engine.py behind the proxy."""


async def run(client: Client, action: Run) -> None:
    """Run the client until its time is over."""
    client.end = time.monotonic() + client.seconds
    with suppress(TimeoutError):
        async with asyncio.timeout(client.seconds):
            await action()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--bytes", type=int, default=20_000_000_000, help="maximum bytes to send")
    parser.add_argument("--largest", type=int, default=63 * MIB, help="maximum bytes of one body")
    parser.add_argument(
        "--connections", type=int, default=2, help="concurrent connections with large bodies"
    )
    parser.add_argument(
        "--address", default="127.0.1.1", help="source address; honest clients have another"
    )
    options = parser.parse_args()
    raise_files()
    client = Client(options)
    action = KINDS[options.kind](client)
    print("ready", flush=True)
    parts = urlsplit(sys.stdin.readline().strip())
    client.at = parts.hostname or "127.0.0.1", parts.port or 80
    uvloop.run(run(client, action))
    print(
        json.dumps(
            {"sent": client.sent, "connections": client.opened, "answers": dict(client.answers)}
        )
    )


if __name__ == "__main__":
    main()
