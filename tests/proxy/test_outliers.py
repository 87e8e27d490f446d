"""An engine that fails every second request, or is slow, is excluded; one request lets it in
again.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdproxy.observe.events import NodeChanged
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.settings.health import OutlierSettings
from pdproxy.settings.pools import PoolPolicy, PoolSlo
from pdproxy.settings.schema import Settings
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, world

LIMITS = {"breaker_failures": 1000}
ROUNDS = 30
OUTLIERS = OutlierSettings(min_requests=6, exclude_for=30.0)


def adjusted(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, outliers=OUTLIERS)


def states(w: World) -> list[str]:
    now = w.proxy.ledger
    return [engine.state(w.proxy.stalls._clock.now()) for engine in now.engines]


async def slowly(reply: Reply) -> None:
    """A stream with a pause before each event."""
    event = (
        b'data: {"id":"x","object":"text_completion","created":1,"model":"tiny","choices":'
        b'[{"index":0,"text":"a",'
    )
    event += b'"logprobs":null,"finish_reason":%b}]}\n\n'
    await reply.start()
    for _ in range(10):
        await reply.piece(event % b"null")
        await asyncio.sleep(0.1)
    await reply.piece(event % b'"length"' + b"data: [DONE]\n\n")
    await reply.finish()


async def fails(reply: Reply) -> None:
    """An error of the engine."""
    await reply.whole(b"{}", 500)


async def test_an_engine_that_fails_half_of_its_requests_is_excluded_and_let_in_again() -> None:
    """No breaker sees it. All requests are served meanwhile."""
    clock = ManualClock()
    count = 0

    async def fails_every_second(reply: Reply) -> None:
        nonlocal count
        count += 1
        if count % 2:
            await reply.whole(b"{}", 500)
        else:
            await reply.serve()

    async with world(0, 2, limits=LIMITS, clock=clock, adjust=adjusted) as w:
        bad, good = w.decode
        bad.default = fails_every_second
        while count < 10:
            answer = await w.ask(COMPLETIONS, completion())
            assert (answer.status, answer.text) == (200, TEXT)
        await w.proxy.exclusions.compare()
        assert states(w) == ["excluded", "up"]
        assert w.metric("pdproxy_exclusions_total", node=bad.url, reason="errors") == 1
        assert [event.node for event in w.events(NodeChanged) if not event.up] == [bad.url]
        assert (
            "% of its requests failed: it is excluded for 30.0 s"
            in (await w.get("/ready")).body.decode()
        )
        before = count
        for _ in range(6):
            assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert count == before
        bad.default = good.default
        await clock.advance(30)
        assert states(w) == ["half_open", "up"]
        for _ in range(4):
            assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert states(w) == ["slow_start", "up"]


async def test_an_engine_that_is_slower_than_its_peers_is_excluded() -> None:
    """By the time between the events of its streams."""
    async with world(0, 3, limits=LIMITS, adjust=adjusted) as w:
        w.decode[0].default = slowly
        body = completion(stream=True, max_tokens=12)
        answers = await asyncio.gather(*(w.ask(COMPLETIONS, body) for _ in range(24)))
        assert {answer.status for answer in answers} == {200}
        await w.proxy.exclusions.compare()
        assert states(w) == ["excluded", "up", "up"]
        assert w.metric("pdproxy_exclusions_total", node=w.decode[0].url, reason="latency") == 1


async def test_an_engine_that_is_removed_while_it_is_compared() -> None:
    async with world(0, 3, limits=LIMITS, adjust=adjusted) as w:
        url = w.decode[0].url
        for _ in range(40):
            w.proxy.exclusions._outliers.ended(url, Role.DECODE, w.proxy.now(), failed=True)
        comparing = asyncio.create_task(w.proxy.exclusions.compare())
        await asyncio.sleep(0)
        assert not comparing.done()
        w.proxy.engines.remove(url)
        await comparing
        assert w.proxy.exclusions._outliers.left_out(url) is None


@pytest.mark.parametrize("role", list(Role))
def test_speeds_are_compared_only_without_a_placement(role: Role) -> None:
    """For a stream of 11 events in a second, and for a prompt of 10 bytes that took one."""
    lease: Any = SimpleNamespace(role=role, prompt_bytes=10, since=99.0)
    relay: Any = SimpleNamespace(fast_path=SimpleNamespace(events=11, total=1.0))
    for has_placement, pace in ((False, 0.1), (True, None)):
        resources: Any = SimpleNamespace(
            states=SimpleNamespace(has_placement=has_placement, needs_details=False)
        )
        assert ExchangeResources._pace(resources, lease, relay, 100.0) == pace


async def test_an_engine_that_a_placement_loads_more_is_not_compared_by_its_speed() -> None:
    """One that is kept for prefill, and is sent what will be late anyway, is slow without a fault.
    Its failures count as ever.
    """

    def placed(settings: Settings) -> Settings:
        chosen = msgspec.structs.replace(
            settings.pool,
            policy=PoolPolicy(placement="auto"),
            profile="h200-8b",
            slo=PoolSlo(ttft=0.5, tpot=0.015),
        )
        return msgspec.structs.replace(adjusted(settings), pools=(chosen,))

    async with world(0, 0, anything=3, limits=LIMITS, adjust=placed) as w:
        w.anything[0].default = slowly
        body = completion(stream=True, max_tokens=12)
        for _ in range(3):
            answers = await asyncio.gather(*(w.ask(COMPLETIONS, body) for _ in range(24)))
            assert {answer.status for answer in answers} == {200}
        assert len(w.anything[0].requests) >= OUTLIERS.min_requests
        await w.proxy.exclusions.compare()
        assert states(w) == ["up", "up", "up"]
        w.anything[0].default = fails
        for _ in range(
            ROUNDS
            # until half of all its requests have failed: how many came before depends on the
            # machine
        ):
            answers = await asyncio.gather(*(w.ask(COMPLETIONS, body) for _ in range(24)))
            assert {answer.status for answer in answers} == {200}
            await w.proxy.exclusions.compare()
            if states(w)[0] == "excluded":
                break
        assert states(w) == ["excluded", "up", "up"]
        assert w.metric("pdproxy_exclusions_total", node=w.anything[0].url, reason="errors") == 1
