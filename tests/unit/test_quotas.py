"""Limits of keys: how fast they fill, what is charged and paid back, and what a new file
changes.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.deciding.local_quotas import LocalQuotas, LocalUse
from pdproxy.kit.errors import LimitError, RefusalReason
from pdproxy.settings.keys import KeyLimits


class Keys:
    """`LocalQuotas` on a clock that a test moves."""

    def __init__(self, **limits: KeyLimits) -> None:
        self.now = 1000.0
        self.limits = limits
        self.quotas = LocalQuotas(lambda: self.limits, lambda: self.now)

    def enter(self, key: str = "a") -> LocalUse | None:
        return self.quotas.begin(key)

    def used(self, key: str = "a") -> LocalUse:
        use = self.enter(key)
        assert use is not None
        return use

    def refused(self, key: str = "a") -> tuple[RefusalReason | None, float | None]:
        with pytest.raises(LimitError) as caught:
            self.enter(key)
        assert caught.value.status == 429
        return caught.value.reason, caught.value.retry_after


def test_keys_without_limits_cost_nothing_and_keep_nothing() -> None:
    keys = Keys(b=KeyLimits(rpm=1))
    assert keys.enter("file:3") is None
    assert keys.quotas._accounts == {}


def test_requests_per_minute() -> None:
    """A minute's requests at once, then one each second; what is refused is not counted."""
    keys = Keys(a=KeyLimits(rpm=60))
    for _ in range(60):
        keys.used().end(0)
    assert keys.refused() == (RefusalReason.KEY_REQUESTS, 1.0)
    keys.now += 0.25
    assert keys.refused() == (RefusalReason.KEY_REQUESTS, 0.75)
    keys.now += 0.75
    keys.used().end(0)
    assert keys.refused()[0] is RefusalReason.KEY_REQUESTS
    keys.now += 3600
    for _ in range(60):
        keys.used().end(0)
    assert keys.refused()[0] is RefusalReason.KEY_REQUESTS


def test_requests_at_once() -> None:
    keys = Keys(a=KeyLimits(inflight=2), b=KeyLimits(inflight=1))
    first, second = keys.used(), keys.used()
    assert keys.refused() == (RefusalReason.KEY_INFLIGHT, None)
    keys.used("b").end(0)
    first.end(0)
    third = keys.used()
    second.end(0)
    third.end(0)
    assert keys.quotas._accounts["a"].inflight == 0


def level(keys: Keys, key: str = "a") -> float:
    """Tokens that a name has left."""
    tokens = keys.quotas._accounts[key].tokens
    assert tokens is not None
    return tokens.level


def kept_out(keys: Keys, prompt: int, most: int | None) -> float | None:
    """A request is refused once it is read; return after how many seconds it may come again."""
    use = keys.used()
    with pytest.raises(LimitError) as caught:
        use.take(prompt, most)
    assert (caught.value.reason, caught.value.status) == (RefusalReason.KEY_TOKENS, 429)
    use.end(0)
    return caught.value.retry_after


def test_what_a_request_may_use_is_reserved_until_its_end() -> None:
    """Requests at the same time count with the most that they may have; what they have not used is
    free again.
    """
    keys = Keys(a=KeyLimits(tpm=6000))
    first, second = keys.used(), keys.used()
    first.take(1000, 3000)
    second.take(500, 1500)
    assert level(keys) == 0
    assert keys.refused() == (RefusalReason.KEY_TOKENS, 0.01)
    first.end(100)
    assert kept_out(keys, 1000, 3000) == 1.0, "the second one may end soon"
    second.end(2000)
    assert level(keys) == 6000 - 100 - 2000
    assert kept_out(keys, 1000, 3000) == pytest.approx(1.0)
    keys.used().take(900, 3000)
    assert level(keys) == 0


@pytest.mark.parametrize(("answers", "paid"), [(1, 1000), (2, 2000), (100, 4000)])
def test_who_leaves_answers_without_a_limit_pays_for_each(answers: int, paid: int) -> None:
    """But they reserve no more than one: most clients stay, and pay what was made."""
    keys = Keys(a=KeyLimits(tpm=4000))
    use = keys.used()
    use.take(1, None, answers)
    assert level(keys) == 3000
    use.end(0, unseen=1.0)
    assert level(keys) == 4000 - paid


@pytest.mark.parametrize("tpm", [1, 7, 2000, 10**12])
def test_four_requests_without_a_limit_at_once(tpm: int) -> None:
    keys = Keys(a=KeyLimits(tpm=tpm))
    uses = [keys.used() for _ in range(4)]
    for use in uses[: 4 if tpm >= 4 else 1]:
        use.take(1, None)
    assert keys.refused()[0] is RefusalReason.KEY_TOKENS
    for use in uses:
        use.end(0)
    assert level(keys) == pytest.approx(tpm)


def test_a_whole_minute_is_the_most_that_a_request_needs() -> None:
    """One that names more is served by a key that has used nothing, and pays its debt later; a long
    prompt needs a quarter.
    """
    for prompt, most, needed in (
        (10, 10**9, 600),
        (10, 10**400, 600),
        (10**6, 4, 154),
        (10**6, None, 150),
    ):
        keys = Keys(a=KeyLimits(tpm=600))
        one = keys.used()
        one.take(prompt, most)
        assert level(keys) == 0
        assert keys.refused()[0] is RefusalReason.KEY_TOKENS
        one.end(500)
        assert kept_out(keys, prompt, most) == pytest.approx((needed - 100) / 10)
        keys.now += (needed - 100) / 10
        again = keys.used()
        again.take(prompt, most)
        assert level(keys) == pytest.approx(needed - 600)
        assert keys.refused() == (
            RefusalReason.KEY_TOKENS,
            1.0 if needed < 600 else pytest.approx(0.1),
        ), "it may end soon"
        again.end(1200)
        assert keys.refused()[0] is RefusalReason.KEY_TOKENS
        keys.now += (1200 - needed) / 10 + 0.1
        assert keys.enter() is not None


def test_an_answer_that_nobody_has_seen_counts_with_its_limit() -> None:
    for most, wanted in ((400, 400), (None, 1500), (10**9, 6000)):
        keys = Keys(a=KeyLimits(tpm=6000))
        one = keys.used()
        one.take(100, most)
        one.end(100, unseen=1.0)
        assert level(keys) == 6000 - 100 - wanted
    keys = Keys(a=KeyLimits(tpm=6000))
    one = keys.used()
    one.take(100, 400)
    one.end(130, unseen=0.25)
    assert level(keys) == 6000 - 130 - 100


def test_a_debt_is_paid_before_the_next_request() -> None:
    """One request may take more than a minute has; then the key waits for as long as that takes."""
    keys = Keys(a=KeyLimits(tpm=600))
    one = keys.used()
    one.take(100, 100)
    one.end(9000)  # one request costs ten minutes at most
    reason, seconds = keys.refused()
    assert reason is RefusalReason.KEY_TOKENS
    assert seconds == pytest.approx(540.1)
    keys.now += 539
    assert keys.refused()[0] is RefusalReason.KEY_TOKENS
    keys.now += 1.2
    assert keys.enter() is not None


def test_what_was_not_served_is_not_charged() -> None:
    """Unless it becomes known behind the end that an engine has computed it."""
    keys = Keys(a=KeyLimits(tpm=600))
    for _ in range(10):
        one = keys.used()
        one.take(100, 400)
        one.end(0)
    assert level(keys) == 600
    one.add(100)
    assert level(keys) == 500


@given(st.integers(100, 5000), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_no_more_tokens_than_a_minute_and_its_refill(tpm: int, seed: int) -> None:
    """Whatever requests come at once: of those that use no more than they may, all together use
    what the limit allows.
    """
    keys, chance = Keys(a=KeyLimits(tpm=tpm)), random.Random(seed)
    began, used = keys.now, 0
    going: list[tuple[LocalUse, int]] = []
    for _ in range(300):
        keys.now += chance.choice([0.0, 0.01, 0.3, 2.0])
        if going and chance.random() < 0.4:
            use, tokens = going.pop(chance.randrange(len(going)))
            use.end(tokens)
            used += tokens
        prompt, most = chance.randrange(1, tpm // 4), chance.randrange(1, 400)
        new: LocalUse | None = None
        try:
            new = keys.used()
            new.take(prompt, most)
        except LimitError:
            if new is not None:
                new.end(0)
            continue
        going.append((new, min(chance.randrange(prompt, prompt + most + 1), tpm)))
    for use, tokens in going:
        use.end(tokens)
        used += tokens
    assert used <= tpm + (keys.now - began) * tpm / 60 + 1
    assert keys.quotas._accounts["a"].reserved == pytest.approx(0)


def test_a_new_file_gives_nobody_a_new_minute() -> None:
    """What a name has used counts on under its new limits. A name that is gone is forgotten once it
    has no requests.
    """
    keys = Keys(a=KeyLimits(rpm=10), b=KeyLimits(rpm=10), c=KeyLimits(rpm=10))
    for name in "abc":
        for _ in range(10):
            keys.used(name).end(0)
    running = keys.quotas._accounts["c"]
    running.inflight += 1
    keys.limits = {"a": KeyLimits(rpm=20)}
    for _ in range(10):
        keys.used().end(0)
    assert keys.refused()[0] is RefusalReason.KEY_REQUESTS
    assert set(keys.quotas._accounts) == {"a", "c"}
    running.inflight -= 1
    keys.limits = {"a": KeyLimits(rpm=5, tpm=1), "b": KeyLimits(rpm=10)}
    assert keys.refused()[0] is RefusalReason.KEY_REQUESTS, "it had used more than it may now"
    assert set(keys.quotas._accounts) == {"a"}
    assert keys.enter("b") is not None


def test_limits_that_come_and_go_leave_requests_that_run_alone() -> None:
    keys = Keys(a=KeyLimits(tpm=100))
    one = keys.used()
    one.take(10, 40)
    keys.limits = {"a": KeyLimits(inflight=5)}
    two = keys.used()
    two.take(500, 500)
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
