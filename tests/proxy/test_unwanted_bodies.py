"""Bodies that nobody wants, without a valid key or on routes that read none: nothing is kept of
them, and no answer waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product

import msgspec
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdproxy.serving.access.routes import TABLE, RouteKind
from pdproxy.settings.listen import Listen
from pdproxy.web.app import create_app
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.guard import GuardedProtocol
from pdproxy.web.notices import AT_ONCE, BODY, notice_app
from pdproxy.wire import lmcache_telemetry
from pdproxy.wire.notices import Notice, NoticeEvent
from tests.fakes.client import Client, request
from tests.fakes.passed import everyone, fine
from tests.fakes.pool import pool
from tests.fakes.world import CHAT, COMPLETIONS, World, completion, until, world

KEY = "one-key-of-clients"
HALF = b'{"model":"' + b"x" * 300_000
OPEN = {entry.path for entry in TABLE if not entry.needs_key}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all parts of bodies that are kept anywhere: uvicorn's own buffer, and what is
    counted.
    """
    sizes: list[int] = []
    real_body, real_take = HttpToolsProtocol.on_body, BodyBudget.take

    def on_body(self: HttpToolsProtocol, body: bytes) -> None:
        if isinstance(self, GuardedProtocol):  # the engines of these tests are servers, too
            sizes.append(len(body))
        real_body(self, body)

    def take(self: BodyBudget, client: object, size: int) -> None:
        if size:
            sizes.append(size)
        real_take(self, client, size)  # type: ignore[arg-type]

    monkeypatch.setattr(HttpToolsProtocol, "on_body", on_body)
    monkeypatch.setattr(BodyBudget, "take", take)
    return sizes


def half_sent(method: str, path: str, *headers: tuple[str, str]) -> bytes:
    """A request of which a part of the body is missing."""
    whole = request(method, path, b"", headers)
    head = b"content-length: %d" % (2 * len(HALF))
    assert b"content-length: 0" in whole
    return whole.replace(b"content-length: 0", head) + HALF


def routes(w: World) -> Iterator[tuple[str, str]]:
    """All methods and paths of the application, whoever has declared them, and some that there are
    not.
    """
    for route in create_app(w.proxy.front.answers()).routes:
        assert isinstance(route, APIRoute | Route)
        path = route.path.replace("{response_id}", "resp_1")
        yield from ((method, path) for method in sorted(route.methods or ()) if method != "HEAD")
        yield "OPTIONS", path
        yield "DELETE", path
    yield from product(
        ("GET", "POST"), ("/", "/nowhere", "/v1/embeddings/", "/v1", lmcache_telemetry.PATH)
    )


async def answered(client: Client, what: bytes) -> tuple[int, str | None]:
    client.send(what)
    async with asyncio.timeout(20):
        answer = await client.answer()
    return answer.status, answer.header("connection")


@pytest.mark.parametrize("key", [(), (("authorization", "Bearer wrong"),)])
async def test_without_a_key_no_route_reads_a_body(
    kept: list[int], key: tuple[tuple[str, str], ...]
) -> None:
    """Each is answered while its body is missing, and closes the connection. All routes of the
    application are tried.
    """
    async with world(auth={"api_keys": (KEY,)}, deadlines={"client_body": 30}) as w:
        tried = list(dict.fromkeys(routes(w)))
        assert len(tried) > 2 * len(TABLE)
        for method, path in tried:
            client = await w.client()
            status, connection = await answered(client, half_sent(method, path, *key))
            assert connection == "close", (method, path)
            assert not kept, (method, path)
            if path not in OPEN and any(
                path == one.path and method in one.methods for one in TABLE
            ):
                assert status in (401, 429), (method, path)
            client.close()
        assert not w.proxy.body_budget.held


async def test_routes_that_read_no_body_keep_none_of_clients_with_a_key(kept: list[int]) -> None:
    """Only those that pass bodies on do."""
    wanted = {
        one.path
        for one in TABLE
        if one.has_body and one.kind in (RouteKind.PASSED, RouteKind.SPLIT)
    }
    async with world(auth={"api_keys": (KEY,)}, deadlines={"client_body": 30}) as w:
        for method, path in dict.fromkeys(routes(w)):
            if method == "POST" and path in wanted:
                continue
            client = await w.client()
            await answered(client, half_sent(method, path, ("authorization", f"Bearer {KEY}")))
            assert not kept, (method, path)
            client.close()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", COMPLETIONS, CHAT])
async def test_a_half_sent_body_is_counted(path: str) -> None:
    """Where the key is right, what has come counts against the budget of all bodies, and is free
    when the client leaves.
    """
    async with world(auth={"api_keys": (KEY,)}, deadlines={"client_body": 30}) as w:
        client = await w.client()
        client.send(half_sent("POST", path, ("authorization", f"Bearer {KEY}")))
        await until(lambda: w.body_bytes == len(HALF))
        client.close()
        await until(lambda: not w.body_bytes)


async def test_who_goes_on_sending_can_read_the_answer() -> None:
    """A connection that closes with unread bytes is reset: that may take the answer away."""
    async with world(auth={"api_keys": (KEY,)}) as w:
        client = await w.client()
        client.send(request("POST", "/v1/embeddings", b"x" * 2**20)[: 2**19])
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (401, "close")
        await client.writer.drain()
        assert await client.reader.read() == b""


async def test_a_small_body_that_nobody_wants_costs_no_connection() -> None:
    """It is complete before the answer: the connection stays."""
    async with world(auth={"api_keys": (KEY,)}) as w:
        client = await w.client()
        for _ in range(2):
            assert await answered(client, request("POST", "/ping", b"x" * 100)) == (200, None)
        assert (await answered(client, request("POST", "/v1/embeddings", b"{}")))[0] == 401
        assert await answered(client, request("GET", "/health", b"")) == (200, None)


async def test_nobody_without_a_key_is_asked_to_go_on() -> None:
    """`Expect: 100-continue` is answered by the refusal alone, on routes over ASGI, too."""
    async with world(auth={"api_keys": (KEY,)}) as w:
        for path in ("/v1/embeddings", "/v1/models", "/ping"):
            client = await w.client()
            whole = request("POST", path, b"", [("expect", "100-continue")])
            client.send(whole.replace(b"content-length: 0", b"content-length: 5"))
            assert (await client.answer()).status in (401, 405, 200)


async def test_routes_below_a_root_path_take_their_bodies() -> None:
    """The path may be escaped, and the balancer may leave the prefix."""
    below = partial(msgspec.structs.replace, listen=Listen(root_path="/llm"))
    async with world(auth={"api_keys": (KEY,)}, adjust=below) as w:
        seen = everyone(w, "/v1/embeddings", fine)
        for path in ("/llm/v1/embeddings", "/v1/embeddings", "/v1/%65mbeddings"):
            answer = await w.ask(path, {"input": path}, [("authorization", f"Bearer {KEY}")])
            assert (answer.status, seen.pop().json) == (200, {"input": path})


# -- the port to which engines post notices


def post(*names: str) -> dict[str, object]:
    return {
        "event": lmcache_telemetry.STORED,
        "request_ids_set": [*names],
        "world_size": 1,
        "kv_rank": 0,
    }


async def test_engines_post_at_the_port_of_notices_alone() -> None:
    """A keyless sender finds nothing at the clients' port, and what comes to the other one has an
    effect by its id alone.
    """
    async with pool("lmcache-mp") as pair:
        w = pair.world
        assert (await w.ask(lmcache_telemetry.PATH, post("cmpl-guessed-0-01234567"))).status == 404
        client = await Client.connect(w.proxy.settings.kv_ready.port)
        client.send(request("POST", lmcache_telemetry.PATH, post("cmpl-guessed-0-01234567")))
        assert (await client.answer()).json == {"status": "ok"}
        assert w.metric("pdproxy_kv_notices_total", result="awaited") == 0
        assert (await pair.ask(COMPLETIONS, completion(prompt="many words " * 40))).status == 200
        await until(lambda: w.metric("pdproxy_kv_notices_total", result="awaited") == 1)
        for method, path in (
            ("GET", lmcache_telemetry.PATH),
            ("POST", "/v1/completions"),
            ("GET", "/metrics"),
        ):
            client.send(request(method, path, b""))
            assert (await client.answer()).status == 404
        client.send(request("POST", lmcache_telemetry.PATH, b"{}"))
        assert (await client.answer()).status == 400
        client.close()


async def test_what_the_port_of_notices_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-sent posts, and posts that are too large: 250 of them took 286 MB."""
    monkeypatch.setattr("pdproxy.app.posted_notices.MAX_HELD", 4 * len(HALF))
    async with pool("lmcache-mp") as pair:
        port = pair.world.proxy.settings.kv_ready.port
        budgets = [
            one.notices.posted.budget
            for one in pair.world.workers
            if one.notices.posted is not None
        ]
        clients = [await Client.connect(port) for _ in range(8)]
        for client in clients:
            client.send(half_sent("POST", lmcache_telemetry.PATH))
        async with asyncio.timeout(20):
            refused = [asyncio.create_task(one.answer()) for one in clients]
            done, waiting = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
            assert {(await one).status for one in done} == {503}
        assert all(budget.held <= 4 * len(HALF) for budget in budgets)
        for task in waiting:
            task.cancel()
        for client in clients:
            client.close()
        await until(lambda: not any(budget.held for budget in budgets))
        client = await Client.connect(port)
        whole = request("POST", lmcache_telemetry.PATH, b" " * (lmcache_telemetry.MAX_BYTES + 1))
        client.send(whole)
        assert (await client.answer()).status == 413
        client.close()
        await until(lambda: not any(budget.held for budget in budgets))


async def test_a_long_post_leaves_turns_to_others() -> None:
    """4,096 notices in one post: others run in between, after each 64 of them."""
    turns: list[int] = []
    taken: list[object] = []

    async def count() -> None:
        while True:
            turns.append(len(taken))
            await asyncio.sleep(0)

    read = [Notice(event=NoticeEvent.READY, request_id=str(at)) for at in range(4096)]
    app = notice_app(lambda body: read, taken.append)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def never() -> Message:
        raise AssertionError

    counting = asyncio.create_task(count())
    await app(
        {"path": lmcache_telemetry.PATH, "method": "POST", "type": "http", BODY: b""}, never, send
    )
    counting.cancel()
    assert sent[0]["status"] == 200
    assert len(taken) == 4096
    assert max(after - before for before, after in pairwise(turns)) <= AT_ONCE
