"""What vLLM's CPUConnector does on P and on D, each case of it, in virtual time and over
sockets.
"""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.cpu import CpuConnector, base_id
from pdproxy_lab.sim.facts import CpuBuffer, SimFacts
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.server import SimServer
from tests.fakes.ports import free_port
from tests.sim.engines import OTHER, PROMPT, Engines, plain
from tests.sim.raw import Raw, ask, completion, until

BYTES = Hardware().kv_bytes_per_token
LONG = tuple(range(300, 600))


def facts(role, *, size=1.0, **more):
    usual = {
        "role": role,
        "connector": "cpu",
        "enable_prefix_caching": False,
        "cpu": CpuBuffer(cpu_port=5, cpu_size=size),
    }
    return SimFacts(**(usual | more))


def cpu(core):
    """The connector of an engine's core."""
    assert isinstance(core.connector, CpuConnector)
    return core.connector


class Pair(Engines):
    """P and D."""

    def __init__(self, p=None, d=None, **more):
        super().__init__()
        self.p = self.add(facts("prefill", **(more | (p or {}))))
        self.d = self.add(facts("decode", **(more | (d or {}))))

    def prefill(self, prompt=PROMPT, name="cmpl-a-0", suffix="-00000001", **more):
        return self.answer(self.p, prompt, **{"max_tokens": 1, "id": name + suffix, **more})

    def decode(self, params, prompt=PROMPT, name="cmpl-a-0", suffix="-00000002", **more):
        return self.answer(self.d, prompt, kv=params, id=name + suffix, **more)

    def split(self, prompt=PROMPT, name="cmpl-a-0"):
        return self.decode(self.prefill(prompt, name).handle, prompt, name).tokens

    @property
    def external(self):
        return self.d.stats.prompt_tokens_by_source["external_kv_transfer"]

    @property
    def held(self):
        """Tokens in D's buffer."""
        return cpu(self.d.core).held // BYTES

    @property
    def unsent(self):
        return cpu(self.p.core).sending // BYTES


@pytest.fixture
def pair():
    return Pair()


@given(st.integers(1, 70), st.sampled_from([1, 5, 16, 32]), st.sampled_from([8, 8192]))
@settings(max_examples=60, deadline=None)
def test_split_says_what_one_engine_says(length, block_size, budget):
    prompt = tuple(range(300, 300 + length))
    pair = Pair(block_size=block_size, max_num_batched_tokens=budget, max_model_len=500)
    assert pair.split(prompt) == plain(prompt)
    whole = length // block_size * block_size
    assert pair.external == whole
    assert pair.held == (0 if whole else length), (
        "a prompt under a block is pushed, and never loaded"
    )
    assert pair.unsent == 0
    assert pair.d.core.pool.usage == pair.p.core.pool.usage == 0


def test_the_answer_names_the_request_and_nothing_is_kept(pair):
    run = pair.prefill()
    assert run.handle == {"prefill_request_id": "cmpl-a-0"}
    assert pair.p.core.pool.usage == 0


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": True}, {"prefill_request_id": "x"}]
)
def test_p_pushes_whatever_it_is_asked(pair, params):
    run = pair.prefill(kv=params)
    assert run.handle == {"prefill_request_id": "cmpl-a-0"}
    assert pair.unsent == len(PROMPT)


def test_an_idle_d_takes_nothing(pair):
    pair.prefill()
    assert (pair.unsent, pair.held) == (len(PROMPT), 0)
    pair.answer(pair.d, OTHER, 1)
    assert (pair.unsent, pair.held) == (0, len(PROMPT))


def test_d_without_the_id_computes_and_what_was_pushed_stays(pair):
    pair.prefill()
    assert pair.decode(None).tokens == plain()
    assert pair.external == 0
    assert pair.held == len(PROMPT)


@pytest.mark.parametrize("given", ["cmpl-b-0", "", 7])
def test_an_unknown_id_is_awaited_for_ever(pair, given):
    pair.prefill()
    assert pair.decode({"prefill_request_id": given}).outputs == []
    assert pair.d.core.stats.waiting == 1


def test_a_d_with_another_id_waits_for_ever(pair):
    params = pair.prefill().handle
    assert pair.decode(params, name="cmpl-b-0").outputs == []


def test_a_wait_that_is_aborted_keeps_no_blocks(pair):
    pair.decode({"prefill_request_id": "cmpl-a-0"})
    assert pair.d.core.pool.usage > 0
    pair.abort(pair.d, "cmpl-a-0-00000002")
    assert pair.d.core.pool.usage == 0


def test_a_push_that_comes_after_an_abort_is_reported_to_nobody(pair):
    pair.decode({"prefill_request_id": "cmpl-a-0"})
    pair.abort(pair.d, "cmpl-a-0-00000002")
    params = pair.prefill().handle
    pair.answer(pair.d, OTHER, 1)
    assert pair.decode(params, suffix="-00000003").outputs == [], (
        "it was reported before, and is not again"
    )
    assert pair.held == len(PROMPT)


def test_d_may_be_asked_first(pair):
    run = pair.ask(pair.d, PROMPT, kv={"prefill_request_id": "cmpl-a-0"}, id="cmpl-a-0-00000002")
    pair.prefill()
    assert run.tokens == plain()
    assert pair.external == len(PROMPT) // 16 * 16


def test_an_id_that_comes_twice_is_awaited_for_ever(pair):
    pair.prefill()
    params = pair.prefill(suffix="-00000009").handle
    assert pair.decode(params).outputs == []


def test_two_requests_with_one_id_get_each_others_kv(pair):
    """Ids that are shared mix up KV: D loads what came under the id, whoever made it."""
    params = pair.prefill(OTHER).handle
    assert pair.decode(params, PROMPT).tokens != plain(PROMPT)


def test_a_p_that_makes_more_than_one_token_spoils_its_kv(pair):
    params = pair.prefill(max_tokens=3).handle
    assert pair.decode(params).outputs == []


def test_what_d_has_in_its_cache_is_not_loaded_and_stays():
    pair = Pair(d={"enable_prefix_caching": True})
    assert pair.split() == plain()
    assert pair.split(name="cmpl-b-0") == plain()
    assert pair.held == len(PROMPT)


def test_p_pushes_what_was_in_its_cache_too():
    pair = Pair(p={"enable_prefix_caching": True})
    assert pair.split() == plain()
    assert pair.split(name="cmpl-b-0") == plain()
    assert pair.external == 2 * (len(PROMPT) // 16 * 16)
    assert pair.held == 0


def test_a_prefill_that_is_aborted_leaves_a_part():
    pair = Pair(max_num_batched_tokens=32, hardware=Hardware(prefill_tokens_per_s=32))
    pair.ask(pair.p, PROMPT, 1, id="cmpl-a-0-00000001")
    pair.run(pair.now + 1.5)
    pair.abort(pair.p, "cmpl-a-0-00000001")
    pair.run(pair.now + 10)
    pair.answer(pair.d, OTHER, 1)
    assert 0 < pair.held < len(PROMPT)
    assert pair.decode({"prefill_request_id": "cmpl-a-0"}).outputs == []


def test_a_full_buffer_at_d_makes_pushes_wait_and_a_full_one_at_p_stops_p():
    room = 250 * BYTES / (1 << 30)
    pair = Pair(d={"size": room}, p={"size": 320 * BYTES / (1 << 30)})
    for name in "abcd":
        pair.prefill(name=f"cmpl-{name}-0")
    assert pair.unsent == 400, "D is idle"
    late = pair.ask(pair.p, OTHER, 1, id="cmpl-e-0-00000001")
    pair.run(pair.now + 5)
    assert not late.outputs, "P waits for space of its own"
    assert pair.decode({"prefill_request_id": "cmpl-a-0"}).tokens == plain()
    pair.run(pair.now + 5)
    assert late.handle == {"prefill_request_id": "cmpl-e-0"}
    assert pair.held == 200


def test_a_part_over_the_whole_buffer_kills_d(pair):
    pair = Pair(d={"size": 50 * BYTES / (1 << 30)})
    params = pair.prefill().handle
    run = pair.decode(params)
    assert run.over == "error"
    with pytest.raises(EngineDeadError):
        pair.answer(pair.d)


def test_p_waits_with_all_it_has_until_d_listens():
    engines = Engines()
    p = engines.add(facts("prefill"))
    assert engines.answer(p, PROMPT, 1).outputs == []
    assert engines.answer(p, OTHER, 1).outputs == []


@pytest.mark.parametrize(
    ("role", "more", "why"),
    [
        ("aggregated", {}, "role must be prefill or decode"),
        ("prefill", {"cpu": CpuBuffer()}, "cpu_port must be given"),
        ("decode", {"notify": "tcp://x:1"}, "notify must be left out"),
    ],
)
def test_what_does_not_start(role, more, why):
    with pytest.raises(ValueError, match=why):
        facts(role, **more)


@pytest.mark.parametrize("wrong", [{"cpu_port": 70000}, {"cpu_port": -1}, {"cpu_size": 0}])
def test_buffers_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match="must be"):
        CpuBuffer(**wrong)


def test_base_ids():
    assert base_id("cmpl-899d00b0959a2d34-0-9cc849e2") == "cmpl-899d00b0959a2d34-0"
    assert base_id("chatcmpl-x") == "chatcmpl-x"


# -- over sockets


def engine_facts(role, port):
    return SimFacts(
        role=role,
        connector="cpu",
        enable_prefix_caching=False,
        eos_every=0,
        hardware=Hardware(speed=0),
        cpu=CpuBuffer(cpu_port=port),
    )


TEXT = "one two three four five six seven eight nine ten " * 3


async def answered(server, **body):
    """Ask; return the answer."""
    return json.loads((await ask(server.port, completion(prompt=TEXT, **body))).answer.body)


async def pushed(p, name):
    """Have a prompt prefilled under an id; return the answer's params."""
    return (await answered(p, max_tokens=1, request_id=name))["kv_transfer_params"]


async def test_a_pair_over_sockets_and_a_d_that_is_restarted():
    port = free_port()
    async with (
        SimServer(engine_facts("decode", port), chance=2) as d,
        SimServer(engine_facts("prefill", port), chance=1) as p,
    ):
        params = await pushed(p, "one")
        assert params == {"prefill_request_id": "cmpl-one-0"}
        split = await answered(d, request_id="one", kv_transfer_params=params)
        alone = await answered(d)
        assert split["choices"][0]["text"] == alone["choices"][0]["text"]
        assert d.engine.stats.prompt_tokens_by_source["external_kv_transfer"] > 0
        await d.restart()
        params = await pushed(p, "two")
        client = await Raw.connect(d.port)
        client.send(completion(prompt=TEXT, request_id="two", kv_transfer_params=params))
        await until(lambda: d.engine.stats.waiting == 1)
        await asyncio.sleep(0.05)
        assert d.engine.stats.waiting == 1, (
            "P writes to the memory of the engine of its handshake, for ever"
        )
        client.leave()
        await until(lambda: d.engine.stats.kv_cache_usage == 0)
        assert cpu(p.engine._core).sending > 0


async def test_a_p_that_starts_first_waits_for_d():
    port = free_port()
    async with SimServer(engine_facts("prefill", port), chance=1) as p:
        asked = asyncio.create_task(pushed(p, "one"))
        await until(lambda: p.engine._core is not None and p.engine._core.connector.blocked)
        async with SimServer(engine_facts("decode", port), chance=2) as d:
            params = await asked
            split = await answered(d, request_id="one", kv_transfer_params=params)
            assert split["usage"]["completion_tokens"] == 4
