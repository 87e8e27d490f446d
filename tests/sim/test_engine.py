"""The engine in real time: what the core's own tests can't show."""

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.request import EngineDeadError, EngineRequest, SamplingParams
from tests.sim.engines import PREFILL, PROMPT, Engines, plain
from tests.sim.raw import until

FAST = Hardware(speed=0)


@pytest.fixture
async def start():
    async with AsyncExitStack() as stack:

        async def started(**facts):
            engine = SimEngine(SimFacts(**{"hardware": FAST, **facts}), chance=len(facts))
            await engine.start()
            stack.push_async_callback(engine.stop)
            return engine

        yield started


def request(max_tokens=8, kv=None, prompt=PROMPT, id="x"):  # noqa: A002
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return EngineRequest(id=id, prompt=prompt, sampling=sampling, kv_transfer_params=kv)


async def answer(engine, *args, **more):
    tokens, last = [], None
    async for output in engine.generate(request(*args, **more)):
        tokens += [token.id for token in output.tokens]
        last = output
    return tokens, last


async def test_real_time_says_what_virtual_time_says(start):
    tokens, _ = await answer(await start())
    engines = Engines()
    assert tokens == engines.answer(engines.add(SimFacts())).tokens


async def test_kv_moves_over_sockets(start):
    p, d = await start(), await start()
    _, prefilled = await answer(p, 1, dict(PREFILL))
    tokens, _ = await answer(d, 8, prefilled.kv_transfer_params)
    assert tokens == plain()
    assert d.stats.prompt_tokens_by_source["external_kv_transfer"] == 100
    await until(lambda: not p.handles)
    assert p.stats.kv_cache_usage == 0 or p._core.pool.usage == 0


async def test_a_reader_that_leaves_aborts(start):
    engine = await start(hardware=Hardware())
    async with aclosing(engine.generate(request(5000))) as outputs:
        await anext(outputs)
    await until(lambda: engine.stats.running == 0)
    assert engine._core.pool.usage == 0


async def test_a_dead_core_fails_what_runs_and_what_comes(start):
    engine = await start(hardware=Hardware())
    running = asyncio.ensure_future(answer(engine, 5000))
    await until(lambda: engine.stats.running)
    engine.kill_core()
    with pytest.raises(EngineDeadError):
        await running
    with pytest.raises(EngineDeadError):
        await answer(engine)


async def test_a_restart_gives_a_new_id_on_the_same_side_channel(start):
    p, d = await start(), await start()
    _, prefilled = await answer(p, 1, dict(PREFILL))
    before = p.engine_id
    await p.restart()
    assert p.engine_id != before
    tokens, last = await answer(d, 8, prefilled.kv_transfer_params)
    assert (tokens, last.finish_reason) == ([], "error")
    _, again = await answer(p, 1, dict(PREFILL))
    assert again.kv_transfer_params["remote_port"] == prefilled.kv_transfer_params["remote_port"]
    tokens, _ = await answer(d, 8, again.kv_transfer_params)
    assert tokens == plain()


async def test_a_frozen_engine_says_nothing_until_it_is_thawed(start):
    engine = await start()
    engine.freeze()
    running = asyncio.ensure_future(answer(engine))
    done, _ = await asyncio.wait({running}, timeout=0.05)
    assert not done
    engine.thaw()
    assert (await running)[0] == plain()


async def test_a_frozen_prefill_engine_is_waited_for_without_end_once_it_is_known(start):
    p, d = await start(), await start()
    for number in range(2):
        _, prefilled = await answer(
            p, 1, dict(PREFILL), prompt=tuple(range(300 + number, 400 + number)), id=f"p{number}"
        )
        if number:
            p.freeze()
        running = asyncio.ensure_future(
            answer(
                d,
                8,
                prefilled.kv_transfer_params,
                prompt=tuple(range(300 + number, 400 + number)),
                id=f"d{number}",
            )
        )
        if not number:
            await running
            (link,) = d._links
            link._facts = structs.replace(d.facts, handshake_timeout=0.05)
    done, _ = await asyncio.wait({running}, timeout=0.2)
    assert not done
    p.thaw()
    assert (await running)[1].finish_reason == "length"


async def test_a_frozen_stranger_fails_after_the_handshakes_deadline(start):
    p, d = await start(), await start(handshake_timeout=0.05)
    _, prefilled = await answer(p, 1, dict(PREFILL))
    p.freeze()
    _, last = await answer(d, 8, prefilled.kv_transfer_params)
    assert last.finish_reason == "error"


@pytest.mark.parametrize("port", [1, 70_000])
async def test_nobody_listening_there_is_a_failed_load(start, port):
    p, d = await start(), await start(handshake_timeout=0.05)
    _, prefilled = await answer(p, 1, dict(PREFILL))
    _, last = await answer(d, 8, prefilled.kv_transfer_params | {"remote_port": port})
    assert last.finish_reason == "error"


async def test_made_up_block_ids_are_a_failed_load(start):
    p, d = await start(), await start()
    _, prefilled = await answer(p, 1, dict(PREFILL))
    _, last = await answer(d, 8, prefilled.kv_transfer_params | {"remote_block_ids": [[10**6] * 7]})
    assert last.finish_reason == "error"


async def test_leases_and_loads_end_when_told_to(start):
    p, d = await start(), await start()
    await answer(p, 1, dict(PREFILL))
    assert all(29 < left <= 30 for left in p.handles.values())
    assert (p.expire_leases(), p.handles, p.stats.kv_expired) == (1, {}, 1)
    _, prefilled = await answer(p, 1, dict(PREFILL))
    d.fail_loads()
    assert (await answer(d, 8, dict(prefilled.kv_transfer_params)))[1].finish_reason == "error"
    assert (await answer(d, 8, prefilled.kv_transfer_params, id="again"))[0] == plain()


async def test_leases_end_by_themselves(start):
    p = await start(kv_lease_duration=0.02)
    await answer(p, 1, dict(PREFILL))
    await until(lambda: p.stats.kv_expired == 1)


async def test_an_address_that_is_not_ours_is_said_all_the_same(start):
    p = await start(side_channel_host="192.0.2.7")
    _, prefilled = await answer(p, 1, dict(PREFILL))
    assert prefilled.kv_transfer_params["remote_host"] == "192.0.2.7"
