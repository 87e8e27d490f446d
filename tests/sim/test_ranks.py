"""Data-parallel ranks: one port, several engines for other engines."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.sim.raw import CHAT, COMPLETIONS, Raw, ask, completion, get, post, until

PROMPT = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen"
)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
async def start():
    async with AsyncExitStack() as stack:

        async def started(role="prefill", ranks=3, **facts):
            common: dict[str, Any] = {
                "connector": "nixl-push",
                "eos_every": 0,
                "hardware": Hardware(speed=0),
            }
            made = SimFacts(role=role, data_parallel_size=ranks, **(common | facts))
            sims.append(
                await stack.enter_async_context(SimServer(made, admin_port=0, chance=len(sims)))
            )
            return sims[-1]

        sims: list[SimServer] = []
        yield started
        assert [one.crashes for one in sims] == [[] for _ in sims]


def leg(rank=None, path=COMPLETIONS, **body):
    headers = "" if rank is None else f"X-data-parallel-rank: {rank}\r\n"
    said = (
        {"prompt": PROMPT}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": PROMPT}]}
    )
    return post(path, headers, **{"max_tokens": 1, "temperature": 0, **said, **body})


async def handle_of(sim, rank=None, **body):
    answer = (await ask(sim.port, leg(rank, kv_transfer_params=PREFILL, **body))).answer
    assert answer.status == 200, answer.body
    return answer.json["kv_transfer_params"]


def counted(sim):
    return [stats.prompt_tokens for stats in sim.engine.rank_stats]


@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
async def test_each_rank_has_its_own_id_port_memory_and_counters(start, connector):
    p = await start(connector=connector)
    handles = [await handle_of(p, rank) for rank in (2, 0, 1)]
    names = [f"{p.engine.engine_id}_dp{rank}" for rank in (2, 0, 1)]
    assert [handle["remote_engine_id"] for handle in handles] == names
    assert [handle["remote_port"] for handle in handles] == [
        p.engine.side_channel_ports[rank] for rank in (2, 0, 1)
    ]
    assert len({handle["remote_port"] for handle in handles}) == 3
    assert [handle["remote_block_ids"] for handle in handles] == [
        handles[0]["remote_block_ids"]
    ] * 3
    assert len(set(counted(p))) == 1
    assert len(p.engine.handles) == 3
    assert p.engine.expire_leases() == 3


async def test_the_ports_are_the_base_and_those_after_it(start, unused_tcp_port_factory):
    for _ in range(20):  # the ports after a free one may be taken
        base = unused_tcp_port_factory()
        try:
            p = await start(side_channel_port=base)
        except OSError:
            continue
        assert p.engine.side_channel_ports == [base, base + 1, base + 2]
        await p.restart()
        assert p.engine.side_channel_ports == [base, base + 1, base + 2]
        return
    pytest.fail("no three free ports")


async def test_one_rank_has_the_id_alone(start):
    p = await start(ranks=1)
    assert (await handle_of(p))["remote_engine_id"] == p.engine.engine_id


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("rank", ["3", "-1", "99999999999999999999"])
async def test_a_rank_that_does_not_exist_is_refused(start, path, rank):
    p = await start()
    answer = (await ask(p.port, leg(rank, path))).answer
    assert answer.status == 400
    assert answer.json["error"]["message"] == f"data_parallel_rank {rank} is out of range [0, 3)."
    assert sum(counted(p)) == 0


async def test_of_one_rank_only_the_first_exists(start):
    p = await start(ranks=1)
    assert (await ask(p.port, leg("0"))).answer.status == 200
    assert (await ask(p.port, leg("1"))).answer.status == 400


@pytest.mark.parametrize("rank", ["", "x", "1.5"])
async def test_what_is_no_number_names_no_rank(start, rank):
    p = await start()
    assert (await ask(p.port, leg(rank))).answer.status == 200


async def test_without_a_rank_requests_go_round(start):
    p = await start()
    for _ in range(6):
        await handle_of(p)
    assert len(set(counted(p))) == 1


async def test_without_a_rank_the_one_with_the_fewest_requests_is_taken(start):
    p = await start(hardware=Hardware(), ranks=2)
    busy = []
    for _ in range(4):
        busy.append(await Raw.connect(p.port))
        busy[-1].send(completion(rank=None, max_tokens=4000))
        await until(lambda: sum(p.engine._in_flight) == len(busy))
    assert p.engine._in_flight == [2, 2]
    for client in busy:
        client.leave()
    await until(lambda: p.engine._in_flight == [0, 0])


async def test_kv_moves_between_any_two_ranks(start):
    p, d = await start(ranks=2), await start("decode", ranks=3)
    alone = await start("aggregated", 1, connector="none")
    plain = (await ask(alone.port, leg(max_tokens=4))).answer.json["choices"][0]["text"]
    for of_p in range(2):
        for of_d in range(3):
            name = f"{of_p}{of_d}"
            promise = {
                "do_remote_prefill": True,
                "remote_engine_id": f"{p.engine.engine_id}_dp{of_p}",
                "remote_host": "127.0.0.1",
                "remote_port": p.engine.side_channel_ports[of_p],
                "remote_request_id": name,
                "tp_size": 1,
            }
            salt = {"request_id": name, "cache_salt": name}
            decoding = await Raw.connect(d.port)
            decoding.send(leg(of_d, kv_transfer_params=promise, **{"max_tokens": 4, **salt}))
            await handle_of(p, of_p, **salt)
            assert (await decoding.whole()).answer.json["choices"][0]["text"] == plain
    assert [stats.prompt_tokens_by_source["local_compute"] for stats in d.engine.rank_stats] == [
        0,
        0,
        0,
    ]
    await until(lambda: not p.engine.handles)


async def test_the_wrong_rank_of_p_never_pushes(start):
    p, d = await start(ranks=2), await start("decode", ranks=1)
    handle = await handle_of(p, 0, request_id="x")
    other = {
        "remote_engine_id": f"{p.engine.engine_id}_dp1",
        "remote_port": p.engine.side_channel_ports[1],
    }
    decoding = await Raw.connect(d.port)
    decoding.send(leg(kv_transfer_params=handle | other, request_id="x"))
    await until(lambda: p.engine.registrations)
    assert (len(d.engine.awaited), len(p.engine.handles), decoding.data) == (1, 1, b"")
    decoding.leave()


@pytest.mark.parametrize(
    ("rank", "releases"), [(None, True), ("1", True), ("-1", True), ("2", False)]
)
async def test_a_refused_request_releases_by_its_rank(start, rank, releases):
    p, d = await start(connector="nixl", ranks=1), await start("decode", connector="nixl", ranks=2)
    for one in range(2):  # each rank meets P
        handle = await handle_of(p)
        assert (await ask(d.port, leg(one, kv_transfer_params=handle))).answer.status == 200
    await until(lambda: not p.engine.handles)
    handle = await handle_of(p)
    refused = await ask(d.port, leg(rank, kv_transfer_params=handle, max_tokens=0))
    assert refused.answer.status == 400
    if releases:
        await until(lambda: not p.engine.handles)
    else:
        await asyncio.sleep(0.05)
        assert p.engine.handles


async def test_metrics_have_a_line_per_rank(start):
    p = await start(ranks=2)
    await handle_of(p, 1)
    page = (await ask(p.port, get("/metrics"))).answer.body.decode()
    lines = [line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_total")]
    assert [line.partition("}")[0][-30:] for line in lines] == [
        f'total{{engine="{rank}",model_name="sim"'[-30:] for rank in range(2)
    ]
    assert [float(line.split()[-1]) > 0 for line in lines] == [False, True]


async def test_a_rank_that_dies_takes_all_with_it(start):
    d = await start("decode", ranks=2)
    answer = (await ask(d.port, leg(1, kv_transfer_params={"do_remote_prefill": True}))).answer
    assert answer.status == 500
    assert (await ask(d.port, get("/health"))).answer.status == 503
    assert (await ask(d.port, leg(0))).answer.status == 500


@pytest.mark.parametrize(
    "wrong",
    [
        {"data_parallel_size": 0},
        {"side_channel_port": 65535},
        {"connector": "lmcache-pd", "role": "decode"},
    ],
)
def test_impossible_ranks(wrong):
    with pytest.raises(ValueError, match=r"data_parallel_size must|one port per rank"):
        SimFacts(**{"data_parallel_size": 2, **wrong})
