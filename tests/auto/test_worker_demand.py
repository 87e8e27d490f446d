"""What several workers count of the demand, one row of numbers each."""

from __future__ import annotations

from pdproxy.kit.shared_rows import SharedRows
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.auto.worker_demand import DEMAND_FLOATS, WorkerMeter
from tests.auto.fleets import H200


def meters(rows: SharedRows, numbers: range) -> list[WorkerMeter]:
    return [WorkerMeter("m", rows.column(number), rows.others(number)) for number in numbers]


def test_a_worker_that_begins_takes_no_history_for_demand() -> None:
    """Nor one whose objective was changed: else an hour's requests would have come within a
    moment.
    """
    rows = SharedRows(2, 4, DEMAND_FLOATS)
    (first,) = meters(rows, range(1))
    for at in range(100):
        first.add(float(at), 1000, 0, 200.0)
    first.exchange(100.0)
    assert first.demand(100.0, WorkTimes(H200, 2048)) is not None
    first.tell_share(0.25)
    (second,) = meters(rows, range(1, 2))
    second.exchange(100.0)
    assert (second._count, second.share) == (0, 0.25)
    first.add(101.0, 1000, 0, 200.0)
    first.exchange(101.0)
    second.exchange(101.0)
    assert (second._count, second._tokens) == (1, 1000)


def test_what_a_successor_counts_is_counted() -> None:
    """It begins at 0 again in the row of the one before."""
    rows = SharedRows(2, 4, DEMAND_FLOATS)
    first, second = meters(rows, range(2))
    for _ in range(3):
        first.add(0.0, 1000, 0, 200.0)
    first.exchange(0.0)
    second.exchange(0.0)
    rows.clear(0)
    second.exchange(1.0)
    (successor,) = meters(rows, range(1))
    successor.add(2.0, 500, 0, 200.0)
    successor.exchange(2.0)
    second.exchange(2.0)
    assert (second._count, second._tokens) == (4, 3500)
