"""Two pools and two workers, as processes: loads, KV, the settings file and the admin API know
which pool an engine is in.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pdproxy.fleet.entries import engine_id
from tests.fakes import answers, scripts
from tests.fakes.books import Books
from tests.fakes.client import Answer, Client
from tests.fakes.engine import FakeEngine
from tests.fakes.process import PATIENCE
from tests.fakes.scripts import WORD
from tests.fakes.served_workers import Run, nodes, serving
from tests.fakes.world import COMPLETIONS, PROMPT, until
from tests.proxy.test_workers_admin import fields, states

MODELS = ("tiny", "other")


def _body(model: str, *, stream: bool = False) -> dict[str, object]:
    return {"model": model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "stream": stream}


@asynccontextmanager
async def _running(tmp_path: Path) -> AsyncIterator[tuple[Run, list[list[FakeEngine]]]]:
    """Run two pools with a prefill and two decode engines each, and one decode engine of each model
    that no pool has.
    """
    books = Books()
    roles = ("prefill", "decode", "decode", "decode")
    engines = [
        [FakeEngine(role, books, lease=3600.0, model=model) for role in roles] for model in MODELS
    ]
    async with serving(
        tmp_path,
        [one for pool in engines for one in pool],
        lambda port, admin: _settings(port, admin, [pool[:3] for pool in engines]),
        shown=engines[1][:2],
        spare=[pool[3] for pool in engines],
    ) as run:
        yield run, engines


def _settings(port: int, admin: int, pools: Sequence[Sequence[FakeEngine]]) -> str:
    """A file with these engines in each pool."""
    text = (
        f"listen: {{port: {port}, workers: 2, admin: '127.0.0.1:{admin}'}}\ndeadlines: {{drain: "
        f"5}}\npools:\n"
    )
    for name, pool in zip(MODELS, pools, strict=True):
        text += f"- name: {name}\n  connector: nixl\n  policy: least_load\n{nodes(pool)}"
    return text


async def test_each_pool_has_its_loads(tmp_path: Path) -> None:
    """Streams that all workers have count in their pool: each of its engines has as many, whichever
    workers serve them.
    """
    async with _running(tmp_path) as (run, engines):
        go, clients = asyncio.Event(), list[tuple[Client, Answer]]()
        for one in (one for pool in engines for one in pool if one.role == "decode"):
            one.script(*[scripts.after_word(go, scripts.one_more_word)] * 8)
        for number in range(16):
            client = await Client.connect(run.proxy.port)
            client.post(COMPLETIONS, _body(MODELS[number % 2], stream=True))
            clients.append((client, await client.head()))
        assert [[len(one.requests) for one in pool[1:3]] for pool in engines] == [[4, 4], [4, 4]]
        for model, pool in zip(MODELS, engines, strict=True):
            shown = (await run.ask("GET", f"/engines?pool={model}")).json["engines"]
            assert {one["url"]: one["load"]["requests"] for one in shown} == {
                pool[0].url: 0,
                pool[1].url: 4,
                pool[2].url: 4,
            }
        assert await run.proxy.metric("pdproxy_inflight") == 16
        go.set()
        for client, head in clients:
            assert (await client.rest(head)).body == WORD + WORD + answers.end()
        unknown = await run.proxy.ask("POST", COMPLETIONS, _body("neither"))
        assert unknown.status == 404


async def test_kv_of_the_second_pool_is_released_there(tmp_path: Path) -> None:
    """By the other worker, when the one that had the handle is killed; the first pool is asked
    nothing.
    """
    async with _running(tmp_path) as (run, engines):
        first, second = engines
        for decode in second[1:3]:
            decode.script(scripts.stall)
        client = await Client.connect(run.proxy.port)
        client.post(COMPLETIONS, _body("other"))
        await until(lambda: any(decode.requests for decode in second[1:3]))
        run.proxy.decode = next(decode for decode in second[1:3] if decode.requests)
        for decode in second[1:3]:
            decode.scripts.clear()
        books = run.proxy.books
        (held,) = books.held()
        before = len(first[0].requests)
        free = books.free
        books.free = lambda params: None  # type: ignore[method-assign]  # the decode engine frees nothing itself
        os.kill(run.proxy.serves_client(), signal.SIGKILL)
        await until(lambda: "released" in books.history[held] or not books.held(), PATIENCE)
        books.free = free  # type: ignore[method-assign]
        released = [
            one.kv["remote_request_id"]
            for pool in engines
            for d in pool
            for one in d.releases
            if one.kv
        ]
        assert held in released
        assert not any(one.kv for decode in first for one in decode.releases)
        assert len(first[0].requests) == before
        await run.whole()
        client.close()
        for model in MODELS * 4:
            assert (await run.proxy.ask("POST", COMPLETIONS, _body(model))).json["model"] == model


async def test_engines_of_pools_come_and_go(tmp_path: Path) -> None:
    """By the file and by the admin API, in all workers, also in one that is killed meanwhile; one
    moves to another pool.
    """
    async with _running(tmp_path) as (run, engines):
        admin, port = run.api.port, run.proxy.port
        new = run.spare[1]
        run.config.write_text(_settings(port, admin, [engines[0][:3], [*engines[1][:2], new]]))
        run.proxy.process.send_signal(signal.SIGHUP)
        gone = engines[1][2]
        shown = await run.all_say(
            "/engines", lambda one: new.url in states(one) and gone.url not in states(one)
        )
        assert {one["pool"] for one in shown["engines"] if one["url"] == new.url} == {"other"}
        await run.kill(run.proxy.workers()[0])
        await run.all_say(
            "/engines", lambda one: new.url in states(one) and gone.url not in states(one)
        )
        assert await run.proxy.metric("pdproxy_node_up", node=new.url) == 1

        unnamed = await run.ask("POST", "/engines", fields(gone))
        assert (unnamed.status, "there are several pools" in unnamed.json["error"]["message"]) == (
            400,
            True,
        )
        assert (await run.ask("POST", "/engines", fields(gone, pool="tiny"))).status == 201
        elsewhere = await run.ask("POST", "/engines", fields(gone, pool="other"))
        assert (
            elsewhere.status,
            "is an engine of pool tiny" in elsewhere.json["error"]["message"],
        ) == (409, True)
        assert (
            await run.ask("DELETE", f"/engines/{engine_id(gone.url)}?at_once=true")
        ).status == 200
        async with asyncio.timeout(PATIENCE):
            while (
                moved := await run.ask("POST", "/engines", fields(gone, pool="other"))
            ).status == 400:
                await asyncio.sleep(0.05)  # it is still leaving the other pool
        assert moved.status == 201, moved.body
        for pid in run.proxy.workers():
            os.kill(pid, signal.SIGKILL)
        await run.whole()
        shown = await run.all_say("/engines?pool=other", lambda one: gone.url in states(one))
        await run.all_say("/engines?pool=tiny", lambda one: gone.url not in states(one))
        for model in MODELS * 4:
            assert (await run.proxy.ask("POST", COMPLETIONS, _body(model))).json["model"] == model
