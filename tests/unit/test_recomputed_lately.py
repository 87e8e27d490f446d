"""Which part of its KV a decode engine computed again lately: soon seen, and soon forgotten."""

from __future__ import annotations

from pdproxy.fleet.transfers import Transfers
from pdproxy.observe.events import KvCounted, Observers
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Role


def test_the_last_minute_counts_most() -> None:
    """An engine that computes all again is seen at once; one that works again, after minutes."""
    now = 0.0
    ledger = Ledger(
        [EngineSpec("d1", Role.DECODE), EngineSpec("d2", Role.DECODE)],
        LedgerOptions(breaker_failures=3, breaker_cooldown=5),
    )
    transfers = Transfers(ledger, Observers([]), lambda: now)

    def minute(moved: int, missing: int) -> float:
        nonlocal now
        for _ in range(12):
            now += 5
            transfers.notify(KvCounted("d1", moved, missing))
        return transfers.recomputed()["d1"]

    assert transfers.recomputed() == {}, "nothing is known of engines that get no KV"
    assert minute(1000, 0) == 0
    now += 5
    transfers.notify(KvCounted("d1", 0, 1000))
    assert transfers.recomputed()["d1"] > 0.05
    assert minute(0, 1000) > 0.6
    assert minute(1000, 0) > 0.05
    assert minute(1000, 0) + minute(1000, 0) + minute(1000, 0) < 0.3
    assert minute(1000, 0) < 0.02

    now += 301
    assert transfers.recomputed() == {}
    transfers.notify(KvCounted("d1", 1, 0))
    ledger.remove("d1")
    assert transfers.recomputed() == {}
    transfers.notify(KvCounted("d2", 1, 3))
    assert transfers.recomputed() == {"d2": 0.75}
