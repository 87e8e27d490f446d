"""Servers that the load generator meets: simulated engines in a thread of their own, and hostile
ones, byte by byte.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trustme

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer

FAST = SimFacts(hardware=Hardware(speed=0), eos_every=0)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
GOOD = HEAD + TOKEN + TOKEN + USAGE + DONE
Write = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def answering(write: Write | bytes) -> AsyncIterator[str]:
    """Yield the URL of a server that reads a request and then writes what it is told to, and
    closes.
    """
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line[15:])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ),
                0,
            )
            await reader.readexactly(length)
            if isinstance(write, bytes):
                writer.write(write)
                await writer.drain()
            else:
                await write(writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@contextmanager
def engines(
    *facts: SimFacts, faults: tuple[str, ...] = (), tls: ssl.SSLContext | None = None
) -> Iterator[list[SimServer]]:
    """Yield simulated engines in a thread of their own: the test's main thread runs the command."""
    made: list[SimServer] = []
    ready, over = threading.Event(), threading.Event()
    wrong: list[BaseException] = []

    async def serve() -> None:
        for one in facts:
            made.append(SimServer(one, chance=len(made), faults=faults, tls=tls))
            await made[-1].start()
        ready.set()
        await asyncio.to_thread(over.wait)
        for server in made:
            await server.stop()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            wrong.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        assert not wrong
        yield made
    finally:
        over.set()
        thread.join(60)
    assert not wrong
    assert not [crash for server in made for crash in server.crashes]


def tls_context(authority: trustme.CA) -> ssl.SSLContext:
    """Return the context of a server on this machine, with a certificate of an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context
