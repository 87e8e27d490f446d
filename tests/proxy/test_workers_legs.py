"""An engine's own numbers are compared with the legs that all workers have there: whether a silent
leg may go on waiting, which pushes are lost, and whether the engine stands still.
"""

# Three workers in one event loop. The first one chooses; the others are seen by messages alone.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.fleet.open_legs import OpenLegs
from pdproxy.kit.errors import EngineError, StandstillError
from pdproxy.observe.events import NodeChanged
from pdproxy.serving.kv import late_pushes, lost_pushes
from pdproxy.settings.schema import Settings
from tests.fakes import scripts, several
from tests.fakes.engine import FakeEngine
from tests.fakes.world import World, until, world

AGO = 60.0
"""Seconds since when the legs of these tests are open."""
WAIT = "first_token"


@dataclass(eq=False)
class Leg:
    """A leg that shows what a test says."""

    since: float
    phase: str = "decode"
    sign: float = 0.0
    must_progress: bool = True
    is_counted: bool = True
    in_silence: bool = False
    waits_for: str | None = None
    prompt_bytes: int = 0
    stalled_before: int = 0
    failed: list[EngineError] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def last_sign(self) -> float:
        return self.sign

    def source_lost(self, why: str) -> None:
        self.lost.append(why)

    def fail(self, error: EngineError) -> None:
        self.failed.append(error)


@dataclass(eq=False)
class Push:
    """The KV that a leg awaits."""

    prefill: str
    decode: str
    since: float
    promised: bool = False
    awaits_push: bool = True
    is_lost: bool = False

    def push_lost(self) -> None:
        self.is_lost = True


@asynccontextmanager
async def workers(
    monkeypatch: pytest.MonkeyPatch, stalled_after: float = 1000.0, **options: Any
) -> AsyncIterator[World]:
    """Three workers with engines that push KV. Engines are not found to stand still by themselves
    within `stalled_after`.
    """
    monkeypatch.setattr(several, "WORKERS", 3)
    for module in (late_pushes, lost_pushes):
        monkeypatch.setattr(module, "GRACE", 0.05)

    def adjust(settings: Settings) -> Settings:
        pools = tuple(
            msgspec.structs.replace(pool, connector="nixl-push") for pool in settings.pools
        )
        health = msgspec.structs.replace(settings.health, stalled_after=stalled_after)
        return msgspec.structs.replace(settings, pools=pools, health=health)

    async with world(leaves=True, adjust=adjust, **options) as w:
        await w.told()
        try:
            yield w
        finally:
            for one in w.workers:
                one.custodian._live.clear()
                for engine in one.engines.values():
                    engine.open_legs.legs.clear()


def legs(proxy: Proxy, engine: FakeEngine, count: int, **shown: Any) -> list[Leg]:
    """Legs of a worker at an engine."""
    made = [Leg(time.monotonic() - AGO, **shown) for _ in range(count)]
    for leg in made:
        proxy.engines[engine.url].open_legs.add(leg)
    return made


def pushes(proxy: Proxy, w: World, count: int, ago: float = AGO, **shown: Any) -> list[Push]:
    """Pushes that legs of a worker await."""
    p, d = w.prefill[0].url, w.decode[0].url
    made = [Push(p, d, time.monotonic() - ago, **shown) for _ in range(count)]
    for one in made:
        proxy.custodian._live[one] = None  # type: ignore[index]
    return made


def reports(engine: FakeEngine, running: int, waiting: int = 0) -> None:
    """Have an engine report so many requests."""
    engine.admin["/metrics"] = scripts.whole(
        b"process_start_time_seconds 1.0\n"
        b'vllm:num_requests_running{engine="0"} %d\n'
        b'vllm:num_requests_waiting{engine="0"} %d\n' % (running, waiting)
    )


# -- silent legs


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("of_worker", [0, 1, 2])
async def test_a_request_that_is_lost_is_seen_among_all_requests(
    monkeypatch: pytest.MonkeyPatch, of_worker: int, lost: int
) -> None:
    """An engine that reports one request less than all workers have there has lost one."""
    async with workers(monkeypatch) as w:
        for proxy, count in zip(w.workers, (2, 30, 1), strict=True):
            legs(proxy, w.decode[0], count)
        reports(w.decode[0], 33 - lost)
        resources = w.workers[of_worker].pools[0].resources
        assert await resources.works(w.decode[0].url, WAIT) is not bool(lost)


async def test_a_worker_that_is_stopped_has_no_lost_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its engine may have ended them, and nobody reads that."""
    async with workers(monkeypatch) as w:
        chooses, other, stopped = w.workers
        legs(other, w.decode[0], 1)
        legs(stopped, w.decode[0], 3)
        reports(w.decode[0], 4)
        assert await other.pools[0].resources.works(w.decode[0].url, WAIT)
        link = stopped.share._choosing.link  # type: ignore[union-attr]
        link._do.clear()
        reports(w.decode[0], 1)
        asked = time.monotonic()
        assert await other.pools[0].resources.works(w.decode[0].url, WAIT)
        assert time.monotonic() - asked < 5
        assert not await chooses.pools[0].resources.works("http://unknown:1", WAIT)


# -- pushes


async def test_a_push_that_is_late_is_one_of_the_oldest_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode engine reports that some wait. Those are other workers' legs: one that came later
    computes, and goes on.
    """
    async with workers(monkeypatch) as w:
        _, other, own = w.workers
        older, (mine,) = pushes(other, w, 3), pushes(own, w, 1, AGO / 2)
        reports(w.decode[0], 1, waiting=3)
        is_lost: Callable[[Any], Any] = own.pools[0].resources.is_push_lost
        assert not await is_lost(mine)
        assert await other.pools[0].resources.is_push_lost(older[0])  # type: ignore[arg-type]
        reports(w.decode[0], 0, waiting=4)
        assert await is_lost(mine)


@pytest.mark.parametrize("waiting", [30, 31])
async def test_who_waits_for_prefills_rightly_is_not_taken_for_a_lost_push(
    monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    """A prefill engine is lost. Another worker's requests wait at the decode engine for prefills
    that are under way; one more has lost its KV, or none has.
    """
    async with workers(monkeypatch, prefill=2) as w:
        _, other, own = w.workers
        rightly = pushes(other, w, 30, promised=True)
        for one in rightly:
            one.prefill = w.prefill[1].url
        (mine,) = pushes(own, w, 1)
        reports(w.decode[0], 1, waiting=waiting)
        await w.told()
        own.pools[0].resources.scheduler.found_gone(mine.prefill, "it is gone", time.monotonic())
        await asyncio.sleep(1.0)
        assert mine.is_lost is (waiting == 31)
        assert not any(one.is_lost for one in rightly)


# -- engines that stand still


async def test_legs_of_all_workers_end_where_an_engine_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And so do the legs elsewhere that wait for its KV. What may be the cause is said to each."""
    async with workers(monkeypatch, stalled_after=0.4, decode=2) as w:
        d, others = w.decode[0], w.workers[1:]
        d.admin["/metrics"] = scripts.whole(b"process_start_time_seconds 1.0\n")
        w.decode[1].admin["/metrics"] = d.admin["/metrics"]
        now = time.monotonic()
        silent = [Leg(now), Leg(now, sign=now + 0.01)]
        waits = Leg(now, waits_for=d.url)
        for proxy, leg in zip(others, silent, strict=True):
            proxy.engines[d.url].open_legs.add(leg)
        others[0].engines[w.decode[1].url].open_legs.add(waits)
        monkeypatch.setattr("pdproxy.fleet.health_canary.HealthCanary.may_ask", lambda *_: False)
        await until(lambda: all(leg.failed for leg in silent))
        errors = [leg.failed[0] for leg in silent]
        assert all(isinstance(error, StandstillError) for error in errors)
        assert [error.may_be_cause for error in errors] == [True, False]  # type: ignore[attr-defined]
        assert [one.engines[d.url].in_ledger.stalled is not None for one in w.workers] == 3 * [True]
        await until(lambda: bool(waits.lost))
        assert not waits.failed
        (change,) = [one for one in w.events(NodeChanged) if one.state == "stalled"]
        assert change.node == d.url


async def test_a_sign_to_one_worker_is_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's only leg is silent for long; another worker's stream flows."""
    async with workers(monkeypatch, stalled_after=0.4) as w:
        d = w.decode[0]
        (quiet,) = legs(w.workers[1], d, 1)
        (flows,) = legs(w.workers[2], d, 1)
        for _ in range(60):
            flows.sign = time.monotonic()
            await asyncio.sleep(0.02)
        watch = w.proxy.stalls._watches[d.url]
        assert watch._enquiry is None
        assert quiet.failed == []
        open_legs: OpenLegs = w.proxy.engines[d.url].open_legs
        assert len(open_legs.legs) == 2
        w.workers[1].engines[d.url].open_legs.remove(quiet, ended_well=time.monotonic())
        await until(lambda: len(open_legs.legs) == 1)
        w.workers[2].share._choosing.link.close()  # type: ignore[union-attr]
        await until(lambda: not open_legs.legs)
