"""One worker asks bootstrap servers for all, and what it hears all know."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.fleet.bootstrap import MAX_GIVEN_UP, NOT_ASKED
from pdproxy.fleet.worker_answers import WorkerAnswers
from pdproxy.fleet.worker_bootstrap import WorkerBootstraps
from pdproxy.kit.errors import EngineError, EngineTimeoutError, Wait
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import HandleEnded, Observers
from pdproxy.settings.health import Probes
from pdproxy.transfer.mooncake import MOONCAKE
from tests.fakes.bus import Bus
from tests.unit.test_bootstrap import Stand, answer, one
from tests.unit.test_canary import D, P

COUNT = 3


# -- bootstrap servers


class Asking:
    """Workers that ask the same bootstrap server."""

    def __init__(self) -> None:
        self.bus = Bus(COUNT)
        self.shared: list[WorkerAnswers] = []
        self.stands = [self._stand(number) for number in range(COUNT)]

    def _stand(self, number: int) -> Stand:
        def make(stand: Stand) -> WorkerBootstraps:
            shared = WorkerAnswers(self.bus.leads[number], self.bus.tell(number), stand.engines)
            self.bus.receivers[number] = shared.received
            self.shared.append(shared)
            observers = Observers([stand])
            now = lambda: stand.time  # noqa: E731
            return WorkerBootstraps(
                stand.engines,
                stand.ledger,
                stand._query,
                observers,
                stand.tasks,
                Probes(),
                now,
                MOONCAKE,
                shared=shared,
            )

        return Stand(make=make)

    async def ask(self, said: bytes | Exception | None = None, leader: int = 0) -> list[str | None]:
        """Have the server asked by the leader. Return why its engine gets no pair, for each
        worker.
        """
        await self.stands[leader].ask(said)
        self.bus.pass_on()
        return self.why()

    def why(self) -> list[str | None]:
        return [stand.p.in_ledger.kv_not_ready for stand in self.stands]

    def up(self, url: str, started: float) -> None:
        for stand in self.stands:
            stand.up(url, started)


async def test_one_worker_asks_a_bootstrap_server_for_all() -> None:
    """All know the ranks, and count the answer once."""
    asking = Asking()
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


async def test_only_the_worker_that_leads_runs_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdproxy.fleet.bootstrap.SOON", 3600.0)
    asking, tasks = Asking(), TaskOwner("test")
    for stand in asking.stands:
        stand.bootstraps._probes = Probes(scrape_interval=3600.0)
        stand.bootstraps._known[stand.p].wake.clear()  # of when it came up
        tasks.keep(lambda stand=stand: stand.bootstraps.run(stand.p), "asks")  # type: ignore[misc]
    for _ in range(5):
        await asyncio.sleep(0)
    assert [len(stand.asked) for stand in asking.stands] == [1, 0, 0]
    await tasks.settle(0)


async def test_a_worker_that_starts_later_knows_which_addresses_are_old() -> None:
    """A decode engine keeps them: it must not get pairs by a worker that has not seen the
    restart.
    """
    asking = Asking()
    late = asking.bus.receivers[2]
    asking.bus.receivers[2] = None
    await asking.ask(answer(one("e", host="a")))
    asking.up(P, 2.0)
    await asking.ask(answer(one("e", host="b")))
    asking.bus.receivers[2] = late
    assert asking.shared[2].lacking() == [P]
    assert asking.shared[1].lacking() == []
    task = asyncio.ensure_future(asking.shared[2]._ask())
    await asyncio.sleep(0)
    task.cancel()
    asking.bus.pass_on()
    why = asking.why()
    assert "keep its old addresses" in (why[0] or "")
    assert why == [why[0]] * COUNT
    asking.up(D, 2.0)
    assert await asking.ask() == [None] * COUNT, "the decode engine has forgotten them"


async def test_prompts_that_all_have_given_up_count_together() -> None:
    """Ten of all workers are too many, not ten of each; one that starts later learns how many there
    were.
    """
    asking = Asking()
    await asking.ask()
    late, asking.bus.receivers[2] = asking.bus.receivers[2], None
    for at in range(MAX_GIVEN_UP - 1):
        asking.stands[at % 2].bootstraps.notify(HandleEnded("stuck", P, 1.0))
        asking.bus.pass_on()
    assert asking.why() == [None] * COUNT
    asking.bus.receivers[2] = late
    await asking.ask()
    asking.stands[2].bootstraps.notify(HandleEnded("stuck", P, 1.0))
    asking.bus.pass_on()
    why = asking.why()
    assert f"has given up {MAX_GIVEN_UP} prompts" in (why[0] or "")
    assert why == [why[0]] * COUNT
