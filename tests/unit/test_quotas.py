"""Limits of keys: how fast they fill, what is charged and paid back, and what a new file changes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.kit.errors import LimitError, Reason
from pdproxy.serving.access.quotas import Quotas, Use
from pdproxy.settings.key_lines import KeyLimits


class Keys:
    """Quotas on a clock that a test moves."""

    def __init__(self, **limits: KeyLimits) -> None:
        self.now = 1000.0
        self.limits = limits
        self.quotas = Quotas(lambda: self.limits, lambda: self.now)

    def enter(self, key: str | None = "a") -> Use | None:
        return self.quotas.enter(key)

    def used(self, key: str = "a") -> Use:
        use = self.enter(key)
        assert use is not None
        return use

    def refused(self, key: str = "a") -> tuple[Reason | None, float | None]:
        with pytest.raises(LimitError) as caught:
            self.enter(key)
        assert caught.value.status == 429
        return caught.value.reason, caught.value.retry_after


def test_keys_without_limits_cost_nothing_and_keep_nothing() -> None:
    keys = Keys(b=KeyLimits(rpm=1))
    assert keys.enter(None) is None
    assert keys.enter("file:3") is None
    assert keys.quotas._accounts == {}


def test_requests_per_minute() -> None:
    """A minute's requests at once, then one each second; what is refused is not counted."""
    keys = Keys(a=KeyLimits(rpm=60))
    for _ in range(60):
        keys.used().end(0)
    assert keys.refused() == (Reason.KEY_REQUESTS, 1.0)
    keys.now += 0.25
    assert keys.refused() == (Reason.KEY_REQUESTS, 0.75)
    keys.now += 0.75
    keys.used().end(0)
    assert keys.refused()[0] is Reason.KEY_REQUESTS
    keys.now += 3600
    for _ in range(60):
        keys.used().end(0)
    assert keys.refused()[0] is Reason.KEY_REQUESTS


def test_requests_at_once() -> None:
    keys = Keys(a=KeyLimits(inflight=2), b=KeyLimits(inflight=1))
    first, second = keys.used(), keys.used()
    assert keys.refused() == (Reason.KEY_INFLIGHT, None)
    keys.used("b").end(0)
    first.end(None)
    third = keys.used()
    second.end(None)
    third.end(None)
    assert keys.quotas._accounts["a"].inflight == 0


def test_tokens_are_charged_before_and_corrected_after() -> None:
    """Requests at the same time count with what they are likely to have."""
    keys = Keys(a=KeyLimits(tpm=6000))
    first, second = keys.used(), keys.used()
    first.charge(4000)
    second.charge(4000)
    reason, seconds = keys.refused()
    assert reason is Reason.KEY_TOKENS
    assert seconds == pytest.approx(20.01)
    first.end(100)
    third = keys.used()
    third.charge(1000)
    second.end(None)
    third.end(1000)
    assert keys.quotas._accounts["a"].tokens is not None
    assert keys.quotas._accounts["a"].tokens.level == 6000 - 100 - 4000 - 1000


def test_a_debt_is_paid_before_the_next_request() -> None:
    """One request may take more than a minute has; then the key waits for as long as that takes."""
    keys = Keys(a=KeyLimits(tpm=600))
    one = keys.used()
    one.charge(100)
    one.end(6600)
    reason, seconds = keys.refused()
    assert reason is Reason.KEY_TOKENS
    assert seconds == pytest.approx(600.1)
    keys.now += 599
    assert keys.refused()[0] is Reason.KEY_TOKENS
    keys.now += 1.2
    assert keys.enter() is not None


def test_what_was_not_served_is_not_charged() -> None:
    keys = Keys(a=KeyLimits(tpm=600))
    for _ in range(10):
        one = keys.used()
        one.charge(500)
        one.end(0)
    assert keys.enter() is not None


def test_a_new_file_gives_nobody_a_new_minute() -> None:
    """What a name has used counts on under its new limits. A name that is gone is forgotten once it has no requests."""
    keys = Keys(a=KeyLimits(rpm=10), b=KeyLimits(rpm=10), c=KeyLimits(rpm=10))
    for name in "abc":
        for _ in range(10):
            keys.used(name).end(0)
    running = keys.quotas._accounts["c"]
    running.inflight += 1
    keys.limits = {"a": KeyLimits(rpm=20)}
    for _ in range(10):
        keys.used().end(0)
    assert keys.refused()[0] is Reason.KEY_REQUESTS
    assert set(keys.quotas._accounts) == {"a", "c"}
    running.inflight -= 1
    keys.limits = {"a": KeyLimits(rpm=5, tpm=1), "b": KeyLimits(rpm=10)}
    assert keys.refused()[0] is Reason.KEY_REQUESTS, "it had used more than it may now"
    assert set(keys.quotas._accounts) == {"a"}
    assert keys.enter("b") is not None


def test_limits_that_come_and_go_leave_requests_that_run_alone() -> None:
    keys = Keys(a=KeyLimits(tpm=100))
    one = keys.used()
    one.charge(50)
    keys.limits = {"a": KeyLimits(inflight=5)}
    two = keys.used()
    two.charge(1000)
    keys.limits = {"a": KeyLimits(tpm=100)}
    keys.used().end(0)
    one.end(10**6)
    two.end(10)
    assert keys.quotas._accounts["a"].inflight == 0


@given(st.integers(1, 600), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_never_more_than_a_minute_and_its_refill(rpm: int, seed: int) -> None:
    """In any time of T seconds, no more than one minute's requests and what fills in T."""
    keys, chance = Keys(a=KeyLimits(rpm=rpm)), random.Random(seed)
    taken: list[float] = []
    for _ in range(400):
        keys.now += chance.choice([0.0, 0.01, 0.3, 2.0])
        try:
            keys.used().end(0)
        except LimitError:
            continue
        taken.append(keys.now)
    for begin in range(0, len(taken), 7):
        for end in range(begin, len(taken), 11):
            assert end - begin + 1 <= rpm + (taken[end] - taken[begin]) * rpm / 60 + 1e-6
