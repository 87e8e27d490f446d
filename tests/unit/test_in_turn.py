"""One question to several engines, one after the other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, OverloadedError, RefusalReason, Wait
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.scheduling.ledger_engine import EngineSpec, LedgerEngine, Role
from pdproxy.serving.dispatch.in_turn import MOST, AskedFor, first_answer
from tests.fakes.recorder import Recorder

NOBODY = AskedFor(
    cast("Any", SimpleNamespace(broke=lambda *_, **__: False)),
    cast("Any", SimpleNamespace(lost=[])),
    None,
)
"""A request under which no engine is lost."""


class Engines:
    """Each is asked by its name and does what its name says."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, engine: LedgerEngine) -> str:
        name = engine.url.removeprefix("http://")
        self.asked.append(name)
        if name.startswith("silent"):
            await asyncio.Event().wait()
        if name.startswith("refuses"):
            raise EngineError("refused")
        if name.startswith("full"):
            raise OverloadedError("no bytes left", RefusalReason.QUEUE_FULL)
        return name


@pytest.mark.parametrize(
    ("names", "answer", "asked", "waits"),
    [
        ("good other", "good", ["good"], 0),
        ("refuses good", "good", ["refuses", "good"], 0),
        ("full good", "good", ["full", "good"], 0),
        ("silent good", "good", ["silent", "good"], 1),
        ("silent refuses good", None, ["silent", "refuses"], 1),
        ("silent1 silent2", None, ["silent1", "silent2"], 2),
        ("", None, [], 0),
    ],
)
async def test_the_first_answer(
    names: str, answer: str | None, asked: list[str], waits: int
) -> None:
    """An engine that hangs takes only its part of the time, and of very many engines only the first
    are asked.
    """
    ledger_engines = [
        LedgerEngine(EngineSpec(f"http://{name}", Role.DECODE)) for name in names.split()
    ]
    engines, passed = Engines(), Recorder()
    found = await first_answer(
        ledger_engines, engines.ask, Clock(), 0.2, Wait.TOKENIZE, Observers([passed]), NOBODY
    )
    assert found == answer
    assert engines.asked == asked
    assert len(engines.asked) <= MOST
    assert [event.wait for event in passed.of(DeadlinePassed)] == [Wait.TOKENIZE.value] * waits
    assert len(passed.events) == waits
