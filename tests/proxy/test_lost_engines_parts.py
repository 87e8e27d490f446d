"""A request of several parts, or with questions of its own, is one request: all engines that it
ends count together.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdproxy.deciding import engines_lost
from pdproxy.observe.events import EngineLost
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.dispatch.resources import LegHeaders
from pdproxy.transfer.parsed_events import DERENDER, RENDER
from tests.fakes.engine import Reply
from tests.fakes.passed import RESPONSES, everyone, fine, responses
from tests.fakes.world import CHAT, COMPLETIONS, TEXT, World, completion, until, world
from tests.proxy.test_continued_parsed import FACTS, body_of
from tests.proxy.test_lost_engines import MARK, UNBROKEN, armed, ask, dead, lost_of, refused, sims

BATCH = "/v1/chat/completions/batch"
KILLS, WRONG = [{"role": "user", "content": MARK}], [{"role": "user", "content": 7}]


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without data are suspects, however long the test takes."""
    monkeypatch.setattr(engines_lost, "SOON", 60.0)


def batch(*chats: object) -> dict[str, Any]:
    return {"model": "tiny", "messages": [*chats], "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize("engines", [2, 3, 5])
async def test_a_batch_that_is_sent_whole_behind_a_refusal(engines: int) -> None:
    """One of its chats ends engines, another one is refused: no engine is new to the whole batch.
    Nor when it comes again.
    """
    async with world(0, 0, aggregated=engines, limits=UNBROKEN, leaves=True) as w:
        for engine in armed(sims(w.aggregated)):
            engine.faults.add(f"kill@queued:rate=1,holds={MARK},path={BATCH}")
        assert refused(await ask(w, batch(KILLS, WRONG), BATCH))
        assert dead(sims(w.aggregated)) == min(engines - 1, 2)
        assert (await ask(w, completion(), address="127.0.0.2")).text == TEXT
        assert refused(await ask(w, batch(KILLS, WRONG), BATCH))
        assert dead(sims(w.aggregated)) == min(engines - 1, 3)
        await until(lambda: w.proxy.retries.running == 0)


async def test_a_part_that_was_ended_may_have_ended_its_engine() -> None:
    """Nobody saw that, since another part was refused before: its engine is asked before the batch
    is sent whole.
    """
    async with world(0, 0, aggregated=2, limits=UNBROKEN, leaves=True) as w:
        whole = everyone(w, BATCH, fine)
        under_way: dict[bool, Reply] = {}
        refuse = asyncio.Event()

        async def held(reply: Reply) -> None:
            kills = MARK.encode() in reply.request.body
            under_way[kills] = reply
            await (asyncio.Event() if kills else refuse).wait()
            await reply.serve()

        async def is_alive(url: str) -> bool:
            return url != under_way[True].engine.url

        for engine in w.aggregated:
            engine.default = held
        lost_of(w)._detector._is_alive = is_alive
        asked = asyncio.ensure_future(ask(w, batch(KILLS, WRONG), BATCH))
        await until(lambda: len(under_way) == 2)
        assert under_way[True].engine is not under_way[False].engine
        refuse.set()
        assert refused(await asked)
        assert not whole
        assert [event.losses for event in w.events(EngineLost)] == [1]


async def test_a_part_that_is_ended_as_its_engine_is_found_lost() -> None:
    """The loss counts for the part's own fingerprint: when it comes again, it is known as what it
    is.
    """
    async with world(0, 0, aggregated=2, leaves=True) as w:
        lost = lost_of(w)

        async def gone(_: str) -> bool:
            return False

        lost._detector._is_alive = gone
        lease = w.proxy.ledger.assign_alone(Ask("tiny", 1, lost._now()))
        assert lease is not None
        headers = LegHeaders("x", COMPLETIONS, (), (), client="a")
        lost.broke(headers, lease.engine, lost._now(), streamed=False)
        await lost._detector.find_out(lost._of(headers).broken[0].loss).wait()
        assert not lost.known.remembers
        lost.left(headers, [lease], b"1")
        assert [event.losses for event in w.events(EngineLost)] == [1]
        assert await lost.judge(headers, None) is None
        assert len(w.events(EngineLost)) == 1
        resources_of(w).close(lease, Verdict.NEUTRAL)


def resources_of(w: World) -> Any:
    return w.proxy.pools[0].resources


async def test_a_request_that_gets_no_other_engine_gives_its_place_back() -> None:
    """The place among those that are tried again."""
    async with world(0, 0, aggregated=2, limits=UNBROKEN, leaves=True) as w:
        armed(sims(w.aggregated))
        assert refused(await ask(w, responses(input=MARK), RESPONSES))
        await until(lambda: w.proxy.retries.running == 0)


@pytest.mark.parametrize("path", [RENDER, DERENDER])
async def test_questions_behind_a_stream_count(path: str) -> None:
    """A chat ends engines in its stream, and on the routes that engines are asked on to go on with
    the stream.
    """
    async with world(
        0, 0, aggregated=5, limits=UNBROKEN, facts=FACTS["reasoning"], leaves=True
    ) as w:
        for engine in sims(w.aggregated):
            engine.faults.add("kill@mid_stream:rate=1,events=6")
            engine.faults.add(f"kill@queued:rate=1,path={path}")
        assert b"error" in (await ask(w, body_of("reasoning"), CHAT)).body
        assert dead(sims(w.aggregated)) == 2 == len(w.events(EngineLost))


@pytest.mark.parametrize("engines", [2, 3, 5])
@pytest.mark.parametrize("path", [RENDER, DERENDER])
async def test_questions_alone_take_no_last_engine(path: str, engines: int) -> None:
    """The stream's connection has only broken; the question ends engines."""
    async with world(
        0, 0, aggregated=engines, limits=UNBROKEN, facts=FACTS["reasoning"], leaves=True
    ) as w:
        for engine in sims(w.aggregated):
            engine.faults.add("reset@mid_stream:events=6")
            engine.faults.add(f"kill@queued:rate=1,path={path}")
        assert b"error" in (await ask(w, body_of("reasoning"), CHAT)).body
        assert dead(sims(w.aggregated)) == min(engines - 1, 2)
