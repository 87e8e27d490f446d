"""Engines with Mooncake behind HTTP: the bootstrap server, and what reaches it."""

import asyncio
from typing import Any

import aiohttp
import pytest

from pdproxy_lab.sim.bootstrap import query
from pdproxy_lab.sim.facts import MooncakeFacts, SimFacts
from pdproxy_lab.sim.frame_port import LinkError
from pdproxy_lab.sim.server import SimServer
from tests.sim.moments import FAST
from tests.sim.raw import until

PROMPT = {"model": "sim", "prompt": "one two three four", "temperature": 0}


def facts(role: Any, **more: Any) -> SimFacts:
    timeout = more.pop("timeout", 480.0)
    mooncake = MooncakeFacts(bootstrap_port=0, abort_request_timeout=timeout)
    return SimFacts(
        role=role,
        connector="mooncake",
        hardware=FAST.hardware,
        eos_every=0,
        mooncake=mooncake,
        **more,
    )


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as made:
        yield made


@pytest.fixture
async def pair():
    async with (
        SimServer(facts("prefill"), chance=1) as p,
        SimServer(facts("decode"), chance=2) as d,
    ):
        yield p, d
        assert not p.crashes
        assert not d.crashes


def address(sim: SimServer) -> str:
    assert sim.engine.bootstrap is not None
    return sim.engine.bootstrap.url


def to_decode(p: SimServer, transfer_id: str = "xfer-1") -> dict[str, Any]:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": address(p),
        "remote_engine_id": p.engine.engine_id,
        "transfer_id": transfer_id,
    }


def to_prefill(transfer_id: str = "xfer-1") -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


async def post(session: aiohttp.ClientSession, sim: SimServer, **fields: Any) -> tuple[int, Any]:
    async with session.post(
        f"{sim.url}/v1/completions", json={**PROMPT, "max_tokens": 6, **fields}
    ) as answer:
        return answer.status, await answer.json()


async def test_a_query_shows_the_worker_of_each_rank(session):
    async with (
        SimServer(facts("prefill", tensor_parallel_size=2)) as sim,
        session.get(f"{address(sim)}/query") as answer,
    ):
        found = await answer.json()
    assert found["0"]["engine_id"] == sim.engine.engine_id
    worker = found["0"]["worker_addr"]["0"]["0"]
    assert worker.startswith("tcp://127.0.0.1:")
    assert found == {
        "0": {
            "engine_id": sim.engine.engine_id,
            "worker_addr": {"0": {"0": worker}, "1": {"0": worker}},
        }
    }


async def test_a_consumer_has_no_bootstrap_server():
    async with SimServer(facts("decode")) as sim:
        assert sim.engine.bootstrap is None


async def test_a_bootstrap_server_that_is_gone_fails_after_three_attempts() -> None:
    async with SimServer(facts("prefill")) as sim:
        gone = address(sim)
    with pytest.raises(LinkError):
        await query(gone, 0.1)


async def test_each_data_parallel_rank_has_an_id_and_a_worker_of_its_own(session):
    async with (
        SimServer(facts("prefill", data_parallel_size=2)) as sim,
        session.get(f"{address(sim)}/query") as answer,
    ):
        found = await answer.json()
    assert {rank: one["engine_id"] for rank, one in found.items()} == {
        "0": f"{sim.engine.engine_id}_dp0",
        "1": f"{sim.engine.engine_id}_dp1",
    }
    assert found["0"]["worker_addr"] != found["1"]["worker_addr"]


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({}, 200, "ok"),
        (
            {"addr": "tcp://127.0.0.1:2"},
            400,
            "is already registered at tcp://127.0.0.1:1, but still want to register at",
        ),
        ({"engine_id": "y"}, 400, "Engine ID mismatch for dp_rank=3: expected x, got y"),
        ({"tp_rank": "no number"}, 422, "int_parsing"),
    ],
)
async def test_a_worker_that_registers_again_must_say_the_same(session, pair, more, status, words):
    one = {"engine_id": "x", "dp_rank": 3, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://127.0.0.1:1"}
    url = f"{address(pair[0])}/register"
    async with session.post(url, json=one) as answer:
        assert answer.status == 200
    async with session.post(url, json=one | more) as answer:
        assert answer.status == status
        assert words in await answer.text()


async def test_both_legs_at_once_give_the_right_answer(session, pair):
    p, d = pair
    _, right = await post(session, d)
    first, answer = await asyncio.gather(
        post(session, p, max_tokens=1, kv_transfer_params=to_prefill(), prompt="five six"),
        post(session, d, kv_transfer_params=to_decode(p), prompt="five six"),
    )
    assert first[1]["kv_transfer_params"] is None
    assert answer[0] == 200
    assert answer[1]["choices"][0]["finish_reason"] == right["choices"][0]["finish_reason"]
    await until(lambda: not p.engine.handles and not d.engine.stats.waiting)
    assert (
        d.engine.stats.prompt_tokens_by_source["external_kv_transfer"]
        == answer[1]["usage"]["prompt_tokens"]
    )


async def test_a_completion_with_max_tokens_0_frees_prefills_blocks(session, pair):
    p, d = pair
    await post(session, p, max_tokens=1, kv_transfer_params=to_prefill())
    assert list(p.engine.handles) == ["xfer-1"]
    status, _ = await post(session, d, prompt="x", max_tokens=0, kv_transfer_params=to_decode(p))
    assert status == 400
    await until(lambda: not p.engine.handles)


async def test_an_engine_that_starts_again_has_another_id_and_another_worker(session, pair):
    p, _ = pair
    before = await query(address(p), 1)
    await p.restart()
    after = await query(address(p), 1)
    assert set(before).isdisjoint(after)
    assert set(before.values()).isdisjoint(after.values())


async def test_decode_waits_longer_than_prefill_for_a_worker_that_is_gone(session, monkeypatch):
    async with (
        SimServer(facts("prefill"), chance=1) as p,
        SimServer(facts("decode", timeout=0.1), chance=2) as d,
    ):
        await post(session, p, max_tokens=1, kv_transfer_params=to_prefill())
        status, _ = await post(session, d, kv_transfer_params=to_decode(p))
        assert status == 200
        params = to_decode(p, "xfer-2")
        monkeypatch.setattr("pdproxy_lab.sim.mooncake_link.LONGER_THAN_PREFILL", 0.05)
        await p.kill()
        status, body = await post(session, d, kv_transfer_params=params, prompt="another")
        assert status == 500, body
        assert d.engine.stats.failed_receives == 1


async def test_a_fault_fails_the_next_load(session, pair):
    p, d = pair
    d.engine.fail_loads()
    await post(session, p, max_tokens=1, kv_transfer_params=to_prefill())
    status, _ = await post(session, d, kv_transfer_params=to_decode(p))
    assert status == 500


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b'{"0":{}}', b'{"0":{"engine_id":"x","worker_addr":{}}}', b'{"x":{}}']
)
async def test_an_answer_that_names_no_worker_fails_the_load(session, pair, answer):
    p, d = pair
    assert p.engine.bootstrap is not None
    p.engine.bootstrap.answer = answer
    status, _ = await post(session, d, kv_transfer_params=to_decode(p))
    assert status == 500
