"""The admin API and its command-line client with several pools: entries name their pool, and new
engines one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from pdproxy.cli.main import main
from pdproxy.engine_model.hardware import Hardware
from pdproxy.fleet import membership, prober
from pdproxy.fleet.entries import engine_id
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.listen import Listen
from pdproxy.settings.pools import PoolPolicy
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.fakes.admin import BASE, Admin, admin
from tests.fakes.pools import PoolOf, Pools, pools
from tests.fakes.ports import free_port
from tests.fakes.world import until

BOTH = "expected pool 0 or pool 1"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)


@pytest.fixture
async def new() -> AsyncIterator[SimServer]:
    """An engine that serves model b, and is in no pool yet."""
    facts = SimFacts(model="b", eos_every=0, hardware=Hardware(speed=0), connector="none")
    async with SimServer(facts, port=free_port(), chance=99) as made:
        yield made


def fields(engine: SimServer, **more: Any) -> dict[str, Any]:
    """The body that adds an engine that serves whole requests."""
    return {"url": engine.url, "role": "aggregated", **more}


async def gone(w: Pools, url: str) -> None:
    """Wait until no pool has an engine."""
    await until(lambda: not any(url in pool.membership.members for pool in w.world.proxy.pools))


async def test_an_engine_comes_into_the_pool_that_is_named(new: SimServer) -> None:
    """It serves that pool's model, and is found by its id or URL whatever pool it is in."""
    async with pools(PoolOf("a"), PoolOf("b"), probes=0.1) as w, admin(w.world) as api:
        listed = (await api.get("/engines"))["engines"]
        assert [(one["url"], one["pool"]) for one in listed] == [
            (w.engines[0][0].url, "pool 0"),
            (w.engines[1][0].url, "pool 1"),
        ]
        added = await api.post("/engines", fields(new, pool="pool 1"))
        assert (added.status, added.json["result"], added.json["engine"]["pool"]) == (
            201,
            "added",
            "pool 1",
        )
        second = w.world.proxy.pools[1]
        await until(lambda: second.engines[new.url].in_ledger.up)
        assert new.url not in w.world.proxy.pools[0].engines
        (first,) = w.engines[1]
        drained = await api.post(f"/engines/{engine_id(first.url)}/drain")
        assert (drained.status, drained.json["engine"]["pool"]) == (202, "pool 1")
        assert await w.model_of("b") == "b"
        assert second.engines[new.url].in_ledger.evidence is not None
        assert len(new.requests) == 1
        escaped = first.url.replace("/", "%2F")
        assert (await api.post(f"/engines/{escaped}/undrain")).json["result"] == "undrained"
        assert [one["url"] for one in (await api.get("/engines?pool=pool%201"))["engines"]] == [
            first.url,
            new.url,
        ]
        assert [one["url"] for one in (await api.get("/engines?pool=pool%200"))["engines"]] == [
            w.engines[0][0].url
        ]
        assert (await api.delete(f"/engines/{engine_id(new.url)}")).status == 202
        await gone(w, new.url)


async def test_a_pool_must_be_named(new: SimServer) -> None:
    """Errors name the pools, in OpenAI's shape; with one pool its name may be left out."""
    async with pools(PoolOf("a"), PoolOf("b")) as w, admin(w.world) as api:
        document = (await api.ask("GET", "/openapi.json")).json
        error = {"components": document["components"], **document["components"]["schemas"]["Error"]}
        for body, query, text in (
            (fields(new), "", f"pool: missing: there are several pools: {BOTH}"),
            (fields(new, pool=None), "", f"pool: missing: there are several pools: {BOTH}"),
            (
                fields(new, pool="pool 2"),
                "",
                f'pool: "pool 2" is no pool: {BOTH} (did you mean pool 1?)',
            ),
            (
                fields(new, pool=["pool 1"]),
                "",
                "pool: expected the name of its pool, or null where there is one, got a list",
            ),
            (fields(new, pool="x" * 60_000), "", f'pool: "{"x" * 77}..." is no pool: {BOTH}'),
            (None, "?pool=none", f'pool: "none" is no pool: {BOTH}'),
            (None, "?pool=", f'pool: "" is no pool: {BOTH}'),
        ):
            method = "GET" if body is None else "POST"
            answer = await api.ask(method, f"{BASE}/engines{query}", b"" if body is None else body)
            assert answer.status == 400, answer.body
            jsonschema.validate(answer.json, error)
            shown = answer.json["error"]
            assert (shown["message"], shown["type"], shown["param"]) == (
                text,
                "BadRequestError",
                None,
            )
        assert not any(new.url in pool.membership.members for pool in w.world.proxy.pools)
    async with pools(PoolOf("b")) as w, admin(w.world) as api:
        wrong = await api.post("/engines", fields(new, pool="other"))
        assert (wrong.status, wrong.json["error"]["message"]) == (
            400,
            'pool: "other" is no pool: expected pool 0',
        )
        assert (await api.post("/engines", fields(new))).status == 201


async def test_an_engine_is_in_one_pool(new: SimServer) -> None:
    """In another one it is refused with its owner, also while it leaves; once it is gone it can
    come.
    """
    async with pools(PoolOf("a"), PoolOf("b")) as w, admin(w.world) as api:
        theirs = await api.post("/engines", fields(w.engines[0][0], pool="pool 1"))
        assert (theirs.status, theirs.json["error"]["owner"]) == (409, "settings")
        assert "is an engine of pool pool 0" in theirs.json["error"]["message"]
        with_tls = {
            "url": w.engines[0][0].url.replace("http:", "https:"),
            "role": "aggregated",
            "pool": "pool 1",
        }
        assert (await api.post("/engines", with_tls)).status == 409
        with pytest.raises(SettingsError, match="is an engine of another pool"):
            w.world.proxy.pools[1].membership.add(
                ConfiguredEngine(url=with_tls["url"], role="aggregated"), "test"
            )
        assert (await api.post("/engines", fields(new, pool="pool 0"))).status == 201
        held = {new.url}
        w.world.proxy.pools[0].engines.keep_known(lambda: held)
        assert (await api.delete(f"/engines/{engine_id(new.url)}")).status == 202
        leaving = await api.post("/engines", fields(new, pool="pool 1"))
        assert (leaving.status, leaving.json["error"]["owner"]) == (409, "admin")
        assert "still leaves pool pool 0" in leaving.json["error"]["message"]
        held.clear()
        await gone(w, new.url)
        assert (await api.post("/engines", fields(new, pool="pool 1"))).status == 201


async def test_tools_written_for_vllm_router(new: SimServer) -> None:
    """`labels.pool` names the pool, or `model_id` a model that one pool serves; what they list
    shows it.
    """
    async with (
        pools(
            PoolOf("a", settings={"aliases": {"fast": "a"}}),
            PoolOf("b", settings={"models": ["c-*"]}),
        ) as w,
        admin(w.world) as api,
    ):
        several = "there are several pools (pool 0, pool 1)"
        more: dict[str, Any]
        for more, text in (
            ({}, f"labels.pool: missing: {several}"),
            ({"model_id": "none"}, f"labels.pool: missing: {several}"),
            ({"model_id": ["b"]}, f"labels.pool: missing: {several}"),
            ({"model_id": "b", "labels": {"pool": "b"}}, f'labels.pool: "b" is no pool: {BOTH}'),
            ({"labels": {"pool": ["pool 1"]}}, "labels.pool: expected text"),
            ({"worker_type": ["regular"]}, "worker_type: expected regular"),
        ):
            refused = await api.ask("POST", "/workers", {"url": new.url, **more})
            assert (refused.status, refused.json["code"]) == (400, "BAD_REQUEST"), refused.body
            assert refused.json["error"].startswith(text)
        for more, pool in (
            ({"labels": {"pool": "pool 1"}}, "pool 1"),
            ({"labels": {"pool": "pool 0"}, "model_id": "b"}, "pool 0"),
            ({"model_id": "b"}, "pool 1"),
            ({"model_id": "fast"}, "pool 0"),
            ({"model_id": "c-1"}, "pool 1"),
        ):
            answer = await api.ask("POST", "/workers", {"url": new.url, **more})
            assert answer.status == 200, answer.body
            workers = (await api.ask("GET", "/workers")).json["workers"]
            (shown,) = [one for one in workers if one["url"] == new.url]
            assert shown["metadata"]["pool"] == pool
            await api.ask("DELETE", f"/workers/{engine_id(new.url)}?at_once=true")
        assert (await api.ask("POST", f"/add_worker?url={new.url}")).body.startswith(
            b"labels.pool: missing"
        )
        assert (await api.ask("POST", f"/add_worker?url={new.url}&pool=pool%201")).status == 200
        assert new.url in w.world.proxy.pools[1].membership.members
        assert len((await api.ask("GET", "/list_workers")).json["urls"]) == 3


async def test_decisions_of_all_pools() -> None:
    """One list, the newest first, of whichever pool has decided."""
    auto = {"policy": PoolPolicy(placement="auto")}
    async with (
        pools(
            PoolOf("a", "nixl", auto), PoolOf("b", "nixl", auto), listen=Listen(admin="127.0.0.1:9")
        ) as w,
        admin(w.world) as api,
    ):
        for model in ("a", "b", "a"):
            assert await w.model_of(model) == model
        found = await api.get("/decisions")
        assert found["placement"] == "auto"
        at = [
            next(at for at in (0, 1) if one["engines"][-1] in _urls(w, at))
            for one in found["decisions"]
        ]
        assert at == [0, 1, 0]


def _urls(w: Pools, at: int) -> list[str]:
    return [engine.url for engine in w.engines[at]]


async def _run(api: Admin, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = await asyncio.to_thread(main, ["engines", *words, "--admin", f"127.0.0.1:{api.port}"])
    return code, *capsys.readouterr()


async def test_the_command(
    new: SimServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--pool` names the pool of a new engine, and whose engines are listed; the table shows it."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest's workers have it
    async with pools(PoolOf("a"), PoolOf("b"), probes=0.1) as w, admin(w.world) as api:
        code, _, err = await _run(api, capsys, "add", new.url, "--role", "aggregated")
        assert code == 1
        assert err.endswith(f"pool: missing: there are several pools: {BOTH}\n")
        code, _, err = await _run(
            api, capsys, "add", new.url, "--role", "aggregated", "--pool", "pool 1", "--wait"
        )
        assert (code, err) == (0, "")
        code, out, _ = await _run(api, capsys, "list")
        lines = [one.rstrip() for one in out.splitlines()]
        name = new.url.removeprefix("http://")
        (line,) = [one for one in lines[lines.index("pool pool 1") :] if one.startswith(name)]
        assert line.split()[-2] == "admin"
        code, out, _ = await _run(api, capsys, "list", "--pool", "pool 1", "--json")
        assert [one["url"] for one in json.loads(out)["engines"]] == [w.engines[1][0].url, new.url]
        code, out, err = await _run(api, capsys, "list", "--pool", "none")
        assert (code, out) == (1, "")
        assert BOTH in err
