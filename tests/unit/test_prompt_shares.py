"""The window of how prompts were served, and when its share is a problem."""

from __future__ import annotations

import pytest

from pdproxy.app.readiness import judged
from pdproxy.observe.events import LegTimes
from pdproxy.observe.prompt_shares import (
    FEW,
    PART,
    PROMPT_TOKENS,
    WINDOW,
    PoolPrompts,
    PromptShare,
    PromptShares,
)
from pdproxy.web.operation import OperationState, Readiness
from pdproxy.wire.route_form import Alone
from pdproxy.workers.admin import prompts_of_all
from pdproxy.workers.shown_of_all import together

D = "http://d"


class Counted:
    """Shares at a time that a test sets, beside prefill engines that are idle or not."""

    def __init__(self) -> None:
        self.now, self.idle = 1000.0, True
        self.shares = PromptShares(lambda: self.now)

    def add(self, count: int, why: str | None, tokens: int = 100, url: str | None = D) -> None:
        for _ in range(count):
            is_beside = self.idle and url == D
            times = LegTimes(decode=url, why_alone=why, beside_idle=is_beside)
            self.shares.add(tokens, times)

    @property
    def problem(self) -> str | None:
        return self.shares.window().problem()


def test_most_prompts_alone_beside_idle_prefill_engines() -> None:
    c = Counted()
    c.add(10, None)
    c.add(8, "n")
    c.add(2, "route")
    assert c.problem == (
        "50% of the prompt tokens of the last 5 minutes was computed by decode engines alone while "
        "a prefill engine had no request (n 40%, route 10%): have clients send what can be split, "
        "or let prefill engines serve prompts whole, too (nodes[].serves_whole)"
    )
    assert c.shares.window().spelled() == (
        "prompt tokens of the last 5 minutes: 50% split, 50% served by one engine alone (n 40%, "
        "route 10%), 50% while a prefill engine had no request"
    )


def test_a_failure_is_the_operators() -> None:
    c = Counted()
    c.add(FEW, "no_handle")
    c.add(1, "n")
    assert (c.problem or "").endswith(
        ": the log and the other details say why prompts are not split"
    )


@pytest.mark.parametrize(("split", "is_problem"), [(20, False), (19, True)])
def test_a_third_of_the_tokens(split: int, is_problem: bool) -> None:
    c = Counted()
    c.add(split, None)
    c.add(10, "echo")
    assert (c.problem is not None) is is_problem


def test_few_prompts_are_no_problem() -> None:
    c = Counted()
    c.add(FEW - 1, "n", 100_000)
    assert c.problem is None
    c.add(1, "n", 1)
    assert c.problem is not None


@pytest.mark.parametrize("why", ["short_prompt", "decided"])
def test_what_nobody_would_split_is_no_problem(why: str) -> None:
    c = Counted()
    c.add(50, why)
    assert c.problem is None
    assert c.shares.window().alone == {why: 5000}


def test_busy_prefill_engines_and_other_engines_are_no_problem() -> None:
    c = Counted()
    c.add(50, "n", url="http://aggregated")
    c.add(50, "n", url=None)
    c.idle = False
    c.add(50, "n")
    assert c.problem is None
    assert c.shares.window().spelled() == (
        "prompt tokens of the last 5 minutes: 0% split, 100% served by one engine alone (n 100%)"
    )


def test_every_reason_has_its_series() -> None:
    """What is counted shows nothing else."""
    c = Counted()
    for reason in Alone:
        c.add(1, reason.value)
    assert set(dict(c.shares.samples())) == set(PROMPT_TOKENS.series)


def test_nothing_was_served() -> None:
    c = Counted()
    assert c.shares.window() == PromptShare()
    assert c.shares.window().spelled() == "no prompts in the last 5 minutes"
    assert c.problem is None


def test_what_is_older_than_the_window_is_forgotten() -> None:
    c = Counted()
    c.add(20, "n")
    c.now += WINDOW
    assert c.shares.window().prompts == 20
    c.now += PART
    assert c.shares.window() == PromptShare()
    assert c.problem is None
    assert dict(c.shares.samples())["beside_idle", "n"] == 2000


def test_parts_come_and_go_while_requests_come() -> None:
    c = Counted()
    begun = c.now
    for second in range(2000):
        c.now = begun + second
        c.add(1, None, 1)
        assert min(second + 1, WINDOW) <= c.shares.window().split <= WINDOW + PART
        assert len(c.shares._parts) <= WINDOW / PART + 1
    c.now += 10_000.0
    c.add(1, "n", 7)
    assert c.shares.window() == PromptShare(0, {}, {"n": 7}, 1)


def test_all_series_of_the_metric_are_there() -> None:
    c = Counted()
    c.add(1, None)
    c.add(1, "n")
    c.add(1, "decided")
    found = dict(c.shares.samples())
    assert set(found) == set(PROMPT_TOKENS.series)
    assert {labels: tokens for labels, tokens in found.items() if tokens} == {
        ("split", "none"): 100,
        ("beside_idle", "n"): 100,
        ("alone", "decided"): 100,
    }


def _ready(**served: PromptShare) -> Readiness:
    return Readiness(OperationState.OK, None, ["a"], served)


def test_several_workers_are_judged_together() -> None:
    """Five prompts of each are few; of two whose sums are even, one alone would be judged."""
    few = PromptShare(0, {}, {"n": 50}, 5)
    assert judged(_ready(p=few)).details == ["a"]
    found = judged(together({0: _ready(p=few), 1: _ready(p=few)})).details
    assert found[0] == "a"
    assert len(found) == 2
    assert found[1].startswith("100% of")
    much, split = PromptShare(0, {}, {"n": 500}, 50), PromptShare(5000)
    assert len(judged(_ready(p=much)).details) == 2
    assert judged(together({0: _ready(p=much), 1: _ready(p=split)})).details == ["a"]


def test_pools_are_judged_one_by_one() -> None:
    much = PromptShare(0, {}, {"n": 500}, 50)
    found = judged(_ready(large=much, small=PromptShare(5000))).details
    assert len(found) == 2
    assert found[1].startswith("pool large: 100% of")


def test_the_admin_api_shows_the_sum_of_all_workers() -> None:
    one, other = PromptShare(1, {"n": 2}, {"echo": 3}, 1), PromptShare(10, {"n": 20}, {"n": 30}, 2)
    told = [[PoolPrompts("p", other), PoolPrompts("q", other)], []]
    assert prompts_of_all([PoolPrompts("p", one)], told) == [
        PoolPrompts("p", PromptShare(11, {"n": 22}, {"echo": 3, "n": 30}, 3))
    ]
