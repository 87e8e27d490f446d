"""Events: one for each condition that has become another one, never twice for the same, and not too
many.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdproxy_operator.resources import ConditionOf
from pdproxy_operator.transitions import BURST, Rate, event_of, transitions
from tests.operator.resources import proxy, runtime


def condition(kind: str, status: Any, reason: str = "Why") -> ConditionOf:
    return ConditionOf(kind, status, reason, f"{kind} is {status}.", "2026-01-01T00:00:00Z")


def test_only_what_has_changed_is_an_event() -> None:
    before = [condition("Available", "True"), condition("Degraded", "False")]
    assert [*transitions([], before)] == [], "a new resource is no news"
    assert [*transitions(before, before)] == []
    other = msgspec.structs.replace(before[0], message="Another number.")
    assert [*transitions(before, [other, before[1]])] == []
    now = [condition("Available", "True", "Other"), condition("Degraded", "True")]
    assert [*transitions(before, now)] == now


@pytest.mark.parametrize(
    ("kind", "status", "expected"),
    [
        ("Available", "False", "Warning"),
        ("Available", "True", "Normal"),
        ("Available", "Unknown", "Normal"),
        ("Degraded", "True", "Warning"),
        ("Degraded", "False", "Normal"),
        ("ScalingLimited", "True", "Warning"),
        ("Progressing", "True", "Normal"),
        ("Progressing", "False", "Normal"),
    ],
)
def test_what_is_bad_is_a_warning(kind: str, status: str, expected: str) -> None:
    made = event_of(proxy(), condition(kind, status), "operator", 0.0)
    assert made["type"] == expected


def test_the_same_transition_has_the_same_name() -> None:
    one = runtime("p", "prefill")
    first = event_of(one, condition("Available", "False"), "a", 1.0)
    assert first["eventTime"] == "1970-01-01T00:00:01.000000Z"
    assert first["regarding"]["kind"] == "PDRuntime"
    assert first["note"] == "Available False: Available is False."
    second = event_of(one, condition("Available", "False"), "b", 2.0)
    assert second["metadata"] == first["metadata"]
    other = event_of(one, condition("Available", "True"), "a", 1.0)
    assert other["metadata"]["name"] != first["metadata"]["name"]


def test_there_are_not_too_many() -> None:
    now = [0.0]
    rate = Rate(lambda: now[0])
    assert sum(rate.takes() for _ in range(1000)) == BURST
    now[0] += 3
    assert sum(rate.takes() for _ in range(1000)) == 3
    now[0] += 1e6
    assert sum(rate.takes() for _ in range(1000)) == BURST
