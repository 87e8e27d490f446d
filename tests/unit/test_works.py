"""Whether an engine is seen to work on all that it was sent, by the numbers that it reports."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, cast

import pytest

from pdproxy.fleet import works
from pdproxy.fleet.open_legs import OpenLeg, OpenLegs
from pdproxy.observe.events import Event, Observers, SilenceAllowed
from pdproxy.upstream.metrics_page import NO_METRICS, Scrape
from tests.fakes.recorder import Recorder


class Leg:
    since = 0.0
    prompt_bytes = 0

    def __init__(self, *, is_counted: bool = True) -> None:
        self.is_counted = is_counted


class Node:
    up, stalled = True, None


class Engine:
    """An engine with two legs that it counts, seen to work a minute after they were sent."""

    url = "http://d"

    def __init__(self) -> None:
        self.in_ledger = Node()
        self.open_legs = OpenLegs()
        self.open_legs.life = 60.0
        for is_counted in (True, False, True):
            self.open_legs.add(cast("OpenLeg", Leg(is_counted=is_counted)))


def page(running: int, waiting: int = 0) -> Scrape:
    return dataclasses.replace(NO_METRICS, running=float(running), waiting=float(waiting))


class Silences(Recorder):
    only: tuple[type[Event], ...] = (SilenceAllowed,)


@pytest.mark.parametrize(
    ("running", "canaries", "expected"),
    [
        ([2], 0, True),
        ([1, 2], 0, True),  # one has just ended at the engine, and its end is not read yet
        ([1], 0, False),
        ([2, 1], 1, False),  # the second of the first look was our own question
        ([3], 1, True),
    ],
)
async def test_requests_that_an_engine_reports(
    monkeypatch: pytest.MonkeyPatch, running: list[int], canaries: int, expected: bool
) -> None:
    """Fewer than were sent to it, at each look: then one is lost. The last number stays as it
    is.
    """
    monkeypatch.setattr(works, "BETWEEN", 0.0)
    engine, recorder = Engine(), Silences()
    engine.open_legs.canaries = canaries
    numbers = itertools.chain(running, itertools.repeat(running[-1]))

    async def scrape(_: str) -> Scrape:
        return page(next(numbers))

    engines = cast("Any", {engine.url: engine})
    asked = works.Works(engines, scrape, Observers([recorder]), lambda: True, cast("Any", None))
    assert await asked.on_all(engine.url, "first_token") is expected
    assert len(recorder.events) == expected
