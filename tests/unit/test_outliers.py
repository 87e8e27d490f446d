"""Engines that fail more often, or are slower, than their peers: who is left out, for how long, and
how many at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.scheduling import outliers
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.outliers import GOOD_AFTER, LONGEST, WINDOW, Exclusion, Outliers
from pdproxy.settings.health import OutlierSettings

NOW = 1000.0
FOUR = ["a", "b", "c", "d"]


def made(**limits: float) -> Outliers:
    return Outliers(OutlierSettings(**limits))  # type: ignore[arg-type]


def send(
    judge: Outliers, url: str, good: int = 0, failed: int = 0, *, now: float = NOW,
    pace: float | None = None,
    role: Role = Role.DECODE,
) -> None:  # fmt: skip
    """Have so many legs of an engine end."""
    for _ in range(good):
        judge.ended(url, role, now, failed=False, pace=pace)
    for _ in range(failed):
        judge.ended(url, role, now, failed=True)


def out(judge: Outliers, urls: list[str], now: float = NOW) -> list[tuple[str, str]]:
    return [(one.url, one.reason) for one in judge.judge(now, [urls])]


@pytest.mark.parametrize(
    ("good", "failed", "others_failed", "is_out"),
    [
        (10, 10, 0, True),
        (11, 9, 0, False),
        (4, 5, 0, False),
        (0, 20, 0, True),
        (10, 10, 4, True),
        (10, 10, 40, False),
    ],
)
def test_errors(good: int, failed: int, others_failed: int, is_out: bool) -> None:
    """Half of enough requests, and its peers do not fail as well: then the cause is none of it."""
    judge = made()
    send(judge, "a", good, failed)
    for url in FOUR[1:]:
        send(judge, url, 20, others_failed)
    assert out(judge, FOUR) == ([("a", "errors")] if is_out else [])


@pytest.mark.parametrize(
    ("slow", "count", "is_out"), [(3.1, 10, True), (2.9, 10, False), (30.0, 9, False)]
)
def test_latency(slow: float, count: int, is_out: bool) -> None:
    """More than three times the median of its peers, in enough requests: half as many of a peer."""
    judge = made()
    send(judge, "a", count, pace=slow)
    for url, pace in zip(FOUR[1:], (1.0, 50.0, 50.0), strict=True):
        send(judge, url, 5 if pace < 50 else 4, pace=pace)
    assert out(judge, FOUR) == ([("a", "latency")] if is_out else [])


def test_each_kind_of_work_is_compared_with_its_own() -> None:
    """An engine that prefills long prompts is no slow decoder."""
    judge = made()
    send(judge, "a", 20, pace=5.0, role=Role.PREFILL)
    send(judge, "b", 20, pace=1.0, role=Role.DECODE)
    assert out(judge, ["a", "b"]) == []


def test_the_last_engine_is_never_left_out() -> None:
    """Of two one may be, and not both."""
    judge = made()
    send(judge, "a", 0, 20)
    assert out(judge, ["a"]) == []
    send(judge, "b", 20)
    assert out(judge, ["a", "b"]) == [("a", "errors")]
    send(judge, "b", 0, 100)
    assert out(judge, ["a", "b"]) == []


def test_a_share_at_most_is_left_out_at_once_the_worst_first() -> None:
    """Of four one; of six two."""
    judge = made(error_share=0.1)
    six = [*FOUR, "e", "f"]
    for n, url in enumerate(six):
        send(judge, url, 1000, 0)
        if n < 3:
            send(judge, url, 0, 1000 * (n + 1), now=NOW)
    assert [url for url, _ in out(judge, six)] == ["c", "b"]
    assert out(judge, six) == []


def test_each_time_it_is_left_out_for_longer() -> None:
    """And a long time without that lets it begin anew."""
    judge = made(exclude_for=30)
    now, seconds = NOW, []
    for _ in range(12):
        send(judge, "b", 20, now=now)
        send(judge, "a", 0, 20, now=now)
        (exclusion,) = judge.judge(now, [["a", "b"]])
        seconds.append(exclusion.seconds)
        now += exclusion.seconds
    assert seconds[:4] == [30, 60, 90, 120]
    assert seconds[-1] == LONGEST
    now += 30 * GOOD_AFTER + 1
    send(judge, "b", 20, now=now)
    send(judge, "a", 0, 20, now=now)
    (exclusion,) = judge.judge(now, [["a", "b"]])
    assert exclusion.seconds == 30
    assert "100 % of its requests failed" in exclusion.why


def test_what_is_past_does_not_count() -> None:
    """Nor does what was before it was left out, nor what a removed engine did."""
    judge = made()
    send(judge, "b", 20)
    send(judge, "a", 0, 20)
    assert out(judge, ["a", "b"], NOW + WINDOW) == []
    send(judge, "b", 20)
    send(judge, "a", 0, 20)
    judge.forget("a")
    assert out(judge, ["a", "b"]) == []


ACTS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.booleans(), st.floats(0, 9), st.floats(0, 20)),
    max_size=200,
)


@given(ACTS, st.integers(1, 6))
def test_never_too_many(acts: list[tuple[str, bool, float, float]], count: int) -> None:
    """Whatever happens: never more than the share, and never the last."""
    judge = made(min_requests=2, error_share=0.2)
    urls = list("abcdef"[:count])
    now, until = NOW, dict.fromkeys(urls, 0.0)
    for url, failed, pace, seconds in acts:
        now += seconds
        judge.ended(url, Role.DECODE, now, failed=failed, pace=pace)
        for exclusion in judge.judge(now, [urls]):
            assert until[exclusion.url] <= now
            until[exclusion.url] = now + exclusion.seconds
            assert 0 < exclusion.seconds <= LONGEST
        left_out = sum(end > now for end in until.values())
        assert left_out <= max(1, int(0.34 * count)) * (count > 1)
        assert left_out < count


def test_an_engine_with_the_short_prompts_is_not_slow() -> None:
    """It takes more time per byte, as each prompt takes some."""
    outliers = Outliers(OutlierSettings())
    for _ in range(20):
        outliers.ended("a", Role.PREFILL, 1.0, failed=False, pace=0.05 / 100, seconds=0.05)
        outliers.ended("b", Role.PREFILL, 1.0, failed=False, pace=1.0 / 100_000, seconds=1.0)
    assert outliers.judge(2.0, [["a", "b"]]) == []


def test_a_larger_batch_is_no_slower_engine() -> None:
    """Of two, one waits for KV most of the time, so that the other one has the larger batches:
    their steps take longer.
    """
    judge = made()
    for _ in range(20):
        judge.ended("healthy", Role.DECODE, NOW, failed=False, pace=0.08, beside=40)
        judge.ended("waits", Role.DECODE, NOW, failed=False, pace=0.01, beside=2)
    assert out(judge, ["healthy", "waits"]) == []


@pytest.mark.parametrize(("slow", "is_out"), [(3.1, True), (2.9, False)])
def test_batches_of_one_size_are_compared(slow: float, is_out: bool) -> None:
    """Each size with the same one at the peers, and as often as the engine has it."""
    judge = made()
    for number in range(20):
        beside = 2 if number % 2 else 40
        judge.ended("a", Role.DECODE, NOW, failed=False, pace=slow * beside, beside=beside)
        for peer in FOUR[1:]:
            judge.ended(peer, Role.DECODE, NOW, failed=False, pace=1.0 * beside, beside=beside)
    assert out(judge, FOUR) == ([("a", "latency")] if is_out else [])


def kv(judge: Outliers, slow: Callable[[str, str], bool]) -> None:
    """Streams whose KV goes from each of two prefill engines to each of two decode engines."""
    for _ in range(10):
        for p in ("p1", "p2"):
            for d in ("d1", "d2"):
                judge.loaded(p, d, NOW, 3.6 if slow(p, d) else 0.29)


@pytest.mark.parametrize(
    ("slow", "found"),
    [
        (lambda p, d: d == "d2", ["d2"]),
        (lambda p, d: p == "p2", ["p2"]),
        (lambda p, d: (p, d) == ("p2", "d2"), []),
        (lambda p, d: True, []),
    ],
)
def test_kv_that_takes_long(slow: Callable[[str, str], bool], found: list[str]) -> None:
    """With each partner it is the engine; with one of them it is not."""
    judge = made()
    kv(judge, slow)
    groups = [["p1", "p2"], ["d1", "d2"]]
    assert [one.url for one in judge.judge(NOW, groups)] == found
    judge.forget("p1")
    assert {key.partner for key in judge._windows} <= {"p2"}


def test_many_engines_are_not_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is all that was counted looked at again for each of them: 100 engines of each role have
    10,000 pairs.
    """
    calls = 0
    plain = outliers._at_most

    def counting(*arguments: Any) -> tuple[float, float]:
        nonlocal calls
        calls += 1
        return plain(*arguments)

    monkeypatch.setattr(outliers, "_at_most", counting)
    judge, urls, sizes = made(), [f"e{number}" for number in range(40)], (1, 2, 5, 9, 20)
    for url in urls:
        for beside in sizes:
            for _ in range(10):
                judge.ended(url, Role.DECODE, NOW, failed=False, pace=1 + beside, beside=beside)
    assert judge.judge(NOW, [urls]) == []
    assert calls == len(urls) * len(sizes)
    for beside in sizes:
        for _ in range(10):
            judge.ended("slow", Role.DECODE, NOW, failed=False, pace=4 + 4 * beside, beside=beside)
    assert [one.url for one in judge.judge(NOW, [["slow", *urls]])] == ["slow"]


def test_legs_may_end_between_the_steps_of_a_comparison() -> None:
    """Also those with which the other half of the time begins."""
    judge, later = made(), NOW + WINDOW / 2
    urls = [f"e{number}" for number in range(2 * outliers.AT_ONCE)]
    for url in urls:
        send(judge, url, 10)
    steps = judge.judging(NOW, [urls])
    next(steps)
    send(judge, urls[-1], failed=30, now=later)
    judge.forget(urls[-2])
    found: list[Exclusion] = []

    def rest() -> Iterator[None]:
        found.extend((yield from steps))

    assert sum(1 for _ in rest()) > len(urls)
    assert [(one.url, one.reason) for one in found] == [(urls[-1], "errors")]
