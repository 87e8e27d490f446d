"""The engine's times in its steps: context, attention, KV pulls, transfers in line, and what
surrounds the engine.
"""

import asyncio
from itertools import pairwise

import pytest
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.receiving_line import ReceivingLine
from pdproxy_lab.sim.request import EngineRequest, SamplingParams
from tests.sim.engines import OTHER, PREFILL, PROMPT, Engines

NOTHING = {
    "prefill_tokens_per_s": 1e12,
    "decode_step_s": 0.0,
    "decode_step_per_seq_s": 0.0,
    "transfer_latency_s": 0.0,
}
MORE = tuple(range(500, 600))


def hardware(**more) -> Hardware:
    return Hardware(**{**NOTHING, "link_bytes_per_s": 1e15, **more})


def gaps(times):
    return [later - earlier for earlier, later in pairwise(times)]


def test_each_token_makes_the_next_step_longer_by_its_context():
    engines = Engines()
    engine = engines.add(SimFacts(hardware=hardware(context_token_s=0.001)))
    run = engines.answer(engine, PROMPT, 5)
    assert gaps(run.times) == pytest.approx([0.1, 0.101, 0.102, 0.103])


@pytest.mark.parametrize("budget", [7, 50, 2048])
def test_a_prompt_in_chunks_attends_to_as_many_pairs(budget):
    engines = Engines()
    engine = engines.add(
        SimFacts(max_num_batched_tokens=budget, hardware=hardware(attention_s=1e-4))
    )
    run = engines.answer(engine, PROMPT, 1)
    assert run.times == pytest.approx([1e-4 * 100 * 50], rel=0.01)


def pair(**more):
    engines = Engines()
    p, d = engines.add(SimFacts()), engines.add(SimFacts(hardware=hardware(**more)))
    met = engines.handle(
        p, tuple(range(700, 800))
    )  # the first pull of a pair waits for a handshake
    engines.answer(d, tuple(range(700, 800)), 1, met)
    return engines, p, d


def test_the_step_in_which_a_pull_begins_is_longer():
    engines, p, d = pair(decode_step_s=0.01, pull_s=0.5)
    running = engines.ask(d, OTHER, 20)
    handle = engines.handle(p)
    engines.run()
    assert max(gaps(running.times)) == pytest.approx(0.01)
    running = engines.ask(d, MORE, 200)
    engines.run(engines.now + 0.1)
    second = engines.ask(d, PROMPT, 2, handle)
    engines.run()
    assert max(gaps(running.times)) == pytest.approx(0.51)
    assert sum(gap > 0.02 for gap in gaps(running.times)) == 1
    assert second.over == "length"


def test_an_idle_engine_needs_the_time_of_a_pull_too():
    engines, p, d = pair(pull_s=0.5, transfer_latency_s=0.25)
    handle, begin = engines.handle(p), engines.now
    run = engines.ask(d, PROMPT, 1, handle)
    engines.run()
    assert run.times == pytest.approx([begin + 0.75], abs=1e-6)


def test_two_pulls_of_one_step_take_the_first_and_the_further_time():
    engines, p, d = pair(pull_s=0.5, further_pull_s=0.125)
    handles, begin = [engines.handle(p), engines.handle(p, OTHER)], engines.now
    engines.ask(d, MORE, 1)  # both wait behind this one's step
    runs = [
        engines.ask(d, prompt, 1, handle)
        for prompt, handle in zip((PROMPT, OTHER), handles, strict=True)
    ]
    engines.run()
    assert runs[1].times[0] - begin == pytest.approx(0.625, abs=1e-6)


def test_pulls_take_time_for_each_of_their_tokens():
    """PROMPT and OTHER have 100 tokens each. A cache has the first blocks of the last one: they are
    not pulled.
    """
    terms = {"pull_s": 0.5, "further_pull_s": 0.125, "pull_token_s": 0.001}
    engines, p, d = pair(**terms)
    handles, begin = [engines.handle(p), engines.handle(p, OTHER)], engines.now
    running = engines.ask(d, MORE, 1)  # both wait behind this one's step
    runs = [
        engines.ask(d, prompt, 1, handle)
        for prompt, handle in zip((PROMPT, OTHER), handles, strict=True)
    ]
    engines.run()
    assert running.over == "length"
    assert runs[1].times[0] - begin == pytest.approx(0.625 + 0.2, abs=1e-6)
    again = (*PROMPT[:96], *range(900, 1000))
    handle, begin = engines.handle(p, again), engines.now
    run = engines.ask(d, again, 1, handle)
    engines.run()
    assert run.times[0] - begin == pytest.approx(0.5 + 0.001 * (len(again) - 96), abs=1e-6)


def test_the_time_per_pulled_token_stops_the_sequences_of_the_decode_engine():
    engines, p, d = pair(decode_step_s=0.01, pull_token_s=0.005)
    handle = engines.handle(p)
    running = engines.ask(d, OTHER, 40)
    engines.run(until=engines.now + 0.1)
    engines.ask(d, PROMPT, 1, handle)
    engines.run()
    assert max(gaps(running.times)) == pytest.approx(0.01 + 0.005 * len(PROMPT))
    assert sum(gap > 0.02 for gap in gaps(running.times)) == 1


def test_a_prompt_adds_to_its_first_step_alone():
    """And so does each of two prompts that begin in one step; a request whose KV comes from
    elsewhere adds nothing.
    """
    engines = Engines()
    engine = engines.add(
        SimFacts(
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            hardware=hardware(prompt_begin_s=0.5),
        )
    )
    begin = engines.now
    run = engines.ask(engine, PROMPT, 1)  # 100 tokens: two steps
    engines.run()
    assert run.times[0] - begin == pytest.approx(0.5, abs=1e-6)
    begin = engines.now
    engines.ask(engine, MORE, 1)  # both wait behind this one's steps
    runs = [engines.ask(engine, prompt[:20], 1) for prompt in (PROMPT, OTHER)]
    engines.run()
    assert [one.times[0] - begin for one in runs] == pytest.approx([1.5, 1.5], abs=1e-6)
    engines, p, d = pair(prompt_begin_s=0.5)
    handle, begin = engines.handle(p), engines.now
    run = engines.ask(d, PROMPT, 1, handle)
    engines.run()
    assert run.times[0] - begin < 0.1


def test_pulls_cost_nothing_where_the_other_engine_pushes():
    engines = Engines()
    p, d = (engines.add(SimFacts(connector="nixl-push", role=role, engine_id=role,
        hardware=hardware(pull_s=9.0)))
            for role in ("prefill", "decode"))  # fmt: skip
    assert not p.core.connector.pulls_in_step
    assert not d.core.connector.pulls_in_step


@pytest.mark.parametrize(("in_line", "ends"), [(False, [1.0, 1.0, 1.5]), (True, [1.0, 2.0, 3.0])])
def test_transfers_take_turns_where_the_hardware_has_it_so(in_line, ends):
    line = ReceivingLine(Hardware(transfer_latency_s=1.0, transfers_in_line=in_line))
    assert [now + line.add(now, 0) for now in (0.0, 0.0, 0.5)] == pytest.approx(ends)
    assert line.add(10.0, 0) == pytest.approx(1.0)


def test_posting_is_part_of_a_transfer_and_speed_divides_both():
    for speed in (1.0, 4.0):
        line = ReceivingLine(
            Hardware(speed=speed, transfer_latency_s=1.0, pull_s=0.5, further_pull_s=0.25)
        )
        found = [line.add(0.0, 0) * speed, line.add(0.0, 0) * speed]
        assert found == pytest.approx([1.5, 1.75])
        line = ReceivingLine(
            Hardware(speed=speed, transfer_latency_s=1.0, pull_token_s=0.25, link_bytes_per_s=1e15)
        )
        found = [line.add(0.0, 2) * speed, line.add(0.0, 4) * speed]
        assert found == pytest.approx([1.5, 2.5])
    assert ReceivingLine(Hardware(speed=0, pull_s=5, pull_token_s=1)).add(0.0, 1000) == 0


def request(name: str, params=None) -> EngineRequest:
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    return EngineRequest(id=name, prompt=PROMPT, sampling=sampling, kv_transfer_params=params)


async def engine_with(**more):
    engine = SimEngine(SimFacts(connector="none", eos_every=0, hardware=hardware(**more)))
    await engine.start()
    return engine


async def first_of(outputs):
    return [output async for output in outputs]


async def test_a_short_idle_time_is_not_taken_off_the_next_step():
    engine = await engine_with(prefill_tokens_per_s=1000.0)
    loop, taken = asyncio.get_running_loop(), []
    try:
        for prompt in (PROMPT, OTHER, MORE):
            begun = loop.time()
            await first_of(engine.generate(structs.replace(request(str(prompt[0])), prompt=prompt)))
            taken.append(loop.time() - begun)
            await asyncio.sleep(0.03)
    finally:
        await engine.stop()
    assert min(taken) > 0.099


async def test_without_overheads_a_request_is_queued_at_once():
    engine = await engine_with(decode_step_s=1000.0)
    outputs = engine.generate(request("a"))
    waiting = asyncio.ensure_future(outputs.__anext__())
    try:
        await asyncio.sleep(0)
        assert engine.stats.waiting + engine.stats.running == 1
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await engine.stop()


async def test_a_request_waits_before_it_is_queued():
    engine = await engine_with(request_overhead_s=1000.0)
    try:
        waiting = asyncio.create_task(first_of(engine.generate(request("a"))))
        handed_over = [
            one async for one in engine.generate(request("b", {"do_remote_prefill": True}))
        ]
        assert len(handed_over) == 2  # a decode engine's leg has its own overhead: none here
        assert (engine.stats.waiting, engine.stats.running, engine.stats.finished["length"]) == (
            0,
            0,
            1,
        )
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    finally:
        await engine.stop()


async def test_a_decode_leg_waits_for_its_own_overhead():
    engine = await engine_with(handoff_overhead_s=1000.0)
    try:
        waiting = asyncio.create_task(
            first_of(engine.generate(request("a", {"do_remote_prefill": True})))
        )
        assert len([one async for one in engine.generate(request("b", dict(PREFILL)))]) == 2
        assert engine.stats.finished["length"] == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    finally:
        await engine.stop()


async def test_outputs_reach_the_client_later_and_in_order():
    engine = await engine_with(response_overhead_s=0.05)
    try:
        outputs = [one async for one in engine.generate(request("a"))]
        assert [one.finish_reason for one in outputs] == [None, "length"]
    finally:
        await engine.stop()
    engine = await engine_with(response_overhead_s=1000.0)
    try:
        waiting = asyncio.create_task(first_of(engine.generate(request("a"))))
        while not engine.stats.finished["length"]:
            await asyncio.sleep(0)
        assert not waiting.done()  # the engine is through, the client has seen nothing
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    finally:
        await engine.stop()
