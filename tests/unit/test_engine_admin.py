"""Requests to engines outside the data path: one that hangs holds up no other."""

import asyncio
from contextlib import AsyncExitStack

from pdproxy.upstream.admin import EngineAdmin

HANGING = 150
"""Requests at a time to an engine that hangs: more than aiohttp's own limit of 100 connections for all."""


async def test_an_engine_that_hangs_holds_up_no_other() -> None:
    opened: list[asyncio.StreamWriter] = []

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with AsyncExitStack() as stack:
        urls = []
        for serve in (hang, answer):
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            stack.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        admin = EngineAdmin(timeout=5)
        stack.push_async_callback(admin.close)
        waiting = [asyncio.create_task(admin.token_ids(urls[0], b"{}", timeout=60)) for _ in range(HANGING)]
        while len(opened) < 100:
            await asyncio.sleep(0.01)
        await admin.healthy(urls[1])
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for writer in opened:
            writer.close()
