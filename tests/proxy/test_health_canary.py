"""The request for one token by which an engine is asked whether it works, on simulated engines and
on ones that lie.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.health_canary import Enquiry, HealthCanary
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.settings.health import Health
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.admin import EngineAdmin
from pdproxy_lab.sim.reply import ScriptedReply
from pdproxy_lab.sim.server import SimServer
from tests.fakes.clock import let_loop_time_pass
from tests.fakes.recorder import Recorder
from tests.fakes.world import until
from tests.sim.moments import FAST

EVIDENCE = Evidence(
    frozenset({"tiny", "lora"}),
    "1",
    16,
    ((), (5, 6, 7, 8, 9)),
    5,
    1.0,
    adapters=frozenset({"lora"}),
)
TIMEOUT = 60.0


class Asked(Recorder):
    """A canary to one simulated engine."""

    def __init__(self, sim: SimServer, timeout: float) -> None:
        self.sim = sim
        super().__init__()
        self.admin = EngineAdmin(deadlines=Deadlines(probe=10))
        self.canary = HealthCanary(
            self.admin, Observers([self]), {"decode", "any"}, Health(canary_timeout=timeout)
        )
        engine = LedgerEngine(EngineSpec(sim.url, Role.DECODE), EVIDENCE)
        self.engine = Engine(engine, SimpleNamespace(), ranks=sim.facts.data_parallel_size)  # type: ignore[arg-type]

    async def works(self, rank: int | None = None) -> bool | None:
        return await self.canary.works(self.engine, rank)


@asynccontextmanager
async def asked(timeout: float = TIMEOUT, **facts: Any) -> AsyncIterator[Asked]:
    async with SimServer(msgspec.structs.replace(FAST, model="tiny", **facts)) as sim:
        made = Asked(sim, timeout)
        try:
            yield made
        finally:
            await sim.thaw_core()
            await made.admin.close()


async def test_an_engine_that_works_answers() -> None:
    """With few ids that it has shown to know, for a model and no adapter."""
    async with asked() as a:
        assert await a.works() is True
        body = a.sim.requests[-1].json
        assert (body["model"], body["prompt"], body["max_tokens"]) == ("tiny", [5, 6, 7, 8], 1)


@pytest.mark.asyncio_loop
async def test_a_core_that_stands_still_does_not_answer_in_time() -> None:
    """The request is closed: the engine aborts it when it goes on."""
    async with asked() as a:
        a.sim.freeze_core_now(0.0, None)
        works = asyncio.create_task(a.works())
        await until(lambda: a.sim.engine._streams)  # it has the request
        let_loop_time_pass(TIMEOUT)
        assert await works is False
        assert [event.wait for event in a.events if isinstance(event, DeadlinePassed)] == ["canary"]
        await until(lambda: not a.sim.engine._streams)  # else it may answer before it is told
        await a.sim.thaw_core()
        await until(lambda: a.sim.engine.stats.finished["abort"])


@pytest.mark.asyncio_loop
async def test_each_rank_is_asked_by_itself() -> None:
    async with asked(data_parallel_size=2) as a:
        a.sim.freeze_core_now(0.0, 1)
        assert await a.works(0) is True
        works = asyncio.create_task(a.works(1))
        await until(lambda: a.sim.engine._streams)  # it has the request
        let_loop_time_pass(TIMEOUT)
        assert await works is False


@pytest.mark.parametrize(
    ("status", "body", "works"),
    [
        (404, b"{}", None), (400, b"{}", None), (429, b"{}", None), (503, b"{}", None), (500, b"{}",
        False),
        (200, b"{}", False), (200, b"no JSON", False), (200, b'{"choices": 1}', False), (200,
        b"x" * 100_000, False),
    ],
)  # fmt: skip
async def test_what_an_answer_shows(status: int, body: bytes, works: bool | None) -> None:
    """A refusal comes from the API server, and shows nothing of the core. Nor does something that
    is no completion.
    """

    async def answers(reply: ScriptedReply) -> None:
        await reply.whole(body, status)

    async with asked() as a:
        a.sim.faults.script(answers)
        assert await a.works() is works


async def test_who_may_be_asked() -> None:
    """Roles that serve plain requests, of which a model is known."""
    async with asked() as a:
        assert a.canary.may_ask(a.engine)
        a.engine.in_ledger.evidence = None
        assert not a.canary.may_ask(a.engine)
        prefill = Engine(
            LedgerEngine(EngineSpec(a.sim.url, Role.PREFILL), EVIDENCE),
            SimpleNamespace(),  # type: ignore[arg-type]
        )
        assert not a.canary.may_ask(prefill)


async def test_an_enquiry_sees_metrics_that_move() -> None:
    """Between two readings of them; what was asked is closed with it."""
    async with asked() as a:
        tasks = TaskOwner("test")
        now = [100.0]
        results: Counter[str] = Counter()
        enquiry = Enquiry(a.engine, a.canary, a.admin.scrape, tasks.spawn, lambda: now[0], results)
        enquiry.ask(canary=False)
        await until(lambda: enquiry.shows_progress)
        assert enquiry.last_sign == 0
        now[0] = 101.0
        assert await a.works() is True
        await until(lambda: not len(tasks))
        enquiry.ask(canary=False)
        await until(lambda: enquiry.last_sign == 101.0)
        now[0] = 102.0
        enquiry.ask()
        await until(lambda: enquiry.last_sign == 102.0)
        assert results == {"answered": 1}
        a.sim.freeze_core_now(0.0, None)
        enquiry.ask()
        enquiry.close()
        await until(lambda: not len(tasks))
