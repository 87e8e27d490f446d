"""How long an engine may be silent: what it came back from, and how long its prompts are."""

from __future__ import annotations

import pytest

from pdproxy.scheduling.pace import LARGE, REMEMBERED, Pace


def test_at_first_only_the_setting_counts() -> None:
    """Nothing is known of a new run, and a long prompt may be a fast engine's."""
    assert Pace().allowed(10, 120, 100 * LARGE, 1.0) == 10


def test_a_compile_at_the_first_request_is_suspicious_once() -> None:
    """An engine that was silent for eight seconds may be silent for as long again, and for some
    time more.
    """
    pace = Pace()
    pace.came_back(8, 100)
    pace.came_back(3, 110)
    assert pace.allowed(10, 120, 0, 120) == 32
    assert pace.allowed(10, 20, 0, 120) == 20, "no longer than the deadline of a prefill"
    assert pace.allowed(30, 20, 0, 120) == 30, "the setting is the least in any case"


def test_a_silence_that_was_judged_wrongly_is_allowed_twice_over() -> None:
    """Not four times: it may have been a standstill."""
    pace = Pace()
    pace.was_judged(12, 100)
    assert pace.allowed(10, 120, 0, 110) == 24
    pace.came_back(8, 110)
    assert pace.allowed(10, 120, 0, 120) == 32


def test_a_silence_is_forgotten_in_time() -> None:
    """One bad minute must not hide a stall for hours."""
    pace = Pace()
    pace.came_back(8, REMEMBERED)
    assert pace.allowed(10, 120, 0, 1.9 * REMEMBERED) == 32
    assert pace.allowed(10, 120, 0, 2.9 * REMEMBERED) == 32
    assert pace.allowed(10, 120, 0, 3.1 * REMEMBERED) == 10
    pace.came_back(8, 10 * REMEMBERED)
    assert pace.allowed(10, 120, 0, 20 * REMEMBERED) == 10


def test_a_long_prompt_among_short_ones_is_not_suspicious_after_the_first() -> None:
    """Its length says how long it takes. A short one says nothing: its time is the queue's."""
    pace = Pace()
    pace.prefilled(LARGE - 1, 50)
    assert pace.allowed(10, 120, LARGE, 1) == 10
    pace.prefilled(4 * LARGE, 12)
    assert pace.allowed(10, 120, 4 * LARGE, 1) == pytest.approx(48)
    assert pace.allowed(10, 120, LARGE, 1) == pytest.approx(12)
    assert pace.allowed(10, 120, LARGE - 1, 1) == 10
    for _ in range(40):
        pace.prefilled(4 * LARGE, 4)
    assert pace.allowed(10, 120, 4 * LARGE, 1) == pytest.approx(16, rel=0.01)
