"""The scheduler process asks bootstrap servers, and what it hears all know."""

from __future__ import annotations

import asyncio

from pdproxy.fleet.bootstrap import MAX_GIVEN_UP, NOT_ASKED
from pdproxy.kit.errors import EngineError, EngineTimeoutError, Wait
from pdproxy.observe.events import HandleEnded
from pdproxy.workers import links
from pdproxy.workers.engine_bootstraps import BootstrapsForWorkers, BootstrapsOfWorker
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from tests.unit.test_bootstrap import Stand, answer, one
from tests.unit.test_canary import D, P

COUNT = 3


class Asking:
    """A scheduler process, number 0, and workers with the same bootstrap server."""

    def __init__(self) -> None:
        self.links = SchedulerLinks(chooses=True, workers=COUNT - 1)
        self.link = [SchedulerLink() for _ in range(COUNT)]
        self.stands = [self._scheduler(), *[self._worker(at) for at in range(1, COUNT)]]
        self.links.start()

    def connect(self, *numbers: int) -> None:
        """Connect workers, all by default."""
        for number in numbers or range(1, COUNT):
            mine, its = links.pair()
            self.links.connect(mine)
            self.link[number].connect(its)

    def _scheduler(self) -> Stand:
        stand = Stand()
        BootstrapsForWorkers(self.links, 0, stand.bootstraps, stand.engines)
        return stand

    def _worker(self, number: int) -> Stand:
        def share(stand: Stand) -> None:
            BootstrapsOfWorker(self.link[number], 0, stand.bootstraps, stand.engines)

        return Stand(share=share)

    async def start_again(self) -> None:
        """Have another scheduler process in place of a dead one. Nobody is connected to it yet."""
        self.links.stop()
        await self.pass_on()
        self.links = SchedulerLinks(chooses=True, workers=COUNT - 1)
        self.stands[0] = self._scheduler()
        self.links.start()

    async def pass_on(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    async def ask(self, said: bytes | Exception | None = None) -> list[str | None]:
        """Have the server asked. Return why its engine gets no pair, for each process."""
        await self.stands[0].ask(said)
        await self.pass_on()
        return self.why()

    def why(self) -> list[str | None]:
        return [stand.p.in_ledger.kv_not_ready for stand in self.stands]

    def up(self, url: str, started: float) -> None:
        for stand in self.stands:
            stand.up(url, started)

    def close(self) -> None:
        for link in self.link:
            link.close()
        self.links.stop()


async def test_the_scheduler_process_asks_a_bootstrap_server_for_all() -> None:
    """All know the ranks, and count the answer once."""
    asking = Asking()
    asking.connect()
    assert asking.why() == [NOT_ASKED] * COUNT
    assert (
        await asking.ask(b"{}")
        == ["has a bootstrap server that does not know data-parallel rank 0 yet"] * COUNT
    )
    assert await asking.ask(answer(one("e"))) == [None] * COUNT
    assert [stand.p.run.peers.get(0).engine_id for stand in asking.stands] == ["e"] * COUNT
    assert [len(stand.asked) for stand in asking.stands] == [2, 0, 0]
    assert [stand.results for stand in asking.stands] == [["incomplete", "complete"], [], []]
    assert await asking.ask(EngineError("gone")) == [None] * COUNT, "the ids are known"
    asking.up(P, 2.0)
    assert asking.why() == [NOT_ASKED] * COUNT
    assert all("can't be used: gone" in (why or "") for why in await asking.ask())
    assert await asking.ask(EngineTimeoutError("late", wait=Wait.PROBE)) != [None] * COUNT
    assert asking.stands[1].bootstraps.shortcomings() == asking.stands[0].bootstraps.shortcomings()
    assert await asking.ask(answer(one("f"))) == [None] * COUNT


async def test_workers_run_no_questions() -> None:
    asking = Asking()
    running = [list(stand.bootstraps._running) for stand in asking.stands]
    assert running == [[asking.stands[0].p], [], []]
    asking.close()


async def test_a_new_scheduler_process_has_pairs_before_it_has_asked() -> None:
    """Workers know what the server has answered, and how many prompts were given up."""
    asking = Asking()
    asking.connect()
    await asking.ask(answer(one("e")))
    for _ in range(MAX_GIVEN_UP - 1):
        asking.stands[1].bootstraps.notify(HandleEnded("stuck", P, 1.0))
    await asking.pass_on()
    await asking.start_again()
    assert asking.why()[0] == NOT_ASKED
    asking.connect()
    await asking.pass_on()
    assert asking.why() == [None] * COUNT
    assert asking.stands[0].asked == []
    assert asking.stands[0].p.run.peers.get(0).engine_id == "e"
    asking.stands[2].bootstraps.notify(HandleEnded("stuck", P, 1.0))
    await asking.pass_on()
    assert [(why or "")[:12] for why in asking.why()] == ["has given up"] * COUNT
    asking.close()


async def test_what_is_told_of_another_run_does_not_count() -> None:
    """The engine has started again, and a worker knows that later than its answer, or earlier."""
    asking = Asking()
    asking.connect()
    await asking.ask(answer(one("e")))
    for stand in asking.stands[:2]:
        stand.up(P, 2.0)
    assert asking.why() == [NOT_ASKED, NOT_ASKED, None]
    await asking.ask(answer(one("f")))
    assert [stand.p.run.peers.get(0).engine_id for stand in asking.stands] == ["f", "f", "e"]
    asking.stands[2].up(P, 2.0)
    assert asking.stands[2].p.run.peers.get(0).engine_id == "f"
    asking.close()


async def test_of_an_engine_without_a_start_time_only_new_answers_count() -> None:
    asking = Asking()
    asking.connect()
    asking.up(P, 0.0)
    assert await asking.ask(answer(one("e"))) == [None] * COUNT
    for stand in asking.stands:
        stand.ledger.mark_down(P, "gone", 1.0)
    asking.up(P, 0.0)
    assert asking.why() == [NOT_ASKED] * COUNT
    assert await asking.ask(answer(one("f"))) == [None] * COUNT
    asking.close()


async def test_a_worker_that_starts_later_knows_which_addresses_are_old() -> None:
    """A decode engine keeps them: it must not get pairs by a worker that has not seen the
    restart.
    """
    asking = Asking()
    asking.connect(1)
    await asking.ask(answer(one("e", host="a")))
    asking.up(P, 2.0)
    await asking.ask(answer(one("e", host="b")))
    asking.connect(2)
    await asking.pass_on()
    why = asking.why()
    assert "keep its old addresses" in (why[0] or "")
    assert why == [why[0]] * COUNT
    asking.up(D, 2.0)
    assert await asking.ask() == [None] * COUNT, "the decode engine has forgotten them"
    asking.close()


async def test_prompts_that_all_have_given_up_count_together() -> None:
    """Ten of all workers are too many, not ten of each; one that starts later learns how many there
    were.
    """
    asking = Asking()
    asking.connect(1)
    await asking.ask()
    for at in range(MAX_GIVEN_UP - 1):
        asking.stands[at % 2].bootstraps.notify(HandleEnded("stuck", P, 1.0))
        await asking.pass_on()
    assert asking.why()[:2] == [None] * 2
    asking.connect(2)
    await asking.pass_on()
    asking.stands[2].bootstraps.notify(HandleEnded("stuck", P, 1.0))
    await asking.pass_on()
    why = asking.why()
    assert f"has given up {MAX_GIVEN_UP} prompts" in (why[0] or "")
    assert why == [why[0]] * COUNT
    asking.close()
