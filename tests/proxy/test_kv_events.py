"""KV events of simulated engines, over real sockets: found, followed, healed after each fault."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pdproxy.app.compose import Proxy
from pdproxy.fleet import kv_source
from pdproxy.fleet.kv_sources import NONE
from pdproxy.observe.events import DeadlinePassed
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.health import Probes
from pdproxy.settings.kv import EngineKvEvents, KvEvents
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import KvEventsConfig
from pdproxy_lab.sim.server import SimServer
from tests.fakes.clock import ManualClock
from tests.fakes.kv_index import PlainIndex
from tests.fakes.ports import free_port
from tests.proxy.kv_events import ANY, Reader, complete, facts, prompt, reading, truth
from tests.sim.raw import until

ON = KvEvents(enabled=True)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_source, "COOLDOWN", 0.01)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def engine(
    stack: AsyncExitStack, config: KvEventsConfig | None = ANY, **more: Any
) -> SimServer:
    return await stack.enter_async_context(SimServer(facts(config, **more), chance=5))


async def reader(stack: AsyncExitStack, *args: Any, **more: Any) -> Reader:
    return await stack.enter_async_context(reading(*args, **more))


async def test_what_an_engine_stores_and_evicts_is_known(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack, num_gpu_blocks=30, max_model_len=256), await reader(stack)
    await read.follow(sim)
    for number in range(12):
        await complete(sim, prompt(number))
    await read.agrees(sim)
    assert len(truth(sim)) > 20
    url = sim.url
    assert read.metric("pdproxy_kv_event_messages_total", node=url, result="live") == 12
    assert read.metric("pdproxy_kv_event_blocks_total", change="removed") > 20
    assert read.metric("pdproxy_kv_event_sources", state="connected") == 1
    assert read.metric("pdproxy_kv_event_age_seconds", node=url) >= 0
    assert read.metric("pdproxy_kv_event_gaps_total") == 0
    assert read.sources.shortcomings() == []


async def test_tokens_of_blocks_are_the_prompts(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack), await reader(stack)
    await read.follow(sim)
    await complete(sim, prompt(0))
    await read.agrees(sim)
    place = read.sources.places[sim.url, 0]
    assert [token for ids in read.index.blocks[place].values() for token in ids] == prompt(0)[:96]


async def test_what_was_stored_before_is_known(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack), await reader(stack)
    for number in range(5):
        await complete(sim, prompt(number))
    await read.follow(sim)
    await read.agrees(sim)
    assert read.metric("pdproxy_kv_event_messages_total", result="replayed") == 5


async def test_an_emptied_cache_is_forgotten(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack), await reader(stack)
    await read.follow(sim)
    await complete(sim, prompt(0))
    await read.agrees(sim)
    assert sim.engine.reset_prefix_cache()
    await complete(sim, prompt(1))
    await until(lambda: read.index.count("cleared"))
    await read.agrees(sim)


async def test_lost_messages_are_asked_for(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack), await reader(stack)
    await read.follow(sim)
    await complete(sim, prompt(0))
    sim.faults.add("lost_kv_events:next=3")
    for number in range(1, 6):
        await complete(sim, prompt(number))
    await read.agrees(sim)
    assert read.metric("pdproxy_kv_event_gaps_total", node=sim.url, cause="lost") == 1
    assert read.metric("pdproxy_kv_event_replays_total", result="complete") == 2
    assert read.index.count("restart") == 0


async def test_a_restart_at_the_same_address_is_noticed_without_a_probe(
    stack: AsyncExitStack,
) -> None:
    ports = [free_port(), free_port()]
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://*:{ports[0]}",
        replay_endpoint=f"tcp://*:{ports[1]}",
    )
    sim, read = await engine(stack, config), await reader(stack)
    await read.follow(sim)
    for number in range(3):
        await complete(sim, prompt(number))
    await read.agrees(sim)
    await sim.restart()
    await until(lambda: read.metric("pdproxy_kv_event_gaps_total", cause="restart"))
    await read.agrees(sim)
    assert truth(sim) == set()
    await complete(sim, prompt(9))
    await read.agrees(sim)


async def test_an_engine_that_changes_its_address_is_found_again(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack), await reader(stack)
    await read.follow(sim)
    await complete(sim, prompt(0))
    await read.agrees(sim)
    read.down(sim.url)
    assert read.known(sim.url) == set()
    await sim.restart()
    await complete(sim, prompt(1))
    read.up(sim.url)
    await read.agrees(sim)
    assert len(truth(sim)) == 6
    await complete(sim, prompt(2))
    await read.agrees(sim)
    assert list(read.sources.places) == [(sim.url, 0)]


async def test_an_engine_that_was_only_busy_is_known_again(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack), await reader(stack)
    await read.follow(sim)
    await complete(sim, prompt(0))
    read.down(sim.url)
    assert read.known(sim.url) == set()
    read.up(sim.url)
    await read.agrees(sim)
    assert len(truth(sim)) == 6


async def test_a_replay_that_is_never_answered_ends_at_its_deadline(stack: AsyncExitStack) -> None:
    clock = ManualClock()
    sim, read = await engine(stack), await reader(stack, ON, deadline=5.0, clock=clock)
    sim.faults.add("silent_replay:rate=1")
    await complete(sim, prompt(0))
    read.add(sim.url)
    read.up(sim.url)
    await clock.reach(5.0)
    await until(lambda: DeadlinePassed("kv_replay", sim.url) in read.events)
    assert read.metric("pdproxy_kv_event_replays_total", result="unanswered") == 1
    await complete(sim, prompt(1))
    await until(lambda: len(read.known(sim.url)) == 6)  # the events go on


async def test_without_a_replay_endpoint_a_gap_forgets_all(stack: AsyncExitStack) -> None:
    config = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")
    sim, read = await engine(stack, config), await reader(stack)
    read.add(sim.url)
    read.up(sim.url)
    await until(lambda: read.metric("pdproxy_kv_event_sources", state="connected"))
    number = 10
    while not read.known(sim.url):  # ZMQ says nowhere when a subscription has arrived
        await complete(sim, prompt(number))
        await asyncio.sleep(0.01)
        number += 1
    assert sim.engine.reset_prefix_cache()
    await complete(sim, prompt(0))
    await read.agrees(sim)
    sim.faults.add("lost_kv_events")
    await complete(sim, prompt(1))
    await complete(sim, prompt(2))
    await until(lambda: read.metric("pdproxy_kv_event_replays_total", result="unavailable") == 1)
    await until(lambda: len(read.known(sim.url)) == 6)
    assert read.known(sim.url) < truth(sim)


async def test_a_request_with_a_full_report_shows_what_was_forgotten(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack), await reader(stack)
    await read.follow(sim)
    await complete(sim, prompt(0))
    await read.agrees(sim)
    read.index.restart(read.sources.places[sim.url, 0])
    await complete(sim, prompt(0), vllm_xargs={"kv_cache_report_mode": "full"})
    await read.agrees(sim)


async def test_a_subscriber_that_is_too_slow_gets_what_it_lost_from_replays(
    stack: AsyncExitStack,
) -> None:
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint="tcp://*:0",
        replay_endpoint="tcp://*:0",
        hwm=1,
        buffer_steps=20_000,
    )
    sim, read = await engine(stack, config), await reader(stack)
    await read.follow(sim)
    publisher = sim.engine.kv_events.ranks[0]
    block = {
        "medium": "GPU",
        "group_idx": 0,
        "parent_block_hash": None,
        "block_size": 1000,
        "type": "BlockStored",
    }
    expected = set(range(3000))
    for number in expected:  # in one turn of the loop, which the subscriber shares
        publisher.publish([{**block, "block_hashes": [number], "token_ids": [500] * 1000}])
    await asyncio.sleep(0)
    publisher.publish(
        [{"type": "BlockRemoved", "block_hashes": [0], "medium": "GPU", "group_idx": 0}]
    )
    async with asyncio.timeout(60):
        while read.known(sim.url) != expected - {0}:
            await asyncio.sleep(0.05)
            publisher.publish(
                [{"type": "BlockRemoved", "block_hashes": [0], "medium": "GPU", "group_idx": 0}]
            )
    assert read.metric("pdproxy_kv_event_messages_total", result="replayed") > 0


async def test_each_rank_has_a_place(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack, data_parallel_size=2), await reader(stack)
    await read.follow(sim, ranks=2)
    await asyncio.gather(*(complete(sim, prompt(number)) for number in range(6)))
    await read.agrees(sim, 0)
    await read.agrees(sim, 1)
    assert sorted(read.sources.places) == [(sim.url, 0), (sim.url, 1)]
    assert truth(sim, 0)
    assert truth(sim, 1)


async def test_engines_that_connect_are_told_apart_by_their_topics(stack: AsyncExitStack) -> None:
    port = free_port()
    read = await reader(
        stack, KvEvents(enabled=True, host="127.0.0.1", port=port), ports=range(port, port + 1)
    )
    sims = []
    for topic in ("a", "ab"):
        config = KvEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"tcp://127.0.0.1:{port}",
            replay_endpoint="tcp://*:0",
            topic=topic,
        )
        sims.append(await engine(stack, config))
    for number, sim in enumerate(sims):
        await complete(sim, prompt(number))
        read.add(sim.url)
        read.up(sim.url)
    for sim in sims:
        await read.agrees(sim)
    for number, sim in enumerate(sims):
        await complete(sim, prompt(number + 5))
    for sim in sims:
        await read.agrees(sim)
    assert read.known(sims[0].url) != read.known(sims[1].url)
    third = await engine(stack, config)
    read.add(third.url)
    read.up(third.url)
    await until(read.sources.shortcomings)
    assert (
        f"{third.url} publishes KV events to port {port} with the topic 'ab'"
        in read.sources.shortcomings()[0]
    )
    assert (third.url, 0) not in read.sources.places
    read.engines.remove(sims[0].url)
    await complete(sims[0], prompt(20))
    await complete(sims[1], prompt(21))
    await read.agrees(sims[1])


async def test_an_engine_that_publishes_no_more_has_no_places(stack: AsyncExitStack) -> None:
    """It was started again without the option: what is known of its cache otherwise counts then."""
    sim, read = await engine(stack, data_parallel_size=2), await reader(stack)
    assert not read.sources.connected(sim.url)
    await read.follow(sim, 2)
    assert read.sources.connected(sim.url)
    assert len(read.sources.places) == 2
    read.down(sim.url)
    sim.faults.add("status@queued:path=/kv_event_sources,status=404,rate=1")
    read.up(sim.url)
    await until(read.sources.shortcomings)
    assert (dict(read.sources.places), read.index.blocks) == ({}, {})
    assert not read.sources.connected(sim.url)
    read.engines.remove(sim.url)
    assert not read.sources.connected(sim.url)


async def test_an_engine_that_publishes_nothing_is_named(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack, None), await reader(stack)
    read.add(sim.url)
    assert read.sources.shortcomings() == []
    read.up(sim.url)
    await until(read.sources.shortcomings)
    assert read.sources.shortcomings() == [
        f"{sim.url} publishes no KV events: start it with --kv-events-config"
    ]


async def test_an_engine_without_the_route_is_named(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack), await reader(stack)
    sim.faults.add("status@queued:path=/kv_event_sources,status=404,rate=1")
    read.add(sim.url)
    read.up(sim.url)
    await until(read.sources.shortcomings)
    assert "publishes no KV events" in read.sources.shortcomings()[0]


async def test_an_engine_that_can_not_answer_is_asked_again(stack: AsyncExitStack) -> None:
    clock = ManualClock()
    sim, read = await engine(stack), await reader(stack, ON, clock=clock)
    sim.faults.add("garbage@queued:path=/kv_event_sources,what=json")
    read.add(sim.url)
    read.up(sim.url)
    await until(read.sources.shortcomings)
    assert "can't be asked for its KV events" in read.sources.shortcomings()[0]
    await complete(sim, prompt(0))
    await clock.reach(0.5)
    await read.agrees(sim)
    assert read.sources.shortcomings() == []


async def test_settings_override_what_an_engine_answers(stack: AsyncExitStack) -> None:
    sim = await engine(stack)
    found = sim.engine.kv_events.sources[0]
    sim.faults.add("status@queued:path=/kv_event_sources,status=404,rate=1")
    own = EngineKvEvents(endpoint=found.endpoint, replay_endpoint=found.replay_endpoint, topic="t")
    read = await reader(stack, ON, {sim.url: own})
    await complete(sim, prompt(0))
    await read.follow(sim)
    await read.agrees(sim)


async def test_an_endpoint_that_nobody_has_is_named(stack: AsyncExitStack) -> None:
    sim = await engine(stack)
    read = await reader(stack, KvEvents(enabled=True, endpoint=f"tcp://*:{free_port()}"))
    read.add(sim.url)
    read.up(sim.url)
    await until(read.sources.shortcomings)
    assert "no connection to tcp://127.0.0.1:" in read.sources.shortcomings()[0]
    assert not read.sources.connected(sim.url)
    assert read.metric("pdproxy_kv_event_sources", state="not_connected") == 1


@pytest.mark.parametrize("seed", range(3))
async def test_after_any_faults_what_is_known_is_what_the_engine_has(
    stack: AsyncExitStack, seed: int
) -> None:
    """Losses, restarts, emptied caches, full reports: with the next message that comes, all is
    right again.
    """
    chance = random.Random(seed)
    sim, read = await engine(stack, num_gpu_blocks=40, max_model_len=256), await reader(stack)
    await read.follow(sim)
    for _ in range(60):
        match chance.randrange(12):
            case 0:
                sim.faults.add(f"lost_kv_events:next={chance.randrange(1, 5)}")
            case 1:
                sim.engine.reset_prefix_cache()
            case 2:
                read.down(sim.url)
                await sim.restart()
                read.up(sim.url)
            case 3:
                await complete(
                    sim, prompt(chance.randrange(8)), vllm_xargs={"kv_cache_report_mode": "full"}
                )
            case _:
                length = chance.randrange(20, 200)
                await complete(
                    sim, prompt(chance.randrange(8), length), max_tokens=chance.randrange(1, 30)
                )
    sim.faults.clear()
    await until(lambda: read.connected(sim.url))
    await complete(sim, prompt(99))
    await read.agrees(sim)
    assert read.metric("pdproxy_kv_events_skipped_total") == 0


async def test_a_removed_engine_leaves_nothing(stack: AsyncExitStack) -> None:
    sim, read = await engine(stack), await reader(stack)
    await read.follow(sim)
    await complete(sim, prompt(0))
    await read.agrees(sim)
    read.engines.remove(sim.url)
    read.metrics.drop_node(sim.url)
    assert (read.index.blocks, dict(read.sources.places)) == ({}, {})
    await complete(sim, prompt(1))
    await asyncio.sleep(0.05)
    assert read.index.calls[-1][0] == "remove_place"
    assert read.metric("pdproxy_kv_event_messages_total") == 0
    await read.follow(sim)
    await read.agrees(sim)


async def test_a_proxy_reads_the_events_of_engines_that_it_probes(stack: AsyncExitStack) -> None:
    """Found by a probe, found again after a restart at another address, named in `/ready` and on
    the page of metrics.
    """
    sim, other, index = await engine(stack), await engine(stack, None), PlainIndex()
    engines = tuple(ConfiguredEngine(url=one.url, role="aggregated") for one in (sim, other))
    settings = Settings(
        pools=(Pool(kv_events=ON, nodes=engines),),
        probes=Probes(interval=0.02, scrape_interval=0.02),
    )
    proxy = Proxy.build(settings, index=index)
    assert proxy.kv_events is not None
    proxy.start()
    try:
        sources = proxy.kv_events.sources
        await complete(sim, prompt(0))
        await until(lambda: index.hashes == truth(sim))
        await sim.restart()
        await complete(sim, prompt(1))
        await until(lambda: index.hashes == truth(sim))
        assert len(truth(sim)) == 6
        await until(lambda: sources.shortcomings() == [f"{other.url} {NONE}"])
        assert b'pdproxy_kv_event_sources{state="connected"} 1.0' in proxy.metrics.page()
        proxy.setup.remove(sim.url)
        assert index.hashes == set()
    finally:
        await proxy.stop()
