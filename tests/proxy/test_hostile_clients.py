"""Clients that mean harm: each gets an error or meets a deadline, delays nobody, and leaves nothing
behind.
"""

# While the hostile connection is open another client asks and is served; that both happen is the
# proof, not how fast.

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from pdproxy.observe.events import DeadlinePassed, Refused
from pdproxy.web.connection_bounds import MAX_PIPELINED
from tests.fakes import answers, scripts
from tests.fakes.client import Client, request
from tests.fakes.engine import Reply, serve
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world

PATIENCE = 30.0
SHORT = {"client_head": 0.5, "client_body": 0.5, "client_write": 0.5}
MAX_BODY = 1_000_000
LIMITS = {"max_body_bytes": MAX_BODY}
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
DRIP = 0.02
"""Seconds between two bytes of a client that sends as slowly as it can; a deadline must not be put
off by each.
"""


@dataclass(frozen=True)
class Attack:
    """What a client sends, piece by piece (`drips`: without end, its last piece again and again),
    and what it may get for it.

    `statuses`: any of these; empty: the connection is closed without an answer.
    """

    name: str
    pieces: Callable[[], Iterator[bytes]]
    statuses: tuple[int, ...]
    drips: bool = False


def once(data: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter([data])


def many(first: bytes, piece: bytes, count: int) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield first
        for _ in range(count):
            yield piece

    return pieces


def nested(
    field: str, opened: str, closed: str, depth: int = 10_000
) -> Callable[[], Iterator[bytes]]:
    deep = opened * depth + "1" + closed * depth
    body = json.dumps(completion(**{field: "@"})).replace('"@"', deep).encode()
    return once(request("POST", COMPLETIONS, body))


BIG = b"%x\r\n" % 65536 + b" " * 65536 + b"\r\n"
ATTACKS = [
    Attack("a gigabyte declared", once(POST + b"content-length: 1000000000\r\n\r\n"), (413,)),
    Attack(
        "a length of many digits",
        once(POST + b"content-length: " + b"9" * 400 + b"\r\n\r\n"),
        (400,),
    ),
    Attack("a negative length", once(POST + b"content-length: -1\r\n\r\n"), (400,)),
    Attack("an empty length", once(POST + b"content-length: \r\n\r\n{}"), (400,)),
    Attack("a gigabyte in chunks", many(CHUNKED, BIG, 1000), (413,)),
    Attack("chunks of a byte", many(CHUNKED, b"1\r\n \r\n" * 10_000, 110), (400, 408)),
    Attack(
        "declared short, sent long",
        many(POST + b"content-length: 2\r\n\r\n{ ", b"x" * 65536, 100),
        (400,),
    ),
    Attack(
        "a body byte by byte",
        many(POST + b"content-length: 100000\r\n\r\n", b" ", 1),
        (408,),
        drips=True,
    ),
    Attack("half a body", once(POST + b"content-length: 1000\r\n\r\n{"), (408,)),
    Attack("half a chunk", once(CHUNKED + b"ff\r\n{"), (408,)),
    Attack("a body without its last chunk", once(CHUNKED + b"2\r\n{}\r\n"), (408,)),
    Attack("half a body of another route", once(GET + b"content-length: 9\r\n\r\n{"), (200,)),
    Attack("arrays, deep, in a known field", nested("messages", "[", "]"), (400,)),
    Attack("objects, deep, in an unknown field", nested("whatever", '{"a":', "}"), (400,)),
    Attack("arrays, deep, in the prompt", nested("prompt", "[", "]"), (400,)),
    Attack("a header of 100 KB", once(GET + b"x: " + b"y" * 100_000 + b"\r\n\r\n"), (431,)),
    Attack("a header without an end", many(GET + b"x: ", b"y" * 10_000, 500), (431,)),
    Attack("a header's name without an end", many(GET, b"y" * 10_000, 500), (431,)),
    Attack("a million headers", many(GET, b"a: b\r\n" * 10_000, 100), (431,)),
    Attack("a request line of 1 MB", many(b"GET /", b"y" * 100_000, 10), (414, 431)),
    Attack(
        "a path of escapes",
        once(b"POST /v1/" + b"%%" * 500 + b" HTTP/1.1\r\nhost: x\r\n\r\n"),
        (414,),
    ),
    Attack(
        "a query of 3 KB",
        once(b"GET /health?" + b"y" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"),
        (200,),
    ),
    Attack("a path byte by byte", many(b"GET /", b"y", 1), (408, 414), drips=True),
    Attack(
        "trailers without an end",
        many(CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 1000, 100),
        (431,),
    ),
    Attack("a trailer of 1 MB", many(CHUNKED + b"2\r\n{}\r\n0\r\na: ", b"y" * 100_000, 10), (431,)),
    Attack("a chunk's extension of 1 MB", many(CHUNKED + b"2;", b"y" * 100_000, 10), (400, 431)),
    Attack("half a request line", once(b"POST /v1/comp"), (408,)),
    Attack("no end of the head", once(GET), (408,)),
    Attack("a head byte by byte", many(GET + b"x: ", b"y", 1), (408,), drips=True),
    Attack("nothing", once(b""), ()),
    Attack("empty lines", many(b"\r\n", b"\r\n", 1), (), drips=True),
    Attack("a chunk's size that is none", once(CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n"), (400,)),
    Attack(
        "a chunk's size beyond 64 bits",
        once(CHUNKED + b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
        (400,),
    ),
    Attack("a negative chunk", once(CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n"), (400,)),
    Attack("a chunk longer than its size", once(CHUNKED + b"2\r\n{}}}\r\n0\r\n\r\n"), (400,)),
    Attack(
        "a length and chunks",
        once(POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /x"),
        (400,),
    ),
    Attack("two lengths", once(POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}"), (400,)),
    Attack(
        "chunked, but not last",
        once(POST + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
        (400,),
    ),
    Attack("a name and a blank", once(POST + b"content-length : 2\r\n\r\n{}"), (400,)),
    Attack("bare line feeds", once(GET.replace(b"\r\n", b"\n") + b"\n"), (400,)),
    Attack("a NUL in a header", once(GET + b"x: a\x00b\r\n\r\n"), (400,)),
    Attack("HTTP/0.9", once(b"GET /health\r\n\r\n"), (200,)),
    Attack("an unknown method", once(b"STEAL /health HTTP/1.1\r\nhost: x\r\n\r\n"), (400,)),
    Attack(
        "HTTP/2",
        once(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
        (400,),
    ),
    Attack(
        "a TLS hello",
        once(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256))),
        (400,),
    ),
    Attack(
        "no body after 100-continue",
        once(POST + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n"),
        (100,),
    ),
]


@asynccontextmanager
async def besieged(**settings: Any) -> AsyncIterator[World]:
    """A world with short deadlines, in which nothing of a client is left at the end: no connection,
    task or byte.
    """
    settings = {"deadlines": SHORT, "limits": LIMITS, **settings}
    async with world(**settings) as w:
        yield w
        for client in w._clients:
            client.close()
        await until(lambda: not w.connections and not w.tasks, PATIENCE)
        assert w.body_bytes == 0


async def served_meanwhile(w: World) -> None:
    """Another client is served."""
    answer = await w.ask(COMPLETIONS, completion())
    assert (answer.status, answer.text) == (200, TEXT)


async def send(client: Client, attack: Attack) -> None:
    """Send all of it, or as much as the proxy takes."""
    with contextlib.suppress(ConnectionError):
        last = b""
        for last in attack.pieces():
            client.send(last)
            await client.writer.drain()
        while attack.drips:
            await asyncio.sleep(DRIP)
            client.send(last)
            await client.writer.drain()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_an_error_or_a_deadline(attack: Attack) -> None:
    """One answer in OpenAI's shape, or none, then the end of the connection; others are served
    meanwhile.
    """
    async with besieged() as w:
        client = await w.client()
        sending = asyncio.ensure_future(send(client, attack))
        await served_meanwhile(w)
        if attack.statuses:
            answer = await client.head()
            if answer.status != 100:
                await client.rest(answer)
            assert answer.status in attack.statuses
            if answer.status >= 400:
                assert answer.header("content-type") == "application/json"
                assert "error" in answer.json or "detail" in answer.json
        else:
            # what it sent meanwhile was not read any more
            with contextlib.suppress(ConnectionResetError):
                assert await client.reader.read() == b""
        if attack.statuses == (100,):
            assert (await client.answer()).status == 408
        if answer_keeps_open(attack):
            client.close()
        assert await client.closed()
        sending.cancel()
        await asyncio.wait([sending])


async def finish(reply: Reply) -> None:
    """The good end of a stream."""
    await reply.pieces(answers.end())
    await reply.finish()


def answer_keeps_open(attack: Attack) -> bool:
    """Whether the request was right as HTTP, so that the connection could carry another one."""
    return "deep" in attack.name or attack.name in ("an empty length", "a query of 3 KB")


# -- clients that do not read


async def test_an_answer_that_is_never_read() -> None:
    """The buffer holds it for `client_write`; then the client is dropped, and counted."""
    async with besieged() as w:
        w.decode[0].script(
            scripts.whole(b'{"usage":{"prompt_tokens":1},"x":"' + b"y" * 20_000_000 + b'"}')
        )
        client = await w.client(receive_buffer=4096)
        client.post(COMPLETIONS, completion(echo=True))
        await until(lambda: w.metric("pdproxy_deadline_total", wait="client_write"), PATIENCE)
        await served_meanwhile(w)


async def test_a_page_that_is_never_read() -> None:
    """What FastAPI answers is dropped after `client_write`, too."""

    async def large() -> bytes:
        return b"#" * 20_000_000

    def with_large_page(w: World) -> None:
        for one in w.workers:
            one.front.shown.metrics = large  # type: ignore[method-assign]

    async with besieged(before=with_large_page) as w:
        client = await w.client(receive_buffer=4096)
        client.send(request("GET", "/metrics", b""))
        await served_meanwhile(w)
        await until(lambda: DeadlinePassed("client_write") in w.events(DeadlinePassed), PATIENCE)


async def test_an_answer_that_is_read_slowly_comes_whole() -> None:
    """A client that reads a little at a time, longer than `client_write` in all, is not dropped."""
    async with besieged(deadlines={**SHORT, "client_write": 0.3}) as w:
        body = b'{"usage":{"prompt_tokens":1},"x":"' + b"y" * 2_000_000 + b'"}'
        w.decode[0].script(scripts.whole(body))
        client = await w.client(receive_buffer=65536)
        client.post(COMPLETIONS, completion(echo=True))
        answer = await client.head()
        while len(answer.body) < len(body):
            answer.body += await client.reader.read(100_000)
            await asyncio.sleep(DRIP)
        assert answer.body == body


# -- many


async def test_a_thousand_connections_that_say_nothing() -> None:
    """They cost nothing but their sockets, and are closed after `client_head`."""
    async with besieged(deadlines={**SHORT, "client_head": 4}) as w:
        mute = [
            socket.create_connection(("127.0.0.1", w.port)) for _ in range(1000)
        ]  # quickly: no loop is needed for it
        await until(lambda: len(w.connections) == 1000, PATIENCE)
        await served_meanwhile(w)
        for one in mute:
            one.setblocking(False)
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.get_running_loop().sock_recv(one, 1) == b""
            one.close()


@pytest.mark.parametrize("path", ["/health", COMPLETIONS])
async def test_a_thousand_requests_in_one_pipeline(path: str) -> None:
    """The first and those that may wait behind it are answered, in order, then the connection
    closes; nobody else waits.
    """
    async with besieged() as w:
        client = await w.client()
        if path == COMPLETIONS:
            wrong = (b"{" + b" " * (number % 50) + b"]" for number in range(1000))
            client.send(b"".join(request("POST", path, body) for body in wrong))
        else:
            client.send(request("GET", path, b"") * 1000)
        await served_meanwhile(w)
        for number in range(1 + MAX_PIPELINED):
            answer = await client.answer()
            assert answer.status == (200 if path == "/health" else 400)
            if path == COMPLETIONS:
                assert answer.json["error"]["param"] == f"body.{number % 50 + 1}"
        assert answer.header("connection") == "close"
        assert await client.closed()


# -- what is behind a request


async def test_invalid_data_behind_a_request_does_not_break_its_stream() -> None:
    """A stream under way ends in good order although what follows its request is no HTTP; then the
    connection closes.
    """
    go = asyncio.Event()
    async with besieged() as w:
        w.decode[0].script(scripts.after_word(go, finish))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        client.send(b"garbage\r\n\r\n" * 3)
        await served_meanwhile(w)
        go.set()
        answer = await client.rest(head)
        assert answer.ended
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert await client.closed()


async def test_a_trailer_is_no_header() -> None:
    """What stands behind a chunked body gives no key and no id."""
    async with besieged(auth={"api_keys": ("one",)}) as w:
        client = await w.client()
        body = json.dumps(completion()).encode()
        client.send(
            CHUNKED
            + b"%x\r\n%b\r\n0\r\nauthorization: Bearer one\r\nx-request-id: mine\r\n\r\n"
            % (len(body), body)
        )
        answer = await client.answer()
        assert answer.status == 401
        assert answer.header("x-request-id") != "mine"


async def test_of_a_header_that_comes_twice_the_first_counts() -> None:
    """As for the engines' own server."""
    async with besieged() as w:
        headers = [("content-type", "text/plain"), ("content-type", "application/json")]
        assert (await w.ask(COMPLETIONS, completion(), headers)).status == 400
        assert (await w.ask(COMPLETIONS, completion(), headers[::-1])).status == 200


@pytest.mark.parametrize("path", ["/health", COMPLETIONS])
async def test_an_upgrade_is_not_taken(path: str) -> None:
    """The request is served as if it had not asked for another protocol, and so is the next one."""
    async with besieged() as w:
        client = await w.client()
        client.send(
            b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
            % path.encode()
            + request("GET", "/metrics", b"")
        )
        answer = await client.answer()
        assert answer.status == (200 if path == "/health" else 405)
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    "wrong",
    [
        b"GARBAGE\r\n\r\n",
        (
            b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: x\r\n"
            b"transfer-encoding: gzip\r\n\r\n"
        ),
    ],
    ids=["no HTTP", "an offer whose body has no end"],
)
async def test_what_is_no_http_is_refused_as_anything_else(
    wrong: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is answered and counted, and has no log line but that of refusals, of which there are
    few.
    """
    async with besieged() as w:
        for _ in range(3):
            client = await w.client()
            client.send(wrong)
            assert (await client.answer()).status == 400
            assert await client.closed()
        assert [event.reason for event in w.events(Refused)] == ["bad_http"] * 3
        warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert {record.getMessage() for record in warned} == {"refused"}


# -- memory of bodies


async def test_bodies_under_way_have_one_bound_in_all() -> None:
    """Bytes beyond it are refused with 503; as soon as others are done there is space again."""
    limits = {"max_body_bytes": 1000, "max_buffered_bytes": 2500}
    async with besieged(limits=limits, deadlines={**SHORT, "client_body": 20}) as w:
        half = POST + b"content-length: 1000\r\n\r\n" + b" " * 900
        first, second = await w.client(), await w.client()
        first.send(half)
        second.send(half)
        await until(lambda: w.body_bytes == 1800, PATIENCE)
        third = await w.client()
        third.send(half)
        answer = await third.answer()
        assert (answer.status, answer.header("retry-after")) == (503, "1")
        assert answer.json["error"]["type"] == "ServiceUnavailableError"
        assert w.body_bytes == 1800
        await served_meanwhile(w)
        first.close()
        await until(lambda: w.body_bytes == 900, PATIENCE)
        fourth = await w.client()
        fourth.send(half + b" " * 100)
        assert (await fourth.answer()).status == 400


async def test_a_body_in_service_counts() -> None:
    """Until a stream flows the body's bytes are held, since another engine may need them; then
    others may have their space.
    """
    go, end = asyncio.Event(), asyncio.Event()
    async with besieged() as w:
        w.decode[0].script(scripts.gate(go, scripts.after_word(end, finish)))
        client = await w.client()
        body = json.dumps(completion(stream=True)).encode()
        client.post(COMPLETIONS, body)
        await w.decode[0].asked()
        assert w.body_bytes == len(body)
        go.set()
        await client.head()
        assert w.body_bytes == 0
        end.set()


async def test_an_unstreamed_body_counts_to_its_end() -> None:
    """What is answered whole may be asked of another engine until the answer is here."""
    go = asyncio.Event()
    async with besieged() as w:
        w.decode[0].script(scripts.gate(go, serve))
        client = await w.client()
        body = json.dumps(completion()).encode()
        client.post(COMPLETIONS, body)
        await w.decode[0].asked()
        assert w.body_bytes == len(body)
        go.set()
        assert (await client.answer()).status == 200
        await until(lambda: w.body_bytes == 0, PATIENCE)
