"""What the proxy knows of engines' prefix caches, before simulated engines: it chooses by it, and what it expects comes true."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdproxy.fleet import kv_source
from pdproxy.scheduling.prefix import healing
from pdproxy.sim.facts import KvEventsConfig
from tests.proxy.kv_events import prompt
from tests.proxy.prefixes import knowing

NO_REPLAYS = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", topic="t")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_source, "COOLDOWN", 0.01)
    monkeypatch.setattr(healing, "GAP", 0.0)


async def test_a_prompt_goes_where_its_beginning_is() -> None:
    async with knowing(3) as known:
        first = {number: await known.ask(prompt(number)) for number in range(6)}
        assert set(first.values()) == {0, 1, 2}
        for number in range(6):
            await known.settled()
            assert await known.ask([*prompt(number), 7, 8, 9]) == first[number]
        assert known.all() == (12, 0, 0)
        tokens = known.world.metric("pdproxy_prefix_tokens_total", what="reported")
        assert tokens == 6 * 96 == known.world.metric("pdproxy_prefix_tokens_total", what="predicted")


async def test_expectations_come_true_while_caches_are_full() -> None:
    """Engines evict all the time: what was just sent to one may be gone as soon."""
    chance = random.Random(5)
    async with knowing(2, num_gpu_blocks=40, max_model_len=256) as known:
        for _ in range(150):
            body = [*prompt(chance.randrange(12)), *chance.choices(range(300, 900), k=chance.randrange(40))]
            await known.ask(body)
        exact, too_high, too_low = known.all()
        assert exact + too_high + too_low == 150
        assert too_high + too_low <= 3, known.all()
        assert known.world.metric("pdproxy_prefix_event_blocks_total", result="removed") > 100


async def test_a_lost_message_heals_without_replay() -> None:
    """The engine has more than is known: the next request with that prompt has it reported, and then all is known."""
    async with knowing(1, NO_REPLAYS, prefixes={"ttl": 0.001}) as known:
        (sim,) = known.sims
        known.sims[0].faults.add("lost_kv_events:next=1")
        await known.ask(prompt(1))
        await known.settled()
        await known.ask(prompt(2))  # shows the gap: all is forgotten
        await known.settled()
        await known.ask(prompt(1))
        assert known.all() == (2, 0, 1)
        await known.settled()
        await known.ask(prompt(1))  # this one asks
        assert known.world.metric("pdproxy_prefix_heals_total", result="asked") == 1
        assert known.all() == (2, 0, 2)
        await known.settled()
        await known.ask(prompt(1))
        assert known.all() == (3, 0, 2)
        assert known.world.metric("pdproxy_prefix_heals_total", result="asked") == 1
        assert [one.url for one in known.world.proxy.engines.values()] == [sim.url]
