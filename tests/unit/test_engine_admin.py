"""Requests to engines outside the data path: one that hangs holds up no other."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from pdproxy.kit.errors import AnswerBudgetError, EngineError
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.upstream.answer_budget import AnswerBudget

HANGING = 150
"""Requests at a time to an engine that hangs: more than aiohttp's own limit of 100 connections for
all.
"""


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
        admin = EngineAdmin(deadlines=Deadlines(probe=5))
        stack.push_async_callback(admin.close)
        waiting = [
            asyncio.create_task(admin.token_ids(urls[0], b"{}", timeout=60)) for _ in range(HANGING)
        ]
        while len(opened) < 100:
            await asyncio.sleep(0.01)
        await admin.healthy(urls[1])
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for writer in opened:
            writer.close()


async def test_ids_count_in_the_budget_of_answers() -> None:
    """An engine decides how long an answer is, and several may come at once: no more is read,
    whatever the request's length.
    """
    ids = b"1," * (100 << 10) + b"1"
    announced: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(
            int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        )
        body = b'{"count":1,"tokens":[%b]}' % ids
        length = announced[0] if announced else b"%d" % len(body)
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %b\r\n\r\n%b" % (length, body)
        )
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        budget = AnswerBudget(1 << 20, 300 << 10)
        admin = EngineAdmin(deadlines=Deadlines(probe=5), budget=budget)
        assert (await admin.token_ids(url, b"{}")).json == b"[%b]" % ids
        assert budget.held == 0
        others = budget.share()
        others.grow(150 << 10)
        with pytest.raises(AnswerBudgetError):
            await admin.token_ids(url, b"{}")
        assert budget.held == others.size
        announced.append(b"%d" % (33 << 20))
        with pytest.raises(EngineError, match="more than 33554432 bytes"):
            await admin.token_ids(url, b" " * (5 << 20))
        await admin.close()
