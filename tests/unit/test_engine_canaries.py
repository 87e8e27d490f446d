"""The scheduler process asks engines for canaries of tokenizers, and every process judges."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.upstream.admin import ModelCard
from pdproxy.wire.route import Route
from pdproxy.workers import engine_canaries, links
from pdproxy.workers.engine_canaries import CanariesForWorkers, CanariesOfWorker
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from tests.fakes.tokenizer import SimTokenizer
from tests.unit.test_canary import D, Engines, P

COUNT = 3


class Judging:
    """A scheduler process, number 0, and workers that judge the same two engines by canaries."""

    def __init__(self) -> None:
        self.links = SchedulerLinks(chooses=True, workers=COUNT - 1)
        self.link = [SchedulerLink() for _ in range(COUNT)]
        self.sharing: list[CanariesForWorkers | CanariesOfWorker] = []
        self.workers = [self._scheduler(), *[self._worker(at) for at in range(1, COUNT)]]
        self.links.start()
        for number in range(1, COUNT):
            self.connect(number)

    def connect(self, number: int) -> None:
        mine, its = links.pair()
        self.links.connect(mine)
        self.link[number].connect(its)

    def _engines(self) -> Engines:
        return Engines(threads=1)

    def _scheduler(self) -> Engines:
        made = self._engines()
        self.sharing[:1] = [CanariesForWorkers(self.links, 0, made.canaries, made.registry)]
        return made

    def _worker(self, number: int) -> Engines:
        made = self._engines()
        shared = CanariesOfWorker(self.link[number], 0, made.canaries, made.registry)
        self.sharing[number : number + 1] = [shared]
        return made

    async def again(self, number: int) -> None:
        """Start a process again, connected as the supervisor does."""
        self.workers[number].threads.shutdown()
        if number == 0:
            self.links.stop()
            await self.pass_on()
            self.links = SchedulerLinks(chooses=True, workers=COUNT - 1)
            self.workers[0] = self._scheduler()
            self.links.start()
            return
        self.link[number].close()
        self.link[number] = SchedulerLink()
        self.workers[number] = self._worker(number)
        self.connect(number)
        await self.pass_on()

    def up(self, url: str, started: float = 1.0) -> None:
        for worker in self.workers:
            worker.up(url, started)

    async def pass_on(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    async def look(self, *numbers: int) -> list[bool]:
        """Have processes look, all in turn by default, and what they tell passed on."""
        done = []
        for number in numbers or range(COUNT):
            done.append(await self.workers[number].canaries.look())
            await self.pass_on()
        return done

    def trusted(self) -> list[bool]:
        return [worker.canaries.trusted("tiny", Route.CHAT) is not None for worker in self.workers]

    def asked(self) -> list[list[str]]:
        return [worker.asked for worker in self.workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.threads.shutdown()
        for link in self.link:
            link.close()
        self.links.stop()


async def test_one_worker_asks_and_all_judge() -> None:
    """Each with its own tokenizer; the log has each verdict once."""
    judging = Judging()
    judging.up(P)
    judging.up(D)
    assert await judging.look() == [True] * COUNT
    assert judging.trusted() == [True] * COUNT
    assert judging.asked() == [[P, D], [], []]
    assert [len(worker.judged()) for worker in judging.workers] == [2, 0, 0]
    assert [worker.roots for worker in judging.workers] == [["/m"]] * COUNT
    judging.up(D, started=2.0)
    assert judging.trusted() == [False] * COUNT, "it may be another one"
    assert await judging.look(1) == [False], "what the run before has said counts no more"
    await judging.look()
    assert judging.trusted() == [True] * COUNT
    assert judging.asked() == [[P, D, D], [], []]
    judging.close()


async def test_a_new_scheduler_process_is_told_what_was_refuted() -> None:
    """It asks engines again. Also a worker that starts behind it trusts no tokenizer that a request
    has refuted.
    """
    judging = Judging()
    judging.up(P)
    await judging.look()
    judging.workers[1].canaries.refuted(P, "tiny", Route.CHAT, "they differ")
    await judging.pass_on()
    await judging.again(0)
    judging.workers[0].up(P)
    judging.connect(1)
    judging.connect(2)
    await judging.pass_on()
    assert judging.trusted() == [False] * COUNT
    await judging.look(0)
    await judging.again(2)
    judging.workers[2].up(P)
    await judging.look()
    assert judging.trusted() == [False] * COUNT
    assert all(worker.canaries.trusted("tiny", Route.COMPLETIONS) for worker in judging.workers)
    assert judging.asked() == [[P], [], []]
    judging.close()


async def test_a_worker_that_starts_later_is_told_all() -> None:
    """Nobody asks an engine again."""
    judging = Judging()
    judging.up(P)
    await judging.look()
    await judging.again(2)
    judging.workers[2].up(P)
    await judging.look(2)
    assert judging.trusted() == [True] * COUNT
    assert judging.asked() == [[P], [], []]
    judging.close()


async def test_an_engine_without_a_start_time_is_judged_anew_in_each_run() -> None:
    """By what it answers then, not by what the run before has answered."""
    judging = Judging()
    judging.up(P, started=0.0)
    await judging.look()
    for worker in judging.workers:
        worker.ledger.mark_down(P, "gone", 1.0)
    judging.up(P, started=0.0)
    assert await judging.look(1) == [False]
    judging.workers[0].makes[P] = SimTokenizer("plain")
    await judging.look()
    assert judging.trusted() == [False] * COUNT
    judging.close()


async def test_adapters_that_are_loaded_later_are_known_to_all() -> None:
    """The judgement of their base model stays."""
    judging = Judging()
    judging.up(P)
    await judging.look()
    for worker in judging.workers:
        worker.cards = [*worker.cards, ModelCard("late", "/l", "tiny")]
    judging.up(P)
    await judging.look(1)
    assert judging.workers[1].canaries.trusted("late", Route.CHAT) is None
    await judging.look()
    assert all(worker.canaries.trusted("late", Route.CHAT) for worker in judging.workers)
    assert judging.asked() == [[P, P], [], []]
    judging.close()


async def test_a_tokenizer_that_one_request_has_refuted_is_trusted_by_none() -> None:
    """Also by a worker that hears of the engine later; the worker that has found it says so."""
    judging = Judging()
    judging.up(P)
    await judging.look(0, 1)
    judging.workers[1].canaries.refuted(P, "tiny", Route.CHAT, "they differ")
    await judging.pass_on()
    await judging.look(2)
    assert judging.trusted() == [False] * COUNT
    assert all(worker.canaries.trusted("tiny", Route.COMPLETIONS) for worker in judging.workers)
    assert [worker.judged()[-1:] == [(P, "tiny", False)] for worker in judging.workers] == [
        False,
        True,
        False,
    ]
    judging.workers[2].canaries.refuted(P, "other", Route.CHAT, "there is no such model")
    await judging.pass_on()
    assert [len(one.known[P].refuted) for one in judging.sharing] == [1] * COUNT
    judging.close()


async def test_a_tokenizer_that_only_one_worker_finds() -> None:
    """The others say why they make no ids."""
    judging = Judging()
    judging.workers[0].finds = {"/m": SimTokenizer()}
    judging.workers[1]._find = lambda root: (_ for _ in ()).throw(MemoryError())  # type: ignore[method-assign]
    judging.workers[2].canaries._find = lambda root: Engines._find(judging.workers[2], "nowhere")
    judging.up(P)
    await judging.look()
    assert judging.trusted() == [True, True, False]
    assert "is not a folder" in judging.workers[2].canaries.shortcomings()[0]
    judging.close()


async def test_answers_that_are_too_long_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers leave such an engine's prompts to it, and say why."""
    monkeypatch.setattr(engine_canaries, "MAX_TOLD", 1000)
    judging = Judging()
    judging.up(P)
    await judging.look()
    assert judging.trusted() == [True, False, False]
    assert "more than 1000 bytes" in judging.workers[1].canaries.shortcomings()[0]
    judging.close()


async def test_an_engine_that_is_too_busy_is_asked_again() -> None:
    judging = Judging()
    judging.workers[0].models_fail = True
    judging.up(P)
    assert await judging.look() == [False] * COUNT
    judging.workers[0].models_fail = False
    await judging.look()
    assert judging.trusted() == [True] * COUNT
    assert judging.asked() == [[P, P], [], []]
    judging.workers[0].registry.remove(P)
    await judging.pass_on()
    assert [one.known for one in judging.sharing] == [{}] * COUNT
    judging.close()
