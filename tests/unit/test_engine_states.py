"""Engines' states between the scheduler process and workers: what each of them has noted counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.observe.events import LegFailed, Observers
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.outliers import Outliers
from pdproxy.settings.health import OutlierSettings
from pdproxy.workers import links
from pdproxy.workers.engine_states import EngineState
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.state_view import StateView
from pdproxy.workers.state_writer import StateWriter
from tests.fakes.recorder import Recorder
from tests.fakes.registry import registry, unused_client

P, D = "http://p:1", "http://d:1"
EVIDENCE = Evidence(frozenset({"m"}), "1", 16, (), 0, 1.0)


class Process:
    """What both kinds of processes have of a pool with two engines."""

    def __init__(self) -> None:
        self.engines, self.ledger = registry()
        self.recorder = Recorder()
        self.observers = Observers([self.recorder])
        self.auditor = Auditor(self.engines, self.ledger, self.observers)
        self.time = 1.0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    def add(self, *urls: str) -> None:
        for url in urls:
            role = Role.PREFILL if url == P else Role.DECODE
            self.engines.add(EngineSpec(url, role), unused_client(url))

    def down(self) -> dict[str, str | None]:
        return {url: one.in_ledger.down_because for url, one in self.engines.items()}


class Scheduler(Process):
    """A scheduler process."""

    def __init__(self) -> None:
        super().__init__()
        self.links = SchedulerLinks(chooses=True, workers=1)
        self.probed: list[str] = []
        self.outliers = Outliers(OutlierSettings())
        self.writer = StateWriter(
            self.links,
            0,
            self.engines,
            self.ledger,
            self.auditor,
            self.outliers,
            self.observers,
            self.now,
            self._probe,
        )
        self.links.start()

    def _probe(self, engine: Engine) -> None:
        self.probed.append(engine.url)

    def up(self, *urls: str, evidence: Evidence = EVIDENCE) -> None:
        for url in urls:
            self.ledger.mark_up(url, evidence)

    def connect(self, worker: Worker) -> SchedulerClient:
        before = set(self.links.clients)
        mine, its = links.pair()
        self.links.connect(mine)
        worker.link.connect(its)
        (client,) = set(self.links.clients) - before
        return client


class Worker(Process):
    """A worker. `states`: what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.link = SchedulerLink()
        self.view = StateView(
            self.link,
            0,
            self.engines,
            self.ledger,
            self.auditor,
            self.observers,
            self.now,
        )
        self.states: list[EngineState] = []
        follow = self.view._told._take

        def kept(url: str, state: EngineState) -> None:
            self.states.append(state)
            follow(url, state)

        self.view._told._take = kept


async def settled() -> None:
    """Let all that was sent arrive."""
    for _ in range(30):
        await asyncio.sleep(0)


class Stage:
    """A scheduler process and a worker, both with the engines."""

    def __init__(self) -> None:
        self.s, self.w = Scheduler(), Worker()
        self.s.add(P, D)
        self.w.add(P, D)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    made.s.up(P, D)
    made.s.connect(made.w)
    await settled()
    made.w.states.clear()
    yield made
    made.w.link.close()
    made.s.links.stop()


async def test_a_worker_is_told_all_and_then_what_changes_once_per_turn(stage: Stage) -> None:
    s, w = stage.s, stage.w
    assert w.down() == {P: None, D: None}
    for at in range(5):
        s.ledger.mark_down(D, f"gone {at}", float(at))
        s.up(D)
    s.ledger.mark_down(D, "gone", 5.0)
    await settled()
    assert w.down() == {P: None, D: "gone"}
    assert [one.url for one in w.states] == [D]
    assert w.engines[D].in_ledger.down_since == 5.0


async def test_what_a_worker_notes_itself_is_not_undone_by_an_older_state(stage: Stage) -> None:
    """The state was on its way. Behind the note, the scheduler process's state counts."""
    s, w = stage.s, stage.w
    s.ledger.mark_asleep(D, "level 1")
    w.ledger.mark_stalled(D, "stands still")
    for _ in range(30):
        await asyncio.sleep(0)
        assert w.engines[D].in_ledger.stalled == "stands still"
    assert s.engines[D].in_ledger.stalled == "stands still"
    assert (w.engines[D].in_ledger.stalled, w.engines[D].in_ledger.asleep) == (
        "stands still",
        "level 1",
    )
    s.ledger.let_in(D, 9.0)
    await settled()
    assert w.engines[D].in_ledger.stalled is None
    w.ledger.mark_down(D, "the scheduler process does not agree", 9.0)
    await settled()
    assert w.down() == {P: None, D: None}


async def test_what_a_worker_says_once_is_not_said_again(stage: Stage) -> None:
    """Its next note of the same engine is about something else."""
    s, w = stage.s, stage.w
    w.ledger.mark_stalled(D, "stands still")
    w.ledger.eject(P, D)
    await settled()
    assert s.engines[P].in_ledger.ejected == {D}
    s.ledger.let_in(D, 9.0)
    w.ledger.lost_model(D, "m")
    await settled()
    assert s.engines[D].in_ledger.stalled is None
    assert w.engines[D].in_ledger.stalled is None


async def test_an_engine_without_a_start_time_that_was_down_for_a_moment(stage: Stage) -> None:
    """Its run is another one, also if a worker never saw it down."""
    s, w = stage.s, stage.w
    bare = replace(EVIDENCE, started=0.0)
    for evidence, is_another in ((bare, True), (EVIDENCE, False)):
        s.up(D, evidence=evidence)
        await settled()
        runs = s.engines[D].in_ledger.run_number, w.engines[D].in_ledger.run_number
        s.ledger.mark_down(D, "gone", s.now())
        s.up(D, evidence=evidence)
        await settled()
        assert (s.engines[D].in_ledger.run_number != runs[0]) is is_another
        assert (w.engines[D].in_ledger.run_number != runs[1]) is is_another
        run = w.engines[D].in_ledger.run_number
        s.ledger.when_noted(D)
        await settled()
        assert w.engines[D].in_ledger.run_number == run


async def test_engines_that_come_and_go(stage: Stage) -> None:
    """A worker adds an engine later than the scheduler process, and removes it later."""
    s, w = stage.s, stage.w
    late = "http://d:2"
    s.add(late)
    s.up(late)
    await settled()
    w.add(late)
    assert not w.engines[late].in_ledger.probed
    await settled()
    assert w.engines[late].in_ledger.up
    s.engines.remove(late)
    await settled()
    assert w.engines[late].in_ledger.up
    assert late not in w.view._told.values
    w.engines.remove(late)
    w.add(late)
    await settled()
    assert not w.engines[late].in_ledger.probed


async def test_whether_a_removed_engine_is_up_ends_legs_in_workers(stage: Stage) -> None:
    """Only the scheduler process asks it, while a worker has a leg there. Then nothing is left."""
    s, w = stage.s, stage.w
    leases = [
        one.ledger._open(one.engines[D].in_ledger, Role.DECODE, 1, _Ask)  # type: ignore[arg-type]
        for one in (s, w)
    ]
    leaving = [one.engines.remove(D) for one in (s, w)]
    lost: list[str] = []
    w.ledger.when_lost(lost.append)
    s.ledger.mark_removed(leaving[0].in_ledger, "gone", 1.0)
    await settled()
    assert leaving[1].in_ledger.down_because == "gone"
    assert lost == [D]
    for one, lease in zip((s, w), leases, strict=True):
        one.ledger.close(lease, Verdict.NEUTRAL, 2.0)
        one.engines.forget_idle()
    s.ledger.when_noted(D)
    await settled()
    assert (list(s.writer._at), list(w.view._told.values)) == ([P], [P])


class _Ask:
    now = 1.0


async def test_a_leg_that_fails_has_its_engine_probed(stage: Stage) -> None:
    """Once a second, however many fail."""
    for _ in range(3):
        stage.w.view.notify(LegFailed("id", D, "decode", "refused", False))
        stage.w.time -= 1.0
    await settled()
    assert stage.s.probed == [D]


# -- a new scheduler process


async def test_a_new_scheduler_process_has_the_newest_state_of_each_engine() -> None:
    """Whichever worker has it, and whatever order they come in; not one that is older than what it
    has found itself.
    """
    old, first, second = Scheduler(), Worker(), Worker()
    for one in (old, first, second):
        one.add(P, D)
    old.up(P, D)
    clients = [old.connect(first), old.connect(second)]
    await settled()
    clients[1].close()
    old.ledger.mark_down(D, "gone", 0.0)
    await settled()
    clients[0].close()
    await settled()
    new = Scheduler()
    new.time = old.time
    new.add(P, D)
    new.ledger.mark_down(P, "found by the new one", 0.0)
    new.connect(first)
    new.connect(second)
    await settled()
    assert new.down() == {P: "found by the new one", D: "gone"}
    assert first.down() == second.down() == new.down()
    for worker in (first, second):
        worker.link.close()
    for one in (old, new):
        one.links.stop()


async def test_what_no_scheduler_process_has_heard_is_said_to_the_next_one(stage: Stage) -> None:
    s, w = stage.s, stage.w
    s.links.stop()
    await settled()
    w.ledger.mark_down(D, "refused", 3.0)
    new = Scheduler()
    new.add(P, D)
    new.connect(w)
    await settled()
    assert new.down() == w.down() == {P: None, D: "refused"}
    new.up(D)
    await settled()
    assert w.down() == {P: None, D: None}
    new.links.stop()


async def test_states_of_engines_that_a_source_finds_later(stage: Stage) -> None:
    """They count for some seconds: later the engine may be another one."""
    stage.s.links.stop()
    await settled()
    new = Scheduler()
    new.writer._topic._early_for = 0.02
    new.connect(stage.w)
    await settled()
    new.add(P)
    await asyncio.sleep(0.05)
    new.add(D)
    await settled()
    assert new.engines[P].in_ledger.up
    assert not new.engines[D].in_ledger.probed
    new.links.stop()


async def test_breakers_and_outliers_go_on(stage: Stage) -> None:
    s, w = stage.s, stage.w
    s.outliers.follow(D, 100.0, 3)
    s.ledger.exclude(D, "too slow", 100.0, 1.0)
    lease = Lease(s.engines[P].in_ledger, Role.PREFILL, 0)
    for _ in range(9):
        s.ledger.failed(lease, 2.0)
    await settled()
    s.links.stop()
    await settled()
    new = Scheduler()
    new.add(P, D)
    new.connect(w)
    await settled()
    assert new.outliers.left_out(D) == (100.0, 3)
    for url in (P, D):
        engines = [one.engines[url].in_ledger for one in (s, w, new)]
        assert len({(one.open_until, one.excluded_because, one.failures) for one in engines}) == 1
        assert engines[0].open_until
    new.links.stop()
