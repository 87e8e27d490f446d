"""A client leaves at once behind a slow connect to a decode engine that is frozen: P's KV is free
long before its lease.
"""

# The decode engine never reads the request, so it frees nothing before it goes on; the other decode
# engine must release the KV.

import asyncio
import contextlib
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from .client import Progress, ask
from .engine import MODEL, Engine
from .fleet import exchange
from .launcher import Launcher
from .proxy import Proxy
from .shapes import COMPLETIONS, story
from .test_load import EXPIRED, USED, _until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

SOON = 12.0
"""Seconds within which P's KV must be free: three tries of a release, beside other work. The lease
is 30 s.
"""


class SlowPort:
    """A port before an engine's, which passes bytes on. While it is full, the kernel drops what
    would connect to it.
    """

    def __init__(self, engine_port: int) -> None:
        self.asked = asyncio.Event()
        """Set when a request with a body has come."""
        self._engine_port = engine_port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._open: set[asyncio.Task[None]] = set()
        self._filling: list[socket.socket] = []
        self._accepting = asyncio.create_task(self._accept())

    async def fill(self) -> None:
        """Take no connections from now on, and end those that are open."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        await self._end_all()
        self.asked.clear()
        self._socket.listen(0)
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(("127.0.0.1", self.port))
            self._filling.append(one)

    def drain(self) -> None:
        """Take connections again: what would connect is in at its next try."""
        for one in self._filling:
            one.close()
        self._filling.clear()
        self._socket.listen(100)
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """End all."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        await self._end_all()
        for one in (self._socket, *self._filling):
            one.close()

    async def _end_all(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            task = asyncio.create_task(self._relay(connection))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _relay(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        answers, engine = await asyncio.open_connection("127.0.0.1", self._engine_port)
        try:
            both = [self._pass(reader, engine, self.asked), self._pass(answers, writer, None)]
            for first in asyncio.as_completed(both):
                await first
                break
        finally:
            writer.close()
            engine.close()

    @staticmethod
    async def _pass(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event | None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if asked is not None and data.startswith(b"POST"):
                    asked.set()
                writer.write(data)
                await writer.drain()


@pytest.fixture(scope="module")
def engines(launcher: Launcher) -> Iterator[list[Engine]]:
    """A prefill engine and two decode engines that have met it."""
    engines = [Engine.start(launcher, "frozen-p", "prefill")]
    try:
        engines += [Engine.start(launcher, f"frozen-d{number}", "decode") for number in range(2)]
        for engine in engines:
            engine.wait()
        for decode in engines[1:]:
            exchange(engines[0], decode)
        yield engines
    finally:
        for engine in engines:
            engine.signal(signal.SIGCONT)
            engine.terminate()
        for engine in engines:
            engine.stop()


@contextlib.asynccontextmanager
async def _slow(engine: Engine) -> AsyncIterator[SlowPort]:
    slow = SlowPort(engine.port)
    try:
        yield slow
    finally:
        await slow.close()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("behind", [False, True], ids=["while it connects", "behind the connect"])
async def test_nobody_waits_for_a_lease(
    engines: list[Engine], tmp_path: Path, behind: bool, streamed: bool
) -> None:
    """The client of a frozen decode engine leaves while pdproxy connects to it, or when the request
    has just been written.
    """
    prefill, frozen, other = engines
    expired = prefill.counters().sum(EXPIRED)
    async with _slow(frozen) as slow:
        decodes = [replace(frozen, port=slow.port), other]
        # On a busy machine an engine is slow, not down.
        settings = {"deadlines": {"connect": 10}, "probes": {"interval": 20}}
        proxy = await asyncio.to_thread(
            Proxy.start, [prefill], decodes, tmp_path, settings=settings
        )
        tasks: list[asyncio.Task[object]] = []

        def send(
            tokens: int, *, stream: bool, progress: Progress | None = None
        ) -> "asyncio.Task[object]":
            body = {
                "model": MODEL,
                "prompt": story(secrets.token_hex(6)),
                "max_tokens": tokens,
                "temperature": 0,
            }
            body |= {"stream": stream, "ignore_eos": True}
            task: asyncio.Task[object] = asyncio.create_task(
                ask(proxy.url, COMPLETIONS, body, progress=progress)
            )
            tasks.append(task)
            return task

        try:
            # KV moves from P to both. Then the other decode engine has a stream, and the next
            # prompt goes to the frozen one.
            await asyncio.gather(*(send(24, stream=False) for _ in range(8)))
            while True:
                slow.asked.clear()
                begun = Progress(3)
                stream = send(1500, stream=True, progress=begun)
                await begun.wait()
                if not slow.asked.is_set():
                    break
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)
            await slow.fill()
            frozen.signal(signal.SIGSTOP)
            asked = send(64, stream=streamed)
            held = "pdproxy_kv_handles"
            # Until the request is written, the KV is held for the proxy.
            await _until(
                lambda: proxy.counters().sum(held, state="held"),
                20,
                "no decode engine is connected to",
            )
            if behind:
                await asyncio.sleep(1.5)  # the kernel tries again after 1 s and after 3 s
                slow.drain()
                async with asyncio.timeout(20):
                    await slow.asked.wait()
            else:
                await asyncio.sleep(0.5)
            asked.cancel()
            left = time.monotonic()
            await _until(lambda: not prefill.counters().sum(USED), 40, "P's KV is held")
            took = time.monotonic() - left
            ended = proxy.counters().by("pdproxy_kv_handles_ended_total", "end")
            leases = prefill.counters().sum(EXPIRED) - expired
            print(
                f"\nP's KV was free {took:.1f} s behind the client's end; handles ended {ended}, "
                f"{leases:.0f} leases expired"
            )
            assert not leases
            assert took < SOON
        finally:
            frozen.signal(signal.SIGCONT)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(proxy.stop)
