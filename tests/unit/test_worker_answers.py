"""One worker asks engines for all (canaries of tokenizers, bootstrap servers), and what it hears
all know.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdproxy.fleet import worker_canary
from pdproxy.fleet.bootstrap import MAX_GIVEN_UP, NOT_ASKED
from pdproxy.fleet.worker_answers import WorkerAnswers
from pdproxy.fleet.worker_bootstrap import WorkerBootstraps
from pdproxy.fleet.worker_canary import WorkerCanaries
from pdproxy.kit.errors import EngineError, EngineTimeoutError, Wait
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import HandleEnded, Observers
from pdproxy.settings.health import Probes
from pdproxy.transfer.mooncake import MOONCAKE
from pdproxy.upstream.admin import ModelCard
from pdproxy.wire.route import Route
from tests.fakes.bus import Bus
from tests.fakes.tokenizer import SimTokenizer
from tests.unit.test_bootstrap import Stand, answer, one
from tests.unit.test_canary import D, Engines, P

COUNT = 3


class Judging:
    """Workers that judge the same two engines by canaries."""

    def __init__(self) -> None:
        self.bus = Bus(COUNT)
        self.shared: list[WorkerAnswers] = []
        self.workers = [self._worker(number) for number in range(COUNT)]

    def _worker(self, number: int) -> Engines:
        made = Engines()
        made.threads.shutdown()
        made.threads = ThreadPoolExecutor(1)
        shared = WorkerAnswers(self.bus.leads[number], self.bus.tell(number), made.registry)
        self.bus.receivers[number] = shared.received
        self.shared[number : number + 1] = [shared]
        made.canaries = WorkerCanaries(
            made.registry,
            made,  # type: ignore[arg-type]
            Observers([made]),
            made.threads,
            tokenizer=None,
            find=made._find,
            shared=shared,
        )
        return made

    def up(self, url: str, started: float = 1.0) -> None:
        for worker in self.workers:
            worker.up(url, started)

    async def look(self, *numbers: int) -> list[bool]:
        """Have workers look, all in turn by default, and what they tell passed on."""
        done = []
        for number in numbers or range(COUNT):
            done.append(await self.workers[number].canaries.look())
            self.bus.pass_on()
        return done

    def lack(self, number: int) -> None:
        """Have a worker ask for what it lacks, as it does every second."""
        asking = asyncio.ensure_future(self.shared[number]._ask())
        asyncio.get_running_loop().call_soon(asking.cancel)

    def trusted(self) -> list[bool]:
        return [worker.canaries.trusted("tiny", Route.CHAT) is not None for worker in self.workers]

    def asked(self) -> list[list[str]]:
        return [worker.asked for worker in self.workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.threads.shutdown()


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


async def test_who_leads_in_place_of_a_dead_one_asks_again_and_is_told_what_was_refuted() -> None:
    """By the others: also a worker that starts behind it trusts no tokenizer that a request has
    refuted.
    """
    judging = Judging()
    judging.up(P)
    await judging.look()
    judging.workers[1].canaries.refuted(P, "tiny", Route.CHAT, "they differ")
    judging.bus.pass_on()
    for number in (0, 2):
        judging.workers[number].threads.shutdown()
        judging.workers[number] = judging._worker(number)
        judging.workers[number].up(P)
        await judging.look(number)
    judging.lack(2)
    await asyncio.sleep(0)
    judging.bus.pass_on()
    await judging.look()
    assert judging.trusted() == [False] * COUNT
    assert all(worker.canaries.trusted("tiny", Route.COMPLETIONS) for worker in judging.workers)
    assert judging.asked() == [[P], [], []]
    judging.close()


async def test_a_worker_that_lacks_answers_asks_for_them() -> None:
    """It was started later, or a message was lost. Who leads answers, and nobody asks an engine
    again.
    """
    judging = Judging()
    judging.up(P)
    judging.bus.receivers[2], received = None, judging.bus.receivers[2]
    await judging.look(0, 1)
    judging.bus.receivers[2] = received
    assert await judging.look(2) == [False]
    judging.lack(2)
    await asyncio.sleep(0)
    judging.bus.pass_on()
    await judging.look(2)
    assert judging.trusted() == [True] * COUNT
    assert judging.asked() == [[P], [], []]
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
    judging.bus.pass_on()
    await judging.look(2)
    assert judging.trusted() == [False] * COUNT
    assert all(worker.canaries.trusted("tiny", Route.COMPLETIONS) for worker in judging.workers)
    assert [worker.judged()[-1:] == [(P, "tiny", False)] for worker in judging.workers] == [
        False,
        True,
        False,
    ]
    sent = judging.bus.sent
    judging.workers[2].canaries.refuted(P, "other", Route.CHAT, "there is no such model")
    judging.bus.pass_on()
    assert judging.bus.sent == sent
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
    """The other workers leave such an engine's prompts to it, and say why."""
    monkeypatch.setattr(worker_canary, "MAX_TOLD", 1000)
    judging = Judging()
    judging.up(P)
    await judging.look()
    assert judging.trusted() == [True, False, False]
    assert "more than 1000 bytes" in judging.workers[1].canaries.shortcomings()[0]
    judging.close()


async def test_an_engine_that_is_too_busy_is_asked_again_by_the_leader() -> None:
    judging = Judging()
    judging.workers[0].models_fail = True
    judging.up(P)
    assert await judging.look() == [False] * COUNT
    judging.workers[0].models_fail = False
    await judging.look()
    assert judging.trusted() == [True] * COUNT
    assert judging.asked() == [[P, P], [], []]
    judging.workers[0].registry.remove(P)
    assert judging.shared[0]._kept == {}
    judging.close()


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
