"""Runs of engines that are removed and come back: what waits there for KV that will not come still
does without a restart.
"""

from __future__ import annotations

import dataclasses

import pytest

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.scheduling import runs
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.serving.kv import stuck as stuck_module
from pdproxy.serving.kv.stuck import StuckKv
from pdproxy.transfer.contract import PushedToDecode
from tests.fakes.registry import unused_client

D, E = "http://d:8000", "http://e:8000"
EVIDENCE = Evidence(frozenset("m"), "1", 16, (), 0, 1.0)
LATER = dataclasses.replace(EVIDENCE, started=2.0)
SILENT = dataclasses.replace(EVIDENCE, started=0.0)


class World:
    """A ledger, a registry, and what is stuck."""

    def __init__(self, *, stuck_for: float | None = None) -> None:
        self.ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
        self.engines = EngineRegistry(self.ledger)
        self.ups: list[tuple[str, bool]] = []
        self.ledger.when_up(lambda url, restarted: self.ups.append((url, restarted)))
        self.stuck = StuckKv(
            self.engines.known, dataclasses.replace(PushedToDecode(), stuck_for=stuck_for)
        )

    def add(self, url: str = D, evidence: Evidence | None = EVIDENCE) -> None:
        self.engines.add(EngineSpec(url, Role.DECODE), unused_client(url))
        if evidence is not None:
            self.ledger.mark_up(url, evidence)

    def count(self, url: str = D, now: float = 0.0) -> int:
        return self.stuck.snapshot(now).get(url, (0, 0.0))[0]


def test_one_that_comes_back_counts_on() -> None:
    """It has shown its start time: nothing has freed its blocks. Until it is back, and probed, it
    has no series.
    """
    w = World()
    w.add()
    run = w.stuck.run_of(D)
    for _ in range(2):
        w.stuck.add(D, run, 0.0)
    w.engines.remove(D)
    assert w.count() == 0
    assert w.stuck.shortcomings(0.0) == []
    w.stuck.add(D, run, 0.0)  # a leg that was under way
    w.add(evidence=None)
    assert w.count() == 0
    w.stuck.add(D, run, 0.0)  # it may still be the same process
    w.ledger.mark_up(D, EVIDENCE)
    assert w.count() == 4
    assert w.ups == [(D, False)] * 2, "it came up twice, and was never restarted"
    w.ledger.mark_up(D, LATER)
    assert w.count() == 0
    w.stuck.add(D, run, 0.0)
    assert w.count() == 0, "a leg of the run before"


@pytest.mark.parametrize(
    ("before", "after"), [(EVIDENCE, LATER), (SILENT, SILENT)], ids=["restarted", "no start time"]
)
def test_another_process_begins_at_0(before: Evidence, after: Evidence) -> None:
    """And without start times nothing shows that it is the same."""
    w = World()
    w.add(evidence=before)
    run = w.stuck.run_of(D)
    w.stuck.add(D, run, 0.0)
    w.engines.remove(D)
    w.add(evidence=after)
    assert w.stuck.run_of(D) != run
    assert w.count() == 0
    w.stuck.add(D, run, 0.0)
    assert w.count() == 0
    w.stuck.add(D, w.stuck.run_of(D), 0.0)
    assert w.count() == 1


def test_one_that_is_removed_before_its_probe() -> None:
    """What was kept of it stays."""
    w = World()
    w.add()
    w.stuck.add(D, w.stuck.run_of(D), 0.0)
    w.engines.remove(D)
    w.add(evidence=None)
    w.engines.remove(D)
    w.add()
    assert w.count() == 1


def test_what_engines_free_after_a_time_is_not_counted_on() -> None:
    """Time goes on while an engine is out of the pool."""
    w = World(stuck_for=10)
    w.add()
    run = w.stuck.run_of(D)
    w.stuck.add(D, run, 0.0)
    w.stuck.add(D, run, 5.0)
    w.engines.remove(D)
    w.add()
    assert w.count(now=9.0) == 2
    assert w.count(now=11.0) == 1
    assert w.count(now=15.0) == 0


def test_engines_that_never_come_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in DNS may show new addresses for ever."""
    monkeypatch.setattr(runs, "MAX_REMOVED", 3)
    monkeypatch.setattr(stuck_module, "MAX_REMOVED", 3)
    w = World()
    urls = [f"http://d{number}:8000" for number in range(6)]
    for url in urls:
        w.add(url)
        w.stuck.add(url, w.stuck.run_of(url), 0.0)
        w.engines.remove(url)
    assert repr(w.ledger.runs) == "<Runs of 3 removed engines>"
    assert len(w.stuck._by_engine) == 4, "only a new entry makes others go: one more at most"
    for url in urls:
        w.add(url)
    assert [w.count(url) for url in urls] == [0, 0, 0, 1, 1, 1]


def test_one_where_nothing_waits_is_forgotten() -> None:
    """Once it is not needed any more. One with something stuck is remembered, for when it is
    back.
    """
    w = World()
    for url in (D, E):
        w.add(url)
    before = [w.stuck.run_of(url) for url in (D, E)]
    w.engines.when_forgotten(lambda url: None if w.stuck.holds(url) else w.ledger.runs.forget(url))
    w.stuck.add(D, before[0], 0.0)
    for url in (D, E):
        w.engines.remove(url)
    assert not w.engines.forget_idle()
    for url in (D, E):
        w.add(url)
    assert w.stuck.run_of(D) == before[0]
    assert w.stuck.run_of(E) not in (None, before[1])
    assert w.count() == 1
