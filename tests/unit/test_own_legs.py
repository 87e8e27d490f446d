"""What workers' legs show, ask and are told, by messages: also where processes end, and behind
their ends.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from pdproxy.fleet.open_legs import OpenLeg, OpenLegs
from pdproxy.kit.errors import EngineError, EngineTimeoutError, StandstillError, Wait
from pdproxy.scheduling.pace import LARGE
from pdproxy.workers import own_legs
from tests.proxy.test_workers_legs import Leg, Push
from tests.unit.test_worker_audit import D, Schedules, Worker


async def settled() -> None:
    """Let all that was sent arrive."""
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.fixture
async def both():
    made = Schedules()
    await settled()
    yield made
    made.close()


def added(worker: Worker, **shown: Any) -> Leg:
    """A leg of a worker."""
    leg = Leg(time.monotonic(), **shown)
    worker.engine.open_legs.add(leg)
    return leg


def open_legs(process: Schedules) -> OpenLegs:
    return process.engine.open_legs


def in_order(process: Schedules) -> list[OpenLeg]:
    return sorted(open_legs(process).legs, key=lambda leg: leg.since)


async def test_open_legs_are_those_of_all_workers(both: Schedules) -> None:
    """And stay the same ones from look to look."""
    first, second = both.workers
    legs = [added(first, prompt_bytes=7), added(second, waits_for="http://p", stalled_before=1)]
    legs[1].must_progress = False
    await both.legs.hear()
    seen = in_order(both)
    assert [leg.since for leg in seen] == [leg.since for leg in legs]
    assert [leg.prompt_bytes for leg in seen] == [7, 0]
    assert [leg.waits_for for leg in seen] == [None, "http://p"]
    assert [leg.stalled_before for leg in seen] == [0, 1]
    assert [leg.must_progress for leg in seen] == [True, False]
    assert open_legs(both).busy_since == legs[0].since
    legs[0].sign = 5.0
    await both.legs.hear()
    assert in_order(both) == seen
    assert seen[0].last_sign() == 5.0
    first.engine.open_legs.remove(legs[0], ended_well=legs[0].since + 1)
    await both.legs.hear()
    assert list(open_legs(both).legs) == seen[1:]
    assert open_legs(both).last_sign == legs[0].since + 1
    second.links.stop()
    await settled()
    assert open_legs(both).legs == {}


async def test_how_long_an_engine_was_busy_is_known_through_changing_legs(both: Schedules) -> None:
    worker = both.workers[0]
    old = added(worker)
    await both.legs.hear()
    new = added(worker)
    worker.engine.open_legs.remove(old)
    await both.legs.hear()
    assert open_legs(both).busy_since == old.since
    worker.engine.open_legs.remove(new)
    later = added(worker)
    await both.legs.hear()
    assert open_legs(both).busy_since == later.since


async def test_the_pace_of_large_prefills_is_learned(both: Schedules) -> None:
    leg = added(both.workers[0], prompt_bytes=LARGE)
    both.workers[0].engine.open_legs.remove(leg, ended_well=leg.since + 2)
    assert not open_legs(both).pace.knows_large
    await both.legs.hear()
    assert open_legs(both).pace.allowed(1.0, 100.0, LARGE, leg.since) == pytest.approx(8.0)


@pytest.mark.parametrize(
    "error",
    [
        StandstillError("stands still", may_be_cause=True),
        StandstillError("stands still", may_be_cause=False),
        EngineTimeoutError("leaves", wait=Wait.ENGINE_DRAIN),
        EngineError("is gone"),
    ],
)
async def test_a_leg_is_ended_with_the_same_error(both: Schedules, error: EngineError) -> None:
    leg, other = added(both.workers[0]), added(both.workers[1])
    await both.legs.hear()
    in_order(both)[0].fail(error)
    await settled()
    (told,) = leg.failed
    assert (type(told), told.message) == (type(error), error.message)
    assert {**vars(told)} == {**vars(error)}
    assert other.failed == []


async def test_what_is_over_is_not_ended(both: Schedules) -> None:
    """Nor what came in its place."""
    worker = both.workers[0]
    leg = added(worker)
    await both.legs.hear()
    (seen,) = open_legs(both).legs
    worker.engine.open_legs.remove(leg)
    leg.since += 1
    worker.engine.open_legs.add(leg)
    seen.fail(EngineError("is gone"))
    seen.source_lost("is gone")
    worker.engines.known.pop(D)
    seen.fail(EngineError("is gone"))
    await settled()
    assert (leg.failed, leg.lost) == ([], [])


async def _works(url: str, wait: str) -> bool:
    return (url, wait) == (D, "first_token")


async def _never(*_: object) -> bool:
    return False


async def test_a_question_is_answered(both: Schedules) -> None:
    async def is_lost(push: Any) -> bool:
        return push.since == lost.since

    both.legs.answer(_works, is_lost)
    worker = both.workers[0]
    pushes = [Push("http://p", D, float(at), promised=at == 1) for at in range(3)]
    lost = pushes[2]
    worker.legs.awaiting = lambda: pushes  # type: ignore[assignment, return-value]
    added(worker)
    assert await worker.legs.works(D, "first_token")
    assert not await worker.legs.works(D, "prefill")
    found: list[Any] = [*pushes]
    assert [await worker.legs.is_push_lost(one) for one in found] == [False, False, True]
    assert [(one.since, one.promised) for one in both.legs.pushes()] == [
        (0.0, False), (1.0, True), (2.0, False)
    ]  # fmt: skip
    both.legs.pushes()[2].push_lost()
    await settled()
    assert [one.is_lost for one in pushes] == [False, False, True]
    pushes.clear()
    assert not await worker.legs.is_push_lost(found[2]), "it is over"
    assert both.legs.pushes() == []


async def test_a_question_is_asked_the_next_scheduler_process_again(both: Schedules) -> None:
    """Also what legs show is told anew."""
    worker = both.workers[0]
    added(worker)
    await both.legs.hear()
    both.links.stop()
    await settled()
    asked = asyncio.ensure_future(worker.legs.works(D, "first_token"))
    await settled()
    again = Schedules(0)
    again.legs.answer(_works, _never)
    again.connect(worker)
    assert await asked
    await again.legs.hear()
    assert len(open_legs(again).legs) == 1
    again.close()


async def test_without_an_answer_a_leg_may_not_go_on_waiting(
    both: Schedules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_legs, "ANSWERED", 0.01)
    never = asyncio.get_running_loop().create_future()

    async def works(*_: object) -> bool:
        return bool(await never)

    both.legs.answer(works, works)
    worker = both.workers[0]
    assert not await worker.legs.works(D, "first_token")
    await settled()
    assert never.cancelled(), "what nobody waits for is not worked on"
    assert worker.links.link._open == {}


async def test_many_questions_are_worked_on_a_few_at_a_time(both: Schedules) -> None:
    running = most = 0

    async def works(*_: object) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return True

    both.legs.answer(works, works)
    asked = [both.workers[0].legs.works(D, "first_token") for _ in range(200)]
    assert await asyncio.gather(*asked) == 200 * [True]
    assert most == 64


async def test_those_who_wait_together_are_told_by_one_question(both: Schedules) -> None:
    """And who comes behind a question waits for the next one."""
    told = [asyncio.ensure_future(both.legs.hear()) for _ in range(50)]
    await asyncio.sleep(0)
    later = [asyncio.ensure_future(both.legs.hear()) for _ in range(50)]
    told[0].cancel()
    assert all(await asyncio.gather(*told[1:], *later))
    assert both.legs._number == 2
