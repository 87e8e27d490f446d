"""The operator's decisions with pdproxy's own measure of the demand, in virtual time: most requests
within the SLO, for few more GPU hours than one needs who knows the day (benchmarks/autoscale.py).
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import autoscale
from pdproxy.scheduling.ledger_engine import Role

ROLES = (Role.PREFILL, Role.DECODE)


def test_a_day_in_three_hours() -> None:
    """The times of engines and of the operator are as short as the day, as far as they can be."""
    scene = autoscale.scene_of(
        ROLES, autoscale.made_up(), hours=3.0, rate=1.5, load_s=60.0, window_s=75.0, bursts=()
    )
    start = dict.fromkeys(ROLES, 2)
    operator, share = autoscale.measured(scene, start, autoscale.Operator(scene, down_s=180))
    schedule = autoscale.scheduled(autoscale.demand_of(scene, start), dict.fromkeys(ROLES, 1.06))
    oracle, known = autoscale.followed(scene, schedule)
    assert share >= 0.95
    assert known >= 0.95
    assert operator.gpu_s <= 1.2 * oracle.gpu_s
    prefill = [counts[Role.PREFILL] for _, counts in operator.course]
    assert max(prefill) >= 2 * min(prefill)  # it has followed the day
