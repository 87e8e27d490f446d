"""What workers know of engines' health exists once: one probes and judges, and what any of them
finds holds for all at once.
"""

# Three workers in one event loop; `test_workers_leader` has processes.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.fleet import findings
from pdproxy.fleet.engine import AuditAccount
from pdproxy.observe.events import Event, NodeChanged
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.settings.health import OutlierSettings
from pdproxy.settings.schema import Settings
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
        scrapes = [pool.watching.findings._scrapes for one in w.workers for pool in one.pools]  # type: ignore[union-attr]
        assert scrapes[0] == scrapes[1] == scrapes[2]
        assert len(scrapes[0]) == 2
        w.others[0].prober.soon(w.others[0].engines[w.decode[0].url])
        await until(lambda: len(asked) == 3)
        assert asked[2] == w.decode[0].url


async def test_each_change_is_logged_by_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with workers(monkeypatch) as w:
        w.forget_events()
        w.decode[0].stop()
        await w.probe()
        (change,) = w.events(NodeChanged)
        assert (change.node, change.up) == (w.decode[0].url, False)
        told = [one for one in w._recorder.events if isinstance(one, NodeChanged) and one.elsewhere]
        assert [(one.node, one.up, one.reason) for one in told] == 2 * [
            (change.node, False, change.reason)
        ]


async def test_an_engine_that_refuses_a_connection_is_down_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever worker's request has found it: the others do not try it, and the leader probes
    it.
    """
    async with workers(monkeypatch, decode=2) as w:
        follower, bad = w.others[1], w.decode[0]
        asked = count_probes(w)
        follower.ledger.mark_down(bad.url, "connection refused", 0.0)
        follower.prober.soon(follower.engines[bad.url])
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
        w.proxy.pools[0].watching.findings._post(url)  # type: ignore[union-attr]
        w.others[0].ledger.mark_down(url, "connection refused", 0.0)
        for _ in range(10):
            await asyncio.sleep(0)
            assert nodes(w, w.decode[0])[1].down_because == "connection refused"
        assert why_down(w, w.decode[0]) == {"connection refused"}


async def test_what_is_found_waits_while_too_much_is_to_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor stands still. Of each engine one state waits; all know it once the supervisor
    reads again.
    """
    async with workers(monkeypatch) as w:
        own = w.others[0].pools[0].watching.findings
        assert own is not None
        behind = True
        own.is_behind = lambda: behind
        for number in range(5):
            w.others[0].ledger.mark_up(w.decode[0].url, nodes(w, w.decode[0])[0].evidence)  # type: ignore[arg-type]
            w.others[0].ledger.mark_down(w.decode[0].url, f"gone {number}", 0.0)
        await asyncio.sleep(2 * findings.AGAIN)
        assert why_down(w, w.decode[0]) == {None, "gone 4"}
        assert list(own._due) == [w.decode[0].url]
        behind = False
        await until(lambda: why_down(w, w.decode[0]) == {"gone 4"})


async def test_two_workers_find_different_things_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All end with what the leader has found."""
    async with workers(monkeypatch) as w:
        url = w.decode[0].url
        w.proxy.ledger.mark_down(url, "of the leader", 0.0)
        w.others[0].ledger.mark_down(url, "of a follower", 0.0)
        w.others[1].ledger.mark_stalled(url, "of another one")
        await w.told()
        await w.told()
        assert why_down(w, w.decode[0]) == {"of the leader"}


async def test_a_worker_that_starts_again_knows_what_others_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a probe of its own; also that an engine is down, stalled, and not paired."""
    async with workers(monkeypatch, prefill=2, decode=2) as w:
        asked = count_probes(w)
        w.others[0].ledger.mark_down(w.prefill[0].url, "gone", 0.0)
        w.others[0].ledger.mark_stalled(w.decode[0].url, "stands still")
        w.others[0].ledger.eject(w.prefill[1].url, w.decode[1].url)
        await w.told()
        old = w.others[1]
        share = old.share.several
        assert isinstance(share, WorkerShare)
        share._shared.clear(2)
        share.findings.clear()
        again = Proxy.build(old.settings, Shelf(), share=share)
        share.start(again.tasks)
        try:
            await until(lambda: all(engine.probed for engine in again.ledger.engines))
            seen = {engine.url: engine for engine in again.ledger.engines}
            assert seen[w.prefill[0].url].down_because == "gone"
            assert seen[w.decode[0].url].stalled == "stands still"
            assert w.decode[1].url in seen[w.prefill[1].url].ejected
            assert set(asked.values()) == {0}
            assert not share.lead.leads
        finally:
            await again.stop()


async def test_who_leads_in_place_of_a_dead_one_goes_on_with_the_audit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what the others have heard last. KV of legs that go on would be missing from a new
    account.
    """
    async with workers(monkeypatch) as w:
        url = w.decode[0].url
        for other in w.others:
            other.engines[url].audit.account = AuditAccount(1.0, 2.0, 3.0, settled=64)
        share = w.proxy.share.several
        assert isinstance(share, WorkerShare)
        share._shared.clear(0)
        share.findings.clear()
        share.succeeds = True
        again = Proxy.build(w.proxy.settings, Shelf(), share=share)
        share.start(again.tasks)
        try:
            await until(lambda: again.engines[url].audit.account is not None)
            assert again.engines[url].audit.account == AuditAccount(1.0, 2.0, 3.0, settled=64)
            assert again.engines[url].in_ledger.probed
        finally:
            await again.stop()


async def test_a_lost_answer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts asks until it knows all engines."""
    monkeypatch.setattr(findings, "ASK_EVERY", 0.01)
    lost: list[bytes] = []
    async with workers(monkeypatch) as w:
        follower = w.others[0]
        follower.ledger._engines[w.decode[0].url].probed = False
        hears = follower.share.several.siblings.hears  # type: ignore[union-attr]
        topic = next(one for one in hears if one.startswith("findings"))
        take = hears[topic]

        def lose(body: bytes) -> None:
            lost.append(body)
            if len(lost) > 2:
                hears[topic] = take

        hears[topic] = lose
        await until(lambda: follower.ledger._engines[w.decode[0].url].probed)
        assert len(lost) == 3


async def test_what_the_leader_was_never_told_is_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a worker would keep what it has found, and never hear the leader."""
    async with workers(monkeypatch) as w:
        follower, url = w.others[0], w.decode[0].url
        share = follower.share.several
        assert isinstance(share, WorkerShare)
        send, share.siblings._send = share.siblings._send, lambda message: None
        follower.ledger.mark_down(url, "connection refused", 0.0)
        await w.told()
        share.siblings._send = send
        assert [engine.down_because for engine in nodes(w, w.decode[0])] == [
            None,
            "connection refused",
            None,
        ]
        await w.proxy.prober.probe(w.proxy.engines[url], scrape=True)
        await w.told()
        assert why_down(w, w.decode[0]) == {"connection refused"}
        await w.probe()
        assert why_down(w, w.decode[0]) == {None}


async def test_an_engine_that_a_follower_adds_later_is_known_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files are read at different moments: what came before it had the engine was lost."""
    async with workers(monkeypatch) as w:
        follower, url = w.others[0], w.decode[0].url
        spec = follower.engines[url].in_ledger.spec
        engine = follower.engines.remove(url)
        await w.told()
        follower.engines.add(spec, engine.client)
        assert not follower.engines[url].in_ledger.up
        await w.told()
        assert follower.engines[url].in_ledger.up


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
    """The reason, and how often, is known to the next leader."""

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
        assert len({one.pools[0].watching.outliers.left_out(bad.url) for one in w.workers}) == 1


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
        seen: list[Event] = w._recorder.events
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
        told = [
            one
            for one in seen
            if isinstance(one, NodeChanged) and one.node == url and one.elsewhere
        ]
        assert len(told) >= 4


async def test_one_process_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers share is not there."""
    monkeypatch.setattr(several, "WORKERS", 1)
    async with world() as w:
        assert w.proxy.pools[0].watching.findings is None
        assert type(w.proxy.ledger) is Ledger
