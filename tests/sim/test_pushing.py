"""Engines that push, behind HTTP: over sockets, with faults, after restarts."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import Role, SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.sim.raw import CHAT, COMPLETIONS, Raw, ask, completion, get, post, until

PROMPT = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen"
)
ROLES: tuple[Role, Role] = ("prefill", "decode")
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Pair:
    """P and D, and the legs of one prompt."""

    def __init__(self, p: SimServer, d: SimServer) -> None:
        self.p, self.d = p, d

    def body(self, name, kv, **more):
        return completion(
            prompt=PROMPT, kv_transfer_params=kv, **{"max_tokens": 4, "request_id": name, **more}
        )

    def promise(self, **changed):
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.p.engine.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.p.engine.side_channel_ports[0],
            "remote_request_id": "made up",
            "tp_size": 1,
            "pp_size": 1,
        } | changed

    async def prefill(self, name, **more):
        return (
            await ask(self.p.port, self.body(name, PREFILL, **{"max_tokens": 1, **more}))
        ).answer

    async def decode(self, name, **changed):
        client = await Raw.connect(self.d.port)
        client.send(self.body(name, self.promise(**changed)))
        return client

    async def both(self, name, **changed):
        decoding = await self.decode(name, **changed)
        await self.prefill(name)
        return (await decoding.whole()).answer

    async def plain(self):
        async with SimServer(SimFacts(hardware=Hardware(speed=0), eos_every=0)) as one:
            return (await ask(one.port, completion(prompt=PROMPT, max_tokens=4))).answer.json[
                "choices"
            ][0]["text"]


def text(answer):
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"]


@pytest.fixture
async def start():
    async with AsyncExitStack() as stack:

        async def started(**facts):
            common: dict[str, Any] = {
                "connector": "nixl-push",
                "eos_every": 0,
                "handshake_timeout": 20.0,
                "hardware": Hardware(speed=0),
            }
            made = [
                await stack.enter_async_context(
                    SimServer(SimFacts(role=role, **(common | facts)), admin_port=0, chance=n)
                )
                for n, role in enumerate(ROLES)
            ]
            sims.extend(made)
            return Pair(*made)

        sims: list[SimServer] = []
        yield started
        assert [one.crashes for one in sims] == [[] for _ in sims]


@pytest.fixture
async def pair(start):
    return await start()


async def state(sim):
    return (await ask(int(sim.admin_url.rpartition(":")[2]), get("/state"))).answer.json


async def free(sim):
    await until(
        lambda: sim.engine.stats.running == 0 and not sim.engine.handles and not sim.engine.awaited
    )
    assert sim.engine._core.pool.usage == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("header", [True, False])
async def test_both_at_once(pair, path, header):
    def leg(kv, tokens):
        headers = "x-request-id: the-same\r\n" if header else ""
        body = {} if header else {"request_id": "the-same"}
        said = (
            {"prompt": PROMPT}
            if path == COMPLETIONS
            else {"messages": [{"role": "user", "content": PROMPT}]}
        )
        return post(
            path, headers, max_tokens=tokens, temperature=0, kv_transfer_params=kv, **body, **said
        )

    decoding = await Raw.connect(pair.d.port)
    decoding.send(leg(pair.promise(), 4))
    prefilled = (await ask(pair.p.port, leg(PREFILL, 1))).answer
    decoded = (await decoding.whole()).answer
    assert prefilled.json["kv_transfer_params"]["transfer_mode"] == "push"
    assert decoded.json["id"] == prefilled.json["id"]
    assert decoded.status == 200
    assert pair.d.engine.stats.prompt_tokens_by_source["local_compute"] == 0
    await free(pair.p)
    await free(pair.d)


async def test_right_text_and_metrics(pair):
    assert text(await pair.both("x")) == await pair.plain()
    for sim, transfers in ((pair.p, 1), (pair.d, 0)):
        page = (await ask(sim.port, get("/metrics"))).answer.body.decode()
        assert (
            f'vllm:nixl_bytes_transferred_count{{engine="0",model_name="sim"}} {float(transfers)}'
            in page
        )


@pytest.mark.parametrize("met", [True, False])
async def test_p_pushes_while_a_step_with_another_prompt_is_under_way(pair, met):
    if met:
        await pair.both("met")
    await pair.prefill("x")
    core = pair.p.engine._core
    core.facts = msgspec.structs.replace(core.facts, hardware=Hardware(prefill_tokens_per_s=0.001))
    busy = await Raw.connect(pair.p.port)
    busy.send(
        completion(
            prompt="a prompt whose step does not end", kv_transfer_params=PREFILL, max_tokens=1
        )
    )
    await until(lambda: pair.p.engine.stats.running == 1)
    assert text((await (await pair.decode("x")).whole()).answer) == await pair.plain()
    assert pair.p.engine.stats.running == 1
    assert not pair.p.engine.handles
    busy.leave()


async def test_the_admin_port_shows_who_waits(pair):
    decoding = await pair.decode("lonely")
    await until(lambda: pair.p.engine.registrations)
    (waits,) = (await state(pair.d))["awaited"]
    assert (await state(pair.p))["registrations"] == [waits]
    assert waits.startswith("cmpl-lonely-0-")
    decoding.leave()
    await until(lambda: not pair.d.engine._streams)
    assert (await state(pair.d))["awaited"]
    assert pair.d.engine._core.pool.usage > 0
    await pair.prefill("lonely")
    await free(pair.d)
    assert (await state(pair.d))["awaited"] == {}
    assert (await state(pair.p))["registrations"] == []


async def test_a_refused_leg_tells_p_nothing(pair):
    await pair.both("met")
    await pair.prefill("x")
    refused = await ask(pair.d.port, pair.body("x", pair.promise(), max_tokens=0))
    assert refused.answer.status == 400
    await asyncio.sleep(0.05)
    assert len(pair.p.engine.handles) == 1
    assert pair.p.engine.expire_leases() == 1
    await free(pair.p)


# -- faults


async def test_a_registration_that_fails_is_an_error(pair):
    pair.d.faults.add("load_failure@queued")
    answer = (await (await pair.decode("x")).whole()).answer
    assert (answer.status, answer.json["error"]["message"]) == (500, "Internal server error")
    assert pair.d.engine.stats.failed_transfers == 1
    await free(pair.d)


async def test_a_push_that_fails_leaves_d_waiting_and_p_with_its_blocks(pair):
    pair.p.faults.add("load_failure@queued")
    decoding = await pair.decode("x")
    await until(lambda: pair.p.engine.registrations)
    await pair.prefill("x")
    await until(lambda: pair.p.engine.stats.failed_transfers)
    await pair.prefill("x")  # it registers once: another prompt of that id finds nothing
    await until(lambda: len(pair.p.engine.handles) == 2)
    assert len(pair.d.engine.awaited) == 1
    assert not decoding.data
    decoding.leave()


async def test_the_moment_of_d_is_its_registration(pair):
    pair.d.faults.add("reset@handed_over")
    decoding = await pair.decode("x")
    await decoding.end()
    assert (decoding.ended, decoding.data) == ("reset", b"")
    await until(lambda: pair.p.engine.registrations)
    await pair.prefill("x")
    await free(pair.d)


async def test_a_lease_that_ends_leaves_d_waiting(pair):
    pair.p.faults.add("lease_expiry@after")
    await pair.prefill("x")
    await until(lambda: pair.p.engine.stats.kv_expired)
    decoding = await pair.decode("x")
    await until(lambda: pair.p.engine.registrations)
    assert not decoding.data
    decoding.leave()


@pytest.mark.parametrize("met", [True, False])
async def test_a_frozen_d_gets_its_kv_when_it_goes_on(pair, met):
    if met:
        await pair.both("met")
    decoding = await pair.decode("x")
    await until(lambda: pair.p.engine.registrations)
    await pair.d.freeze()
    await pair.prefill("x")
    await asyncio.sleep(0.05)
    assert len(pair.p.engine.handles) == 1
    await pair.d.thaw()
    assert (await decoding.whole()).answer.status == 200
    await free(pair.p)
    await free(pair.d)


async def test_a_frozen_p_is_not_met(start):
    pair = await start(handshake_timeout=0.05)
    await pair.p.freeze()
    assert (await (await pair.decode("x")).whole()).answer.status == 500
    assert pair.d.engine.stats.failed_transfers == 1


async def test_a_frozen_p_takes_a_registration_when_it_goes_on(pair):
    await pair.both("met")
    await pair.p.freeze()
    decoding = await pair.decode("x")
    await until(lambda: pair.d.engine.awaited)
    await pair.p.thaw()
    await pair.prefill("x")
    assert (await decoding.whole()).answer.status == 200


async def test_a_killed_p_leaves_d_waiting(pair):
    await pair.both("met")
    await pair.p.kill()
    decoding = await pair.decode("x")
    await until(lambda: pair.d.engine.stats.failed_notifications)
    assert len(pair.d.engine.awaited) == 1
    decoding.leave()


# -- restarts


async def test_after_a_restart_of_either_its_new_id_works(pair):
    for sim in (pair.p, pair.d):
        assert text(await pair.both("x")) == await pair.plain()
        before = sim.engine.engine_id
        await sim.restart()
        assert sim.engine.engine_id != before
    assert text(await pair.both("y")) == await pair.plain()


async def test_the_old_id_of_p_is_refused(pair):
    old = pair.promise()
    await pair.p.restart()
    answer = (
        await (await pair.decode("x", remote_engine_id=old["remote_engine_id"])).whole()
    ).answer
    assert answer.status == 500


@pytest.mark.parametrize("restarted", ["p", "d"])
async def test_an_engine_with_a_fixed_id_that_restarts_never_gets_through_again(restarted):
    common: dict[str, Any] = {
        "connector": "nixl-push",
        "eos_every": 0,
        "hardware": Hardware(speed=0),
    }
    fixed: dict[str, dict[str, Any]] = {
        restarted: {"engine_id": "fixed"},
        "p" if restarted == "d" else "d": {},
    }
    async with (
        SimServer(SimFacts(role="prefill", **common, **fixed["p"]), chance=1) as p,
        SimServer(SimFacts(role="decode", **common, **fixed["d"]), chance=2) as d,
    ):
        pair = Pair(p, d)
        assert (await pair.both("x")).status == 200
        await {"p": p, "d": d}[restarted].restart()
        assert {"p": p, "d": d}[restarted].engine.engine_id == "fixed"
        for name in "yz":
            decoding = await pair.decode(name)
            await until(lambda: pair.d.engine.awaited)
            await pair.prefill(name)
            failed = pair.p.engine.stats if restarted == "d" else pair.d.engine.stats
            await until(lambda: failed.failed_transfers or failed.failed_notifications)  # noqa: B023
            assert len(pair.p.engine.handles) >= 1
            assert not decoding.data
            decoding.leave()
        assert len(pair.d.engine.awaited) == 2
