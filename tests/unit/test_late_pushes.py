"""Pushes that are late: lost only if the decode engine waits for KV, and the prefill engine has
gone through a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pdproxy.kit.errors import EngineError
from pdproxy.serving.kv.late_pushes import LatePushes
from pdproxy.serving.kv.lost_pushes import GRACE, LOOKS
from pdproxy.upstream.metrics_page import Scrape
from tests.fakes.clock import ManualClock


@dataclass(eq=False)
class Push:
    """A decode leg that may wait for a push."""

    since: float
    promised: bool = False
    prefill: str = "p"
    decode: str | None = "d"

    def push_lost(self) -> None:
        """Not called here."""


@dataclass
class Pair:
    """What both engines show. `waiting` and `queued`: at each look, the last one from then on."""

    waiting: list[float | None] = field(default_factory=lambda: [1.0])
    queued: float | None = 0.0
    moves: bool | None = True
    stalled: str | None = None
    pushes: list[Push] = field(default_factory=list)
    suspected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.pushes = self.pushes or [Push(self.clock.now() - 60)]

    async def scrape(self, url: str) -> Scrape:
        waiting = self.waiting.pop(0) if len(self.waiting) > 1 else self.waiting[0]
        if waiting == -1:
            raise EngineError("no metrics")
        return Scrape(0.0, None, 0.0, waiting, 0.0, {}, queued=self.queued)

    async def asked(self, url: str) -> bool | None:
        return self.moves

    async def lost(self, at: int = 0) -> bool:
        engine = SimpleNamespace(up=True, stalled=self.stalled)
        engines: Any = {"p": SimpleNamespace(in_ledger=engine)}
        late = LatePushes(
            lambda: self.pushes,
            engines,
            self.scrape,
            self.asked,
            lambda url, _: self.suspected.append(url),
            self.clock,
        )
        return await self.clock.through(late.is_lost(self.pushes[at]), GRACE)


@pytest.mark.parametrize(
    ("pair", "is_lost"),
    [
        (Pair(), True),
        (Pair(waiting=[0.0]), False),  # it runs
        (Pair(waiting=[5.0], queued=5.0), False),  # it waits for a place
        (Pair(waiting=[5.0], queued=4.0), True),
        (Pair(waiting=[2.0], queued=None), True),
        (Pair(waiting=[None]), True),
        (Pair(waiting=[-1.0]), True),
        (Pair(moves=False), False),  # one long step
        (Pair(moves=False, stalled="stands still"), True),
        (Pair(moves=None), True),  # it can't be asked
        (Pair(waiting=[1.0, 1.0, 0.0]), False),  # the push was on its way
    ],
)
async def test_whether_a_push_is_lost(pair: Pair, is_lost: bool) -> None:
    assert await pair.lost() is is_lost


async def test_the_oldest_legs_are_those_that_wait_for_kv() -> None:
    """No engine shows which: what waits for a place gets one in its turn, and what waits for a lost
    push stays.
    """
    pair = Pair(waiting=[2.0])
    now = pair.clock.now()
    pair.pushes = [Push(now - 50), Push(now - 70), Push(now - 60)]
    assert [await pair.lost(at) for at in range(3)] == [False, True, True]


async def test_legs_whose_prefill_was_not_answered_wait_for_kv_rightly() -> None:
    pair = Pair(waiting=[1.0])
    now = pair.clock.now()
    pair.pushes = [Push(now - 60), Push(now - 50, promised=True)]
    assert not await pair.lost()


async def test_the_prefill_engine_is_watched_meanwhile() -> None:
    """One that does not move at all is found to stand still, and its pushes are given up then."""
    pair = Pair(moves=False)
    await pair.lost()
    assert pair.suspected == ["p"]
    assert LOOKS * GRACE < 5
