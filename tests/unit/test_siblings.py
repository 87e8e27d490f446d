"""Questions of one worker to the others: answered, late, shared, and what a dead one leaves
behind.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.fleet.gauges import NODE_INFLIGHT, NODE_STATE, NODE_UP
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.page import AT_ONCE
from pdproxy.observe.requests import REQUESTS
from pdproxy.observe.snapshot import Merging, Snapshot, decode
from pdproxy.web.operation import EngineWork, OperationState, Readiness
from pdproxy.workers import shown_of_all, siblings, switchboard
from pdproxy.workers.links import Message
from pdproxy.workers.shown_of_all import ShownOfAll, add_up, of_scheduler, together
from pdproxy.workers.siblings import LinkedSiblings
from pdproxy.workers.supervisor import WorkerProcess
from pdproxy.workers.switchboard import REPORT, Switchboard
from tests.fakes.world import until


class Parent:
    """A supervisor without processes: messages pass at once."""

    def __init__(self, count: int, scheduler: int | None = None) -> None:
        self.restarts, self.restarts_for_all = 4, 2
        self.workers = [
            WorkerProcess(number, pid=100 + number, ready=True) for number in range(count)
        ]
        self.switchboard = Switchboard(self, lambda past, report, _: past + report)  # type: ignore[arg-type]
        self.all = [
            LinkedSiblings(lambda message, number=number: self.sent(number, message), scheduler)  # type: ignore[misc]
            for number in range(count)
        ]
        self.silent: set[int] = set()

    def sent(self, number: int, message: Message) -> None:
        self.switchboard.received(self.workers[number], message)

    def send(self, worker: WorkerProcess, message: Message) -> None:
        if worker.number not in self.silent:
            asyncio.get_running_loop().call_soon(self.all[worker.number].received, message)


async def test_all_others_are_asked_at_once() -> None:
    """Also by several callers: the question is sent once."""
    parent, asked = Parent(3), []
    for number, one in enumerate(parent.all):
        one.answers["name"] = lambda number=number: (
            asked.append(number),  # type: ignore[misc,func-returns-value]
            f"I am {number}".encode(),
        )[1]
    first, second = await asyncio.gather(parent.all[1].ask("name"), parent.all[1].ask("name"))
    assert first is second
    assert first.of == {0: b"I am 0", 2: b"I am 2"}
    assert (first.silent, first.past) == ([], b"")
    assert (first.restarts, first.scheduler_restarts) == (4, 2)
    assert sorted(asked) == [0, 2]
    await parent.all[1].ask("name")
    assert sorted(asked) == [0, 0, 2, 2]


async def test_one_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time; one that is being started is not asked."""
    monkeypatch.setattr(siblings, "PATIENCE", 0.05)
    parent = Parent(4)
    for one in parent.all:
        one.answers["name"] = lambda: b"x"
    parent.silent.add(2)
    parent.workers[3].ready = False
    found = await parent.all[0].ask("name")
    assert (found.of, found.silent) == ({1: b"x"}, [2])
    assert not parent.all[0]._open


async def test_a_question_may_say_what_it_is_about() -> None:
    parent = Parent(2)
    parent.all[1].answers_about["name"] = lambda about: f"of {about}".encode()
    parent.all[1].answers["name of all"] = lambda: b"whole"
    asked = [await parent.all[0].ask(question) for question in ("name a b", "name", "name of all")]
    assert [one.of for one in asked] == [{1: b"of a b"}, {1: b"of "}, {1: b"whole"}]


async def test_a_question_that_nobody_knows_is_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(siblings, "PATIENCE", 0.05)
    parent = Parent(2)
    assert (await parent.all[0].ask("what")).silent == [1]


async def test_answers_go_to_who_has_asked() -> None:
    """Not to a process that was started in its place; and open questions are bounded."""
    parent = Parent(2)

    def answer() -> bytes:
        parent.workers[0].pid = 7
        return b"x"

    parent.all[1].answers["name"] = answer
    asking = asyncio.create_task(parent.all[0].ask("name"))
    await asyncio.sleep(0.05)
    assert not asking.done()
    asking.cancel()
    for number in range(2 * switchboard.MAX_OPEN):
        parent.sent(0, Message(switchboard.ASK, number, body=b"name"))
    assert len(parent.switchboard._questions) == switchboard.MAX_OPEN
    parent.sent(0, Message(switchboard.REPLY, 999_999, body=b"?"))


async def test_the_last_report_of_a_dead_worker_stays() -> None:
    parent = Parent(2)
    parent.all[1].answers["name"] = lambda: b"x"
    for body in (b"old", b"a"):
        parent.sent(1, Message(REPORT, body=body))
    parent.switchboard.died(1)
    assert (await parent.all[0].ask("name")).past == b"a"
    parent.switchboard.died(1)
    parent.sent(1, Message(REPORT, body=b"b"))
    parent.switchboard.died(1)
    assert (await parent.all[0].ask("name")).past == b"ab"


async def test_what_is_left_comes_before_the_question_is_over() -> None:
    """However long the parent pauses between two messages: a worker without others waits for
    nobody.
    """
    parent, messages = Parent(2), list[Message]()
    parent.send = lambda worker, message: messages.append(message)  # type: ignore[method-assign]
    parent.sent(1, Message(REPORT, body=b"a"))
    parent.switchboard.died(1)
    parent.workers[1].ready = False
    asking = asyncio.create_task(parent.all[0].ask("name"))
    await until(lambda: messages)
    for message in messages:
        await until(lambda: parent.all[0]._open, 1)
        parent.all[0].received(message)
        for _ in range(5):
            await asyncio.sleep(0)
    assert (await asking).past == b"a"


async def test_one_that_ends_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it: its last report comes in place of its answer, and is in what is left for
    the next question only.
    """
    monkeypatch.setattr(siblings, "PATIENCE", 30.0)
    parent = Parent(3)
    parent.all[1].answers["name"] = lambda: b"x"
    parent.sent(2, Message(REPORT, body=b"r"))
    parent.silent.add(2)
    asking = asyncio.create_task(parent.all[0].ask("name"))
    await until(lambda: parent.all[0]._open and next(iter(parent.all[0]._open.values())).found.of)
    parent.switchboard.died(2)
    found = await asking
    assert (found.of, found.silent, found.last, found.past) == ({1: b"x"}, [2], {2: b"r"}, b"")
    parent.workers[2].ready = False
    found = await parent.all[0].ask("name")
    assert (found.of, found.silent, found.last, found.past) == ({1: b"x"}, [], {}, b"r")
    assert not parent.switchboard._questions


async def test_one_that_stands_still_has_its_last_report_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer behind that is not passed on; one that has never reported has none."""
    monkeypatch.setattr(siblings, "PATIENCE", 0.05)
    parent = Parent(3)
    parent.silent |= {1, 2}
    parent.sent(2, Message(REPORT, body=b"r"))
    found = await parent.all[0].ask("name")
    assert (found.of, found.silent, found.last, found.complete) == (
        {},
        [1, 2],
        {1: b"", 2: b"r"},
        True,
    )
    parent.sent(1, Message(switchboard.REPLY, 1, body=b"late"))
    assert not parent.switchboard._questions


async def test_a_parent_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "PATIENCE", 0.05)
    parent = Parent(2)
    parent.silent.add(0)  # to whom it sends nothing
    assert not (await parent.all[0].ask("name")).complete


def _counted(parent: Parent, number: int, count: list[float]) -> ShownOfAll:
    """What a worker shows that has counted so much."""
    metrics = Metrics()
    metrics.show(REQUESTS, lambda: [(("a", "b", "c"), count[number])])
    return ShownOfAll(
        None,  # type: ignore[arg-type]
        lambda: _ready(OperationState.OK),
        metrics,
        lambda _: EngineWork(),
        parent.all[number],
        number,
    )


@pytest.mark.parametrize("seed", range(6))
async def test_no_page_shows_less_than_one_before(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever ends or stands still at whatever moment: a counter that decreases looks like one
    that began anew.
    """
    monkeypatch.setattr(siblings, "PATIENCE", 0.01)
    chance, parent, count = random.Random(seed), Parent(3), [0.0] * 3
    parent.switchboard._add_up = add_up
    shown = [_counted(parent, number, count) for number in range(3)]
    pages: list[float] = []
    for _ in range(60):
        count[chance.randrange(3)] += chance.randrange(1, 9)
        asked = chance.choice([number for number in range(3) if number not in parent.silent])
        page = asyncio.create_task(shown[asked].metrics())
        match chance.randrange(6):
            case 0:
                shown[chance.randrange(3)].report()
            case 1 if len(parent.silent) < 2:
                parent.silent.add(chance.choice([number for number in range(3) if number != asked]))
            case 2:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                dead = chance.choice([number for number in range(3) if number != asked])
                parent.switchboard.died(dead)
                parent.all[dead] = LinkedSiblings(
                    lambda message, number=dead: parent.sent(number, message)  # type: ignore[misc]
                )
                parent.workers[dead].pid, count[dead] = chance.randrange(2**31), 0.0
                parent.silent.discard(dead)
                shown[dead] = _counted(parent, dead, count)
        found = re.search(rb"pdproxy_requests_total\{.*\} (.*)", await page)
        assert found is not None
        pages.append(float(found[1]))
    assert pages == sorted(pages)
    assert pages[-1] > 0


async def test_a_page_of_several_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gauges of many engines are read in portions, and no report reads them; each answer is read
    and added in turns of its own, and the page is written in portions.
    """
    parent, turn, worked = Parent(4), [0], dict[str, list[int]]()

    async def count() -> None:
        while True:
            turn[0] += 1
            await asyncio.sleep(0)

    def counted(name: str) -> Callable[[Any], Any]:
        def work(given: Any) -> Any:
            worked.setdefault(name, []).append(turn[0])
            return given

        return work

    shown = [_counted(parent, number, [0.0] * 4) for number in range(4)]
    read = counted("gauges")
    many = [((str(number), *"abcd"), 1.0) for number in range(AT_ONCE)]
    gauges = NODE_STATE, NODE_UP, NODE_INFLIGHT
    for gauge in gauges:
        shown[1]._own_metrics.show(gauge, lambda: read(many))
    shown[1].report()
    assert not worked
    decoded, added = counted("decoded"), counted("added")
    monkeypatch.setattr(shown_of_all, "decode", lambda data: decoded(decode(data)))
    add, counts = Merging.add, Metrics.counts
    listed, taken = counted("process"), counted("counts")
    monkeypatch.setattr(shown_of_all, "of_process", lambda: listed([]))
    monkeypatch.setattr(Metrics, "counts", lambda metrics: taken(counts(metrics)))
    monkeypatch.setattr(Merging, "add", lambda found, one: add(found, added(one)))
    counting = asyncio.create_task(count())
    await shown[0].metrics()
    counting.cancel()
    assert not {*worked["process"]} & {*worked["counts"]}
    assert len(set(worked["gauges"])) == len(gauges)
    assert len({*worked["decoded"], *worked["added"]}) == 3 + 4
    assert turn[0] >= worked["added"][-1] + len(gauges), "the page was written at once"


def _ready(state: OperationState, *details: str) -> Readiness:
    return Readiness(
        state, "no engine" if state is OperationState.NOT_READY else None, list(details)
    )


async def test_workers_that_do_not_serve_are_named() -> None:
    """Those that have ended, or begin: clients' connections come to the others, which are fewer."""
    parent = Parent(3)
    shown = [_counted(parent, number, [0.0] * 3) for number in range(3)]
    assert await shown[0].readiness() == _ready(OperationState.OK)
    parent.workers[2].ready = False
    found = await shown[0].readiness()
    assert found == Readiness(
        OperationState.DEGRADED, None, ["worker 2 does not serve: it has ended, or begins"]
    )


async def test_the_scheduler_is_no_worker() -> None:
    """It can't make the whole not ready, and its numbers are no part of the workers' mean; but it
    is named where something is wrong with it. Who lists what workers have leaves it out.
    """
    parent = Parent(3, scheduler=2)
    shown = [_counted(parent, number, [float(number + 1)] * 3) for number in range(3)]
    page = (await shown[0].metrics()).decode()
    assert "pdproxy_scheduler 1.0" in page
    assert "pdproxy_scheduler_restarts_total 2.0" in page
    for one in parent.all:
        one.answers["name"] = lambda: b"here"
    assert (await parent.all[0].ask_workers("name")).of == {1: b"here"}
    assert (await parent.all[0].ask("name")).of == {1: b"here", 2: b"here"}
    parent.workers[2].ready = False
    assert "pdproxy_scheduler 0.0" in (await shown[0].metrics()).decode()
    assert (await shown[0].readiness()).details == [
        "the scheduler does not serve: it has ended, or begins"
    ]
    no, yes = OperationState.NOT_READY, OperationState.OK
    found = together({0: _ready(no, "a"), 1: _ready(no, "a"), 2: _ready(yes)}, (), 2)
    assert found == Readiness(no, "no engine", ["a"])
    found = together({0: _ready(yes, "b"), 1: _ready(yes, "b"), 2: _ready(no, "c")}, (), 2)
    assert found == Readiness(OperationState.DEGRADED, None, ["the scheduler: no engine", "b", "c"])


def test_what_the_scheduler_shows_is_no_part_of_the_workers() -> None:
    """Its counts are: probes are its own, and so is the placement."""
    names = "pdproxy_workers", "pdproxy_node_up", "pdproxy_state"
    kept: dict[str, dict[tuple[str, ...], float]] = {
        name: {(): 1.0}
        for name in (
            "pdproxy_worker_restarts_total",
            "pdproxy_prediction_error_ratio",
            "pdproxy_time_correction_ratio",
            "pdproxy_engines_kept_for_prefill",
        )
    }
    shown: dict[str, dict[tuple[str, ...], float]] = {name: {(): 1.0} for name in names}
    own = of_scheduler(Snapshot(shown | kept, {}))
    assert own.values == {**kept, "pdproxy_scheduler": {(): 1}}
    assert own.workers == 0


def test_seconds_that_pass_between_answers_make_no_second_detail() -> None:
    """The breaker of an engine is the same one at all workers."""
    last = "decode http://d:1: failed 3 times in a row, its breaker is open for"
    open_, ok = f"{last} 9.8 s", OperationState.OK
    found = together({0: _ready(ok, f"{last} 10.0 s"), 1: _ready(ok, f"{last} 9.9 s")}, (), 2)
    assert found.details == [f"{last} 10.0 s"]
    told = {0: _ready(ok), 1: _ready(ok, f"{last} 9.9 s", "a 1.2 s"), 2: _ready(ok, open_)}
    assert together(told, (), 2).details == [f"worker 1: {last} 9.9 s", "worker 1: a 1.2 s", open_]
    other = f"{last.replace('3', '4')} 9.9 s"
    found = together({0: _ready(ok, open_), 1: _ready(ok, other)})
    assert found.details == [f"worker 0: {open_}", f"worker 1: {other}"]


def test_all_are_ready_together() -> None:
    """What all say is said once; what one says alone has its number."""
    found = together({0: _ready(OperationState.OK, "a", "b"), 1: _ready(OperationState.OK, "b")})
    assert found == Readiness(OperationState.OK, None, ["worker 0: a", "b"])
    found = together({0: _ready(OperationState.OK), 1: _ready(OperationState.NOT_READY, "a")})
    assert found == Readiness(OperationState.DEGRADED, None, ["worker 1: no engine", "worker 1: a"])
    found = together(
        {0: _ready(OperationState.NOT_READY, "a"), 1: _ready(OperationState.NOT_READY, "a")}
    )
    assert found == Readiness(OperationState.NOT_READY, "no engine", ["a"])
    found = together(
        {0: _ready(OperationState.OK), 1: _ready(OperationState.DEGRADED)},
        ["worker 2 does not answer"],
    )
    assert found == Readiness(OperationState.DEGRADED, None, ["worker 2 does not answer"])
    assert (
        together({0: _ready(OperationState.OK)}, ["worker 1 does not answer"]).state
        is OperationState.DEGRADED
    )
