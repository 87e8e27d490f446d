"""What a key is good for counts at the moment at which a request gets its place, whatever counted
when its head was read.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.observe.events import RequestEnded
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.settings.keys import Auth
from pdproxy.settings.limits import Limits, Overload
from pdproxy.settings.schema import Settings
from tests.fakes import answers, scripts
from tests.fakes.client import Client, bearer, request
from tests.fakes.engine import Reply, prefill
from tests.fakes.passed import RESPONSES, everyone, fine, responses
from tests.fakes.pools import PoolOf, pools
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, until, world
from tests.proxy.test_revoked_keys import take_away

EMBED, INVOCATIONS = "/v1/embeddings", "/invocations"
ADAPTER = "x-amzn-sagemaker-adapter-identifier"
EMBEDDED = {"model": "tiny", "input": "x"}
TENANT = ("x-tenant", "a")
NARROWED = [
    ("models=other", COMPLETIONS, completion()),
    ("models=other", EMBED, EMBEDDED),
    ("routes=chat", COMPLETIONS, completion()),
    ("routes=chat", EMBED, EMBEDDED),
    ("tenants=b", COMPLETIONS, completion()),
    ("tenants=b", RESPONSES, responses()),
    ("max_tokens=1", COMPLETIONS, completion(max_tokens=2)),
    ("max_tokens=1", RESPONSES, responses()),
    ("n=1", CHAT, chat(n=2)),
]
"""What a key is good for from now on, and a request that it is not good for."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with a key that is good for everything."""
    path = tmp_path / "keys"
    path.write_text("team:one\n")
    return path


def named(settings: Settings) -> Settings:
    """Clients name their tenants."""
    return msgspec.structs.replace(settings, overload=Overload(tenant_header=TENANT[0]))


def sent(path: str, body: object) -> bytes:
    return request("POST", path, body, [*bearer("one"), TENANT])


async def occupied(w: World, go: asyncio.Event) -> Client:
    """A client with a request of its own that an engine works on until `go`."""
    w.prefill[0].script(scripts.gate(go, prefill))
    client = await w.client()
    client.send(sent(COMPLETIONS, completion()))
    await until(lambda: w.inflight == 1)
    return client


@pytest.mark.parametrize(("words", "path", "body"), NARROWED, ids=str)
@pytest.mark.parametrize("waits", ["for its body", "behind another one", "for a place"])
async def test_a_key_that_is_good_for_less(
    keys: Path, waits: str, words: str, path: str, body: Any
) -> None:
    """403, and no engine sees the request; what an engine works on goes on."""
    limits = {"max_inflight": 1} if waits == "for a place" else {}
    async with world(auth={"api_keys_file": str(keys)}, limits=limits, adjust=named) as w:
        passed = [] if path in (COMPLETIONS, CHAT) else everyone(w, path, fine)
        go, whole = asyncio.Event(), sent(path, body)
        first = client = await occupied(w, go)
        if waits == "behind another one":
            client.send(whole)
            await until(lambda: any(one.pipeline for one in w.connections))
        else:
            client, before = await w.client(), w.body_bytes
            client.send(whole[:-2])
            await until(lambda: w.body_bytes > before)
            if waits == "for a place":
                client.send(whole[-2:])
                await until(lambda: w.waiting == 1)
        take_away(w, keys, f"team:one {words}\n")
        if waits == "for its body":
            client.send(whole[-2:])
            refused = await client.answer()
        go.set()
        assert (await first.answer()).status == 200
        if waits != "for its body":
            refused = await client.answer()
        assert (refused.status, refused.json["error"]["type"]) == (403, "ForbiddenError")
        assert (len(passed), len(w.prefill[0].requests)) == (0, 1)
        await until(lambda: len(w.events(RequestEnded)) == 2)
        assert sorted(event.status for event in w.events(RequestEnded)) == [200, 403]


@pytest.mark.parametrize(("words", "path", "body"), [NARROWED[0], NARROWED[3]], ids=str)
async def test_a_key_that_changes_while_the_body_is_read(
    keys: Path, monkeypatch: pytest.MonkeyPatch, words: str, path: str, body: Any
) -> None:
    """Another process may read it, which takes its time; there is a place at once."""
    reading, go = asyncio.Event(), asyncio.Event()
    for name in ("request", "passed"):
        read = getattr(BodyReader, name)

        async def slowly(self: BodyReader, *what: Any, read: Any = read) -> Any:
            found = await read(self, *what)
            reading.set()
            await go.wait()
            return found

        monkeypatch.setattr(BodyReader, name, slowly)
    async with world(auth={"api_keys_file": str(keys)}) as w:
        passed = [] if path == COMPLETIONS else everyone(w, path, fine)
        client = await w.client()
        client.send(sent(path, body))
        await reading.wait()
        take_away(w, keys, f"team:one {words}\n")
        go.set()
        assert (await client.answer()).status == 403
        assert (len(passed), len(w.prefill[0].requests)) == (0, 0)


@pytest.mark.parametrize("words", ["max_tokens=3", "models=tiny max_tokens=3", "max_tokens=3 n=1"])
async def test_what_the_key_is_still_good_for_is_served(keys: Path, words: str) -> None:
    """Within what it is good for now: the request says no limit of its own."""
    body = {name: value for name, value in chat().items() if name != "max_tokens"}
    async with world(auth={"api_keys_file": str(keys)}, limits={"max_inflight": 1}) as w:
        go = asyncio.Event()
        first = await occupied(w, go)
        waiting = [await w.client() for _ in range(2)]
        for client, data in zip(
            waiting,
            (sent(CHAT, body), sent(RESPONSES, {"model": "tiny", "input": "x"})),
            strict=True,
        ):
            client.send(data)
        await until(lambda: w.waiting == 2)
        for text in ("team:one max_tokens=5\n", f"team:one {words}\n"):
            take_away(w, keys, text)
        go.set()
        assert (await first.answer()).status == 200
        assert [(await client.answer()).status for client in waiting] == [200, 200]
        for route, limit in ((CHAT, "max_tokens"), (RESPONSES, "max_output_tokens")):
            assert [one.json[limit] for one in w.decode[0].requests if one.path == route] == [3]


async def test_an_adapter_that_is_an_alias(keys: Path) -> None:
    """What is read again is what the client has sent: an alias of one pool, and no model that
    another one has, too.
    """
    wanted = [
        PoolOf("a", settings={"name": "first", "aliases": {"fast": "a"}}),
        PoolOf("a", settings={"name": "second"}),
    ]
    async with pools(
        *wanted, auth=Auth(api_keys_file=str(keys)), limits=Limits(max_inflight=1)
    ) as w:
        w.engines[0][0].engine.freeze()
        first, client = [await w.world.client() for _ in range(2)]
        first.send(request("POST", COMPLETIONS, completion(model="fast"), bearer("one")))
        await until(lambda: w.world.inflight == 1)
        client.send(request("POST", INVOCATIONS, completion(), [*bearer("one"), (ADAPTER, "fast")]))
        await until(lambda: w.world.waiting == 1)
        take_away(w.world, keys, "team:one pools=second\n")
        w.engines[0][0].engine.thaw()
        assert [(await one.answer()).status for one in (first, client)] == [200, 403]


async def test_models_that_are_listed(keys: Path) -> None:
    """Those that the key is good for once the engines have answered."""
    go, asked = asyncio.Event(), asyncio.Event()

    async def late(reply: Reply) -> None:
        asked.set()
        await go.wait()
        await reply.whole(
            answers.compact({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        )

    async with world(auth={"api_keys_file": str(keys)}) as w:
        everyone(w, "/v1/models", late)
        listing = asyncio.create_task(w.get("/v1/models", bearer("one")))
        await asked.wait()
        take_away(w, keys, "team:one models=other\n")
        go.set()
        assert (await listing).json["data"] == []
