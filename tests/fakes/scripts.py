"""Scripts for fake engines: the misfortunes that the tests send the proxy through, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.fakes import answers
from tests.fakes.engine import Reply, Script, handle

WORD = answers.piece(False, " a")
CHAT_WORD = answers.piece(True, " a")


def whole(body: bytes, status: int = 200) -> Script:
    """A complete answer."""

    async def script(reply: Reply) -> None:
        await reply.whole(body, status)

    return script


def streams(*pieces: bytes, then: str = "finish") -> Script:
    """A stream of pieces; `then` "finish", "eof", "reset" or "stall"."""

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*pieces)
        await ending(reply, then)

    return script


async def ending(reply: Reply, how: str) -> None:
    """End an answer as named."""
    match how:
        case "finish":
            await reply.finish()
        case "eof":
            reply.eof()
        case "reset":
            reply.reset()
        case "stall":
            await reply.stall()


async def reset(reply: Reply) -> None:
    """RST before a byte."""
    reply.reset()


async def eof(reply: Reply) -> None:
    """The connection closes before a byte."""
    reply.eof()


async def stall(reply: Reply) -> None:
    """Nothing at all."""
    await reply.stall()


async def garbage(reply: Reply) -> None:
    """Bytes that are no HTTP."""
    await reply.raw(b"\x16\x03\x01 what is this\r\n\r\n")
    await reply.stall()


async def half(reply: Reply) -> None:
    """An answer that breaks off in its body."""
    await reply.raw(
        b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"id":'
    )
    reply.eof()


def gate(event: asyncio.Event, then: Script) -> Script:
    """Wait for an event of the test, then go on."""

    async def script(reply: Reply) -> None:
        await event.wait()
        await then(reply)

    return script


def after_word(seen: asyncio.Event, then: Script) -> Script:
    """A stream of completions whose first word the test waits for, before it goes on."""

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.piece(WORD)
        await seen.wait()
        await then(reply)

    return script


async def one_more_word(reply: Reply) -> None:
    """The rest of a stream of completions: a word, and its end."""
    await reply.pieces(WORD, answers.end())
    await reply.finish()


def without(names: Sequence[str]) -> Script:
    """A prefill answer whose handle lacks some keys."""

    async def script(reply: Reply) -> None:
        ids = reply.engine.ids(reply.request)
        params = {
            name: value for name, value in handle(reply.engine, ids).items() if name not in names
        }
        await reply.whole(answers.whole(reply.request.chat, ids, "x", 1, ids=True, kv=params))

    return script


def kv(**values: object) -> Script:
    """A prefill answer whose handle has other values."""

    async def script(reply: Reply) -> None:
        ids = reply.engine.ids(reply.request)
        params = {**handle(reply.engine, ids), **values}
        await reply.whole(answers.whole(reply.request.chat, ids, "x", 1, ids=True, kv=params))

    return script
