"""Limits of keys over several workers: exact in any course, also where workers are killed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.kit.errors import LimitError, RefusalReason
from pdproxy.kit.shared_table import SharedTable, key_of
from pdproxy.serving.access.quotas import Quotas, Use
from pdproxy.serving.access.worker_quotas import KEPT, MEASURES, TOKENS, WorkerQuotas
from pdproxy.settings.keys import KeyLimits


class Workers:
    """Quotas of several workers on one clock."""

    def __init__(self, count: int, **limits: KeyLimits) -> None:
        self.now = 1000.0
        self.limits = limits
        self.table = SharedTable(count, 16, MEASURES, KEPT)
        self.all = [self.made(number) for number in range(count)]

    def made(self, number: int) -> WorkerQuotas:
        return WorkerQuotas(
            lambda: self.limits,
            lambda: self.now,
            column=self.table.column(number),
            others=self.table.others(number),
        )

    def enter(self, number: int, key: str = "a") -> Use | None:
        return self.all[number].enter(key)

    def killed(self, number: int) -> None:
        self.table.clear(number)
        self.all[number] = self.made(number)


def _admitted(workers: Workers, count: int) -> list[Use]:
    """Let requests come at the workers in turn until one is refused."""
    found: list[Use] = []
    try:
        for number in range(1000):
            use = workers.enter(number % count)
            assert use is not None
            found.append(use)
    except LimitError:
        return found
    raise AssertionError("nothing is refused")


def test_requests_at_once() -> None:
    workers = Workers(3, a=KeyLimits(inflight=4))
    uses = _admitted(workers, 3)
    assert len(uses) == 4
    with pytest.raises(LimitError) as refused:
        workers.enter(2)
    assert refused.value.reason is RefusalReason.KEY_INFLIGHT
    uses[0].end(1)
    assert workers.enter(2) is not None
    with pytest.raises(LimitError):
        workers.enter(0)


def test_requests_per_minute() -> None:
    """A minute's requests at once, from any worker; then one each second."""
    workers = Workers(4, a=KeyLimits(rpm=60))
    for use in _admitted(workers, 4):
        use.end(0)
    assert sum(one._accounts["a"].inflight for one in workers.all) == 0
    with pytest.raises(LimitError) as refused:
        workers.enter(3)
    assert (refused.value.reason, refused.value.retry_after) == (RefusalReason.KEY_REQUESTS, 1.0)
    workers.now += 10
    assert len(_admitted(workers, 4)) == 10


def test_tokens_per_minute() -> None:
    """What one worker has reserved is reserved in all; the end puts what was used in its place, and
    more may come behind it.
    """
    workers = Workers(2, a=KeyLimits(tpm=600))
    first = workers.enter(0)
    assert first is not None
    first.reserve(100, 400)
    second = workers.enter(1)
    assert second is not None
    with pytest.raises(LimitError) as refused:
        second.reserve(100, 40)
    assert refused.value.reason is RefusalReason.KEY_TOKENS
    assert refused.value.retry_after == pytest.approx(4.0)
    second.reserve(50, 50)
    with pytest.raises(LimitError):
        workers.enter(0)
    second.end(0)
    first.end(300)
    assert workers.enter(1) is not None
    assert workers.all[1]._accounts["a"].tokens is not None
    assert workers.all[1]._accounts["a"].tokens.level == pytest.approx(300)
    first.add(200)
    assert workers.enter(1) is not None
    assert workers.all[1]._accounts["a"].tokens.level == pytest.approx(100)


def test_a_new_worker_gives_nobody_a_new_minute() -> None:
    """What a dead one has used counts, in it and in the others; what it served does not."""
    workers = Workers(2, a=KeyLimits(rpm=60, inflight=50))
    for _ in range(40):
        assert workers.enter(0) is not None
    workers.killed(0)
    assert len(_admitted(workers, 2)) == 20
    workers.killed(0)
    workers.killed(1)
    with pytest.raises(LimitError) as refused:
        workers.enter(0)
    assert refused.value.reason is RefusalReason.KEY_REQUESTS


def test_a_limit_that_changes_changes_what_is_left() -> None:
    """By the difference, and once, whichever worker is asked first; a limit that is new begins with
    a whole minute.
    """
    workers = Workers(2, a=KeyLimits(rpm=2))
    assert len(_admitted(workers, 2)) == 2
    workers.limits = {"a": KeyLimits(rpm=5)}
    assert len(_admitted(workers, 2)) == 3
    workers.limits = {"a": KeyLimits(rpm=1)}
    with pytest.raises(LimitError):
        workers.enter(0)
    workers.now += 300
    assert len(_admitted(workers, 2)) == 1
    workers.limits = {"a": KeyLimits(tpm=60)}
    use = workers.enter(1)
    assert use is not None
    use.reserve(20, 40)
    with pytest.raises(LimitError):
        workers.enter(0)


def test_more_names_than_slots_count_for_themselves() -> None:
    """Their limits hold in each worker alone."""
    workers = Workers(2, **{f"k{number}": KeyLimits(rpm=2) for number in range(40)})
    for number in range(40):
        for worker in (0, 1):
            workers.enter(worker, f"k{number}")
    with pytest.raises(LimitError):
        workers.enter(0, "k0")
    assert workers.enter(0, "k39") is not None


def test_names_that_come_and_go() -> None:
    """Thousands of them, in workers that are killed now and then: the slots of those that are gone
    are free.
    """
    workers = Workers(2)
    for turn in range(400):
        workers.limits = {f"k{turn * 4 + at}": KeyLimits(rpm=2) for at in range(4)}
        for name in workers.limits:
            for number in (0, 1):
                use = workers.enter(number, name)
                assert use is not None
                use.end(1)
            with pytest.raises(LimitError):  # it is shared: the other one's request counts
                workers.enter(turn % 2, name)
        if turn % 50 == 49:
            workers.killed(turn // 50 % 2)
    assert [len(one._used) for one in workers.all] == [4, 0]
    workers.limits = {}
    for number in (0, 1):
        assert workers.enter(number) is None
        assert not workers.table.column(number).keys()


@settings(max_examples=80)
@given(st.integers(1, 4), st.integers(0, 2**32), st.booleans())
def test_workers_admit_what_one_process_admits(count: int, seed: int, kills: bool) -> None:
    """The same requests at the same times, at workers by chance: the same ones are refused, also
    where workers are killed.
    """
    chance = random.Random(seed)
    limits = KeyLimits(rpm=120, tpm=5000, inflight=None if kills else 6)
    workers, one = Workers(count, a=limits), Quotas(lambda: {"a": limits}, lambda: workers.now)
    going: list[tuple[Use, Use, float]] = []
    for _ in range(150):
        workers.now += chance.random() * 0.8
        while going and chance.random() < 0.5:
            shared, alone, tokens = going.pop(chance.randrange(len(going)))
            for use in (shared, alone):
                use.end(int(tokens))
        if kills and chance.random() < 0.05:
            for shared, alone, tokens in going:  # what was open is not known to the end
                for use in (shared, alone):
                    use.end(int(tokens))
            going = []
            workers.killed(chance.randrange(count))
        tokens = float(chance.randrange(10, 400))
        outcomes: list[Use | None] = []
        for enter in (lambda: workers.enter(chance.randrange(count)), lambda: one.enter("a")):
            try:
                outcomes.append(enter())
            except LimitError:
                outcomes.append(None)
        shared_use, alone_use = outcomes
        assert (shared_use is None) == (alone_use is None)
        if shared_use is not None and alone_use is not None:
            prompt, most = int(tokens), chance.choice([None, 0, 300, 2000])
            refused: list[bool] = []
            for use in (shared_use, alone_use):
                try:
                    use.reserve(prompt, most)
                except LimitError:
                    refused.append(True)
                else:
                    refused.append(False)
            assert refused[0] == refused[1]
            going.append((shared_use, alone_use, tokens * chance.random() * 2))


@pytest.mark.parametrize("tokens", [2**40, 10**30])
def test_use_without_bound_ends_all_the_same(tokens: int) -> None:
    """Sums wrap and levels are cut: the key is in debt everywhere, serves nothing more, and no
    request fails otherwise.
    """
    workers = Workers(2, a=KeyLimits(tpm=600, inflight=20), b=KeyLimits(tpm=10**30))
    uses = [workers.enter(0) for _ in range(20)]
    for use in uses:
        assert use is not None
        use.end(tokens)
    for number in (0, 1):
        with pytest.raises(LimitError) as refused:
            workers.enter(number)
        assert refused.value.reason is RefusalReason.KEY_TOKENS
    assert workers.all[1]._accounts["a"].elsewhere == 0
    for number in (0, 1, 0):
        use = workers.enter(number, "b")
        assert use is not None
        use.end(tokens)


def test_sums_that_wrap() -> None:
    """What was used since the start is more than a cell holds: what is left is right all the
    same.
    """
    workers = Workers(2, a=KeyLimits(tpm=6000))
    for number in (0, 1):
        row = workers.table.column(number).row(key_of("a"))
        assert row is not None
        row[TOKENS] = 2**63 - 1_000_000 * (number + 1)
    workers.all = [workers.made(number) for number in (0, 1)]
    for turn in range(8):
        use = workers.enter(turn % 2)
        assert use is not None
        use.end(100)
    account = workers.all[0]._account("a", workers.limits["a"])
    assert account.tokens is not None
    assert account.tokens.level == 6000 - 8 * 100


def test_no_report_takes_more_than_ten_minutes() -> None:
    """In each worker; but a request that may use more by its own limit pays all of that."""
    workers = Workers(2, a=KeyLimits(tpm=6000))
    for most, seconds in ((100, 600), (90_000, 900)):
        use = workers.enter(0)
        assert use is not None
        use.reserve(1, most)
        use.end(2**38)
        workers.now += seconds - 60
        with pytest.raises(LimitError):
            workers.enter(1)
        workers.now += 61
        late = workers.enter(1)
        assert late is not None
        late.end(0)
        workers.now += 600
