"""Traffic that the profile was not fitted to is named while it lasts, and a while longer."""

from __future__ import annotations

from collections import deque

import pytest

from pdproxy.engine_model.fitted import Compared, FittedRanges, Ranges
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from tests.auto.fleets import ask, auto, ledger

FITTED = FittedRanges(
    prompt_tokens=(100, 8000),
    answer_tokens=(10, 300),
    sequences=(0, 8),
    chunk=(512, 8192),
    compared=[Compared(where=Ranges(prompt_tokens=(100, 20_000)), off={"ttft": -0.3})],
)


def serve(
    of: Ledger, now: float, requests: int, tokens: int, *, answer: int = 100, at_once: int = 2
) -> float:
    """Have ten requests a second come, of which so many decode at once. Return when it ends."""
    waiting: deque[Lease] = deque()
    for _ in range(requests):
        now += 0.1
        assignment = of.place(ask(now, tokens), split=False)
        assert assignment is not None
        of.began(assignment.leases[0], now)
        waiting.append(assignment.leases[0])
        while len(waiting) > at_once:
            of.close(waiting.popleft(), Verdict.GOOD, now, answer)
    for lease in waiting:
        of.close(lease, Verdict.GOOD, now, answer)
    return now


@pytest.mark.parametrize(
    ("tokens", "answer", "at_once", "said"),
    [
        (17_000, 100, 2, "prompts of 25000 tokens (fitted to 100 to 8000)"),
        (30, 100, 2, "prompts of 24 tokens"),
        (4000, 900, 2, "answers of "),
        (4000, 100, 40, " sequences at once per engine (fitted to 0 to 8)"),
    ],
)
def test_what_lies_outside_is_said_for_a_while(
    tokens: int, answer: int, at_once: int, said: str
) -> None:
    placement = auto(fitted=lambda _: FITTED)
    of = ledger(placement, [Role.ANY])
    now = serve(of, 0.0, 400, 4000)
    assert of.shortcomings(now) == []
    now = serve(of, now, 600, tokens, answer=answer, at_once=at_once)
    (text,) = of.shortcomings(now)
    assert text.startswith("placement auto: the profile was not fitted to ")
    assert said in text
    assert of.shortcomings(now + 61.0) == []


def test_a_profile_that_says_no_range_says_nothing() -> None:
    of = ledger(auto(), [Role.ANY])
    assert of.shortcomings(serve(of, 0.0, 600, 30_000)) == []


def test_how_wrong_predictions_are_is_said_where_it_was_measured() -> None:
    of = ledger(auto(fitted=lambda _: FITTED), [Role.ANY])
    (text,) = of.shortcomings(serve(of, 0.0, 600, 9000))
    assert text.endswith("predictions were wrong: TTFT by 30 % too short at worst")
    (text,) = of.shortcomings(serve(of, 100.0, 600, 40_000))
    assert text.endswith("how wrong predictions are there is unknown")
