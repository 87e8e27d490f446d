"""What workers know of engines' health exists once: one probes and judges, and what any of them
finds holds for all at once.
"""

# Three workers in one event loop; `test_workers_killed` has processes.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.app.share import SoleProcess
from pdproxy.fleet.engine import AuditAccount
from pdproxy.observe.events import Event, LegFailed, NodeChanged
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.settings.health import OutlierSettings
from pdproxy.settings.schema import Settings
from pdproxy.workers.links import pair
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.share import WorkerShare
from tests.fakes import answers, scripts, several
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.tokenizer import Shelf
from tests.fakes.world import COMPLETIONS, World, completion, leads, until, world

COUNT = 3


@asynccontextmanager
async def workers(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[World]:
    """A world with three workers, of which the first one leads."""
    monkeypatch.setattr(several, "WORKERS", COUNT)
    async with world(leaves=True, **options) as w:
        assert [leads(one) for one in w.workers] == [True, False, False]
        await w.told()
        yield w


def nodes(w: World, engine: FakeEngine) -> list[LedgerEngine]:
    """An engine as each worker sees it."""
    return [one.engines[engine.url].in_ledger for one in w.workers]


def why_down(w: World, engine: FakeEngine) -> set[str | None]:
    return {ledger_engine.down_because for ledger_engine in nodes(w, engine)}


def found_gone(worker: Proxy, engine: FakeEngine, why: str) -> None:
    """Have a worker's request find that an engine is gone."""
    worker.pools[0].resources.scheduler.found_gone(engine.url, why, time.monotonic())


def failed(worker: Proxy, engine: FakeEngine) -> None:
    """Have a leg of a worker fail."""
    worker.observers.notify(LegFailed("id", engine.url, engine.role, "refused", False))


def links(proxy: Proxy) -> SchedulerLinks:
    share = proxy.share
    assert isinstance(share, WorkerShare)
    return share._choosing


@asynccontextmanager
async def another(w: World, number: int) -> AsyncIterator[tuple[Proxy, WorkerShare]]:
    """Another process in place of one that has ended, connected as the supervisor does."""
    old = w.workers[number].share
    assert isinstance(old, WorkerShare)
    old._choosing.stop()
    share = old._shared.of(number, old._send)
    again = Proxy.build(w.workers[number].settings, Shelf(), share=share)
    proxies = [again if at == number else one for at, one in enumerate(w.workers)]
    first, *others = [one.share for one in proxies]
    for other in others if number == 0 else [share]:
        for one, end in zip((first, other), pair(), strict=True):
            assert isinstance(one, WorkerShare)
            one.connect(end)
    share.start(again.tasks)
    share.listen()
    share.choose()
    try:
        yield again, share
    finally:
        share.stop()
        await again.stop()


class Seeing:
    """Sees events of a worker."""

    only = (NodeChanged,)

    def __init__(self, seen: list[Event]) -> None:
        self._seen = seen

    def notify(self, event: Event) -> None:
        """See one."""
        self._seen.append(event)


def count_probes(w: World) -> dict[str, int]:
    """Count the questions for each engine's health from now on."""
    asked = {engine.url: 0 for engine in w.engines}
    for engine in w.engines:

        async def health(reply: Reply, url: str = engine.url) -> None:
            asked[url] += 1
            await reply.whole(b"")

        engine.admin["/health"] = health
    return asked


async def test_one_worker_probes_and_all_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of models, versions and KV blocks come from one probe; a follower asks nothing, also
    when it wants a probe.
    """
    asked: list[str] = []

    def before(w: World) -> None:
        for engine in w.engines:

            async def health(reply: Reply, url: str = engine.url) -> None:
                asked.append(url)
                await reply.whole(b"")

            engine.admin["/health"] = health

    async with workers(monkeypatch, before=before) as w:
        assert sorted(asked) == sorted(engine.url for engine in w.engines)
        for engine in w.engines:
            assert len({ledger_engine.evidence for ledger_engine in nodes(w, engine)}) == 1
            assert why_down(w, engine) == {None}
            assert nodes(w, engine)[1].serves("tiny")
        assert [one.pools[0].watching.probing is None for one in w.workers] == [False, True, True]
        for _ in range(2):
            failed(w.others[0], w.decode[0])
        await until(lambda: len(asked) == 3)
        assert asked[2] == w.decode[0].url


async def test_each_change_is_logged_by_one_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All see it, with its reason."""
    async with workers(monkeypatch) as w:
        seen: list[Event] = []
        for one in w.workers:
            one.observers.add(Seeing(seen))
        caplog.clear()
        w.decode[0].stop()
        await w.probe()
        assert [one.message for one in caplog.records if one.name == "pdproxy.fleet"] == [
            "engine is down"
        ]
        changes = [one for one in seen if isinstance(one, NodeChanged)]
        assert len(changes) == COUNT
        assert len(set(changes)) == 1
        assert (changes[0].node, changes[0].up) == (w.decode[0].url, False)


async def test_an_engine_that_refuses_a_connection_is_down_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever worker's request has found it: the others do not try it, and the leader probes
    it.
    """
    async with workers(monkeypatch, decode=2) as w:
        follower, bad = w.others[1], w.decode[0]
        asked = count_probes(w)
        found_gone(follower, bad, "connection refused")
        failed(follower, bad)
        await w.told()
        assert why_down(w, bad) == {"connection refused"}
        await until(lambda: why_down(w, bad) == {None})
        assert asked[bad.url] == 1


async def test_a_state_from_before_a_change_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's good probe was on its way when a worker's request has found the engine down: all
    end with one state.
    """
    async with workers(monkeypatch) as w:
        url = w.decode[0].url
        w.proxy.ledger.when_noted(url)
        await asyncio.sleep(0)
        found_gone(w.others[0], w.decode[0], "connection refused")
        for _ in range(20):
            await asyncio.sleep(0)
            assert nodes(w, w.decode[0])[1].down_because == "connection refused"
        assert why_down(w, w.decode[0]) == {"connection refused"}


async def test_two_workers_find_different_things_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All end with the same state."""
    async with workers(monkeypatch) as w:
        url = w.decode[0].url
        w.others[1].ledger.mark_stalled(url, "stands still")
        found_gone(w.others[0], w.decode[0], "of a follower")
        w.proxy.ledger.mark_down(url, "of the scheduler", 0.0)
        await w.told()
        await w.told()
        assert len(why_down(w, w.decode[0])) == 1
        assert None not in why_down(w, w.decode[0])
        await w.probe()
        assert {(one.down_because, one.stalled) for one in nodes(w, w.decode[0])} == {(None, None)}


async def test_a_worker_that_starts_again_knows_what_others_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a probe of its own; also that an engine is down, stalled, and not paired."""
    async with workers(monkeypatch, prefill=2, decode=2) as w:
        asked = count_probes(w)
        found_gone(w.others[0], w.prefill[0], "gone")
        w.others[0].ledger.mark_stalled(w.decode[0].url, "stands still")
        w.others[0].ledger.eject(w.prefill[1].url, w.decode[1].url)
        await w.told()
        async with another(w, 2) as (again, share):
            await until(lambda: all(engine.probed for engine in again.ledger.engines))
            seen = {engine.url: engine for engine in again.ledger.engines}
            assert seen[w.prefill[0].url].down_because == "gone"
            assert seen[w.decode[0].url].stalled == "stands still"
            assert w.decode[1].url in seen[w.prefill[1].url].ejected
            assert set(asked.values()) == {0}
            assert not share.chooses


async def test_a_new_scheduler_process_knows_what_workers_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks no engine, and what one worker has found while there was none counts, too. Then all
    know it.
    """
    async with workers(monkeypatch, prefill=2, decode=2) as w:
        asked = count_probes(w)
        found_gone(w.others[0], w.prefill[0], "gone")
        await w.told()
        links(w.proxy).stop()
        await asyncio.sleep(0.01)
        found_gone(w.others[1], w.decode[0], "refused")
        async with another(w, 0) as (again, _):
            known = {engine.url: engine for engine in again.ledger.engines}
            await until(lambda: all(engine.probed for engine in known.values()))
            await w.told()
            for one in (again, *w.others):
                states = {engine.url: engine.down_because for engine in one.ledger.engines}
                assert states == {
                    w.prefill[0].url: "gone",
                    w.prefill[1].url: None,
                    w.decode[0].url: "refused",
                    w.decode[1].url: None,
                }
            assert set(asked.values()) == {0}


async def test_a_new_scheduler_process_goes_on_with_the_audit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what workers have heard last. KV of legs that go on would be missing from a new
    account.
    """
    async with workers(monkeypatch) as w:
        url = w.decode[0].url
        account = AuditAccount(1.0, 2.0, 3.0, settled=64)
        w.proxy.engines[url].audit.account = account
        w.proxy.ledger.when_noted(url)
        await w.told()
        assert [one.engines[url].audit.account for one in w.workers] == [account] * COUNT
        async with another(w, 0) as (again, _):
            await until(lambda: again.engines[url].audit.account is not None)
            assert again.engines[url].audit.account == account
            assert again.engines[url].in_ledger.probed


async def test_failures_of_all_workers_open_a_breaker_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight clients, wherever they land: the engine gets as many requests as with one process."""
    limits = {"breaker_failures": 3, "breaker_cooldown": 60.0}
    async with workers(monkeypatch, prefill=2, limits=limits) as w:
        bad = w.prefill[0]
        bad.default = scripts.whole(answers.INTERNAL_500, 500)
        for _ in range(24):
            assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert len(bad.requests) == 3
        await w.told()
        now = time.monotonic()
        assert {engine.state(now) for engine in nodes(w, bad)} == {"excluded"}


async def test_an_outlier_is_excluded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason, and how often, is known to the next scheduler process."""

    def adjust(settings: Settings) -> Settings:
        return msgspec.structs.replace(
            settings, outliers=OutlierSettings(min_requests=9, exclude_for=30.0)
        )

    async with workers(monkeypatch, decode=2, adjust=adjust) as w:
        bad, good = (w.proxy.engines[engine.url] for engine in w.decode)
        now = time.monotonic()
        outliers = w.proxy.pools[0].watching.outliers
        for at in range(12):
            outliers.ended(bad.url, bad.in_ledger.role, now, failed=at % 4 > 0)
            outliers.ended(good.url, good.in_ledger.role, now, failed=False)
        await w.proxy.exclusions.compare()
        await w.told()
        assert {ledger_engine.state(now) for ledger_engine in nodes(w, w.decode[0])} == {"excluded"}
        assert {ledger_engine.state(now) for ledger_engine in nodes(w, w.decode[1])} == {"up"}
        assert {ledger_engine.excluded_because for ledger_engine in nodes(w, w.decode[0])} == {
            "75 % of its requests failed"
        }
        left_out = outliers.left_out(bad.url)
        async with another(w, 0) as (again, _):
            await until(lambda: again.engines[bad.url].in_ledger.probed)
            assert again.pools[0].watching.outliers.left_out(bad.url) == left_out
            assert again.engines[bad.url].in_ledger.state(now) == "excluded"


async def test_a_pair_that_one_worker_ejects_is_ejected_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with workers(monkeypatch) as w:
        follower, (p,), (d,) = w.others[1], w.prefill, w.decode
        follower.pools[0].watching.auditor.compared(p.url, d.url, 10, 11)
        await w.told()
        assert [engine.ejected for engine in nodes(w, p)] == [{d.url}] * COUNT
        assert [engine.ejected for engine in nodes(w, d)] == [{p.url}] * COUNT


async def test_an_engine_that_stands_still_is_out_of_use_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A follower finds it; the leader lets it in, and the next request of any worker is its only
    one.
    """
    async with workers(monkeypatch, decode=2) as w:
        url = w.decode[0].url
        follower = w.others[0]
        follower.ledger.mark_stalled(url, "stands still")
        await w.told()
        assert [engine.stalled for engine in nodes(w, w.decode[0])] == ["stands still"] * COUNT
        w.proxy.stalls.let_in(w.proxy.engines[url])
        await w.told()
        assert [engine.stalled for engine in nodes(w, w.decode[0])] == [None] * COUNT
        now = time.monotonic()
        assert [engine.state(now) for engine in nodes(w, w.decode[0])] == ["half_open"] * COUNT
        assert len({engine.trial_number for engine in nodes(w, w.decode[0])}) == 1


async def test_one_process_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers share is not there."""
    monkeypatch.setattr(several, "WORKERS", 1)
    async with world() as w:
        assert isinstance(w.proxy.share, SoleProcess)
        assert type(w.proxy.ledger) is Ledger
