"""The comparison's arithmetic, its words, and what each key changes."""

import dataclasses

import pytest

from pdproxy_lab.bench.outcome import Outcome
from pdproxy_lab.bench.slo import slo_headers
from pdproxy_lab.demo.comparison.controls import DOWN, UP, Controls, Pressed
from pdproxy_lab.demo.comparison.reaction import Seen, reaction
from pdproxy_lab.demo.comparison.scores import WINDOW, Score, Scores, Spread
from pdproxy_lab.demo.comparison.setup import FIRST_LOAD, LIMITS, LOADS, profile, speed
from pdproxy_lab.demo.comparison.verdict import ENOUGH, Verdict, verdict
from pdproxy_lab.demo.figures import Recovery
from tests.demo.pictures import PLAIN, SPLIT

TIGHT, LOOSE = LIMITS
NAMES = ("prefill 0 and plain 0", "decode 0 and plain 1", "decode 1 and plain 2")


def answer(ttft: float, tpot: float, *, tokens: int = 128, error: str | None = None) -> Outcome:
    """Of engines at a quarter of the speed."""
    times = [100.0 + 4 * (ttft + tpot * number) for number in range(tokens)]
    return Outcome(
        due=100.0,
        asked_input=4000,
        asked_output=tokens,
        times=times,
        output_tokens=tokens,
        error=error,
    )


def controls(chosen: int = 0, load: int = FIRST_LOAD) -> Controls:
    return Controls(NAMES, frozenset({1, 2}), chosen, load)


def test_a_score_is_in_engine_time() -> None:
    scores = Scores(0.25)
    for second in range(10):
        scores.add(200.0 + second, answer(0.2, 0.006))
        scores.add(200.0 + second, answer(0.2, 0.010))
    scores.add(209.0, answer(0.2, 0.006, error="connection"))
    score = scores.score(210.0, TIGHT)
    assert (score.ended, scores.answered, dict(scores.failures)) == (21, 20, {"connection": 1})
    assert score.share == pytest.approx(10 / 21)
    assert score.good_per_s == pytest.approx(10 / 2.5)
    assert score.ttft.p50 == pytest.approx(0.2)
    assert score.tpot.p99 == pytest.approx(0.010)
    assert score.worst_gap == pytest.approx(0.010)
    assert scores.score(210.0, LOOSE).share == pytest.approx(20 / 21)


def test_a_score_forgets_what_is_older_than_its_window() -> None:
    scores = Scores(0.25)
    scores.add(0.0, answer(0.2, 0.006))
    scores.add(4 * WINDOW, answer(0.9, 0.006))
    assert scores.score(4 * WINDOW, TIGHT).ended == 2
    assert scores.score(4 * WINDOW + 1, TIGHT).share == 0.0
    scores.forget()
    assert scores.score(4 * WINDOW + 1, TIGHT) == Score()
    assert len(scores.curve) == 3


def test_time_is_slower_for_more_engines_and_on_a_busy_machine() -> None:
    assert [speed(engines, 1.0) for engines in (2, 4, 8)] == [0.25, 0.25, 0.125]
    assert [speed(4, share) for share in (0.9, 0.7, 0.3)] == [0.25, 0.125, 0.0625]
    assert profile(0.125).hardware.speed == 0.125
    assert slo_headers(TIGHT, 0.25) == {
        "x-pdproxy-slo-ttft-ms": "2000",
        "x-pdproxy-slo-tpot-ms": "32",
    }


def test_the_verdict_says_for_whom_and_why() -> None:
    assert verdict("split", SPLIT, PLAIN) == Verdict(
        "better",
        "Splitting pays here: 93% of the requests are in time, 61% on plain engines. There, prefill"
        " delays the tokens of others: TPOT p99 10 against 7.1 ms, worst gap 103 against 42 ms.",
    )
    assert verdict("auto", SPLIT, PLAIN).text.startswith("auto pays here")


def test_the_verdict_says_where_splitting_does_not_pay() -> None:
    late = dataclasses.replace(SPLIT, share=0.44, ttft=Spread(0.554, 2.1))
    found = verdict("split", late, PLAIN)
    assert found.kind == "worse"
    assert found.text == (
        "Splitting does not pay here: 44% of the requests are in time, 61% on plain engines. "
        "Prompts wait for fewer engines: TTFT p99 2,100 against 276 ms."
    )
    slow = dataclasses.replace(SPLIT, share=0.44, tpot=Spread(0.02, 0.03))
    assert "Answers share fewer engines: TPOT p99 30" in verdict("split", slow, PLAIN).text


def test_the_verdict_calls_chance_no_difference() -> None:
    both = dataclasses.replace(PLAIN, share=1.0)
    assert verdict("split", dataclasses.replace(SPLIT, share=0.98), both).kind == "same"
    few = dataclasses.replace(PLAIN, ended=ENOUGH, share=0.5)
    assert verdict("split", dataclasses.replace(SPLIT, share=0.6), few).kind == "neither"
    full = dataclasses.replace(SPLIT, share=0.03), dataclasses.replace(PLAIN, share=0.04)
    assert verdict("split", *full).text.endswith("The load is too high for both.")
    assert verdict("split", SPLIT, dataclasses.replace(PLAIN, ended=ENOUGH - 1)) == Verdict(
        "measuring", f"Measuring: {ENOUGH - 1} of {ENOUGH} answers."
    )


def test_a_busy_machine_gets_no_verdict() -> None:
    assert verdict("split", SPLIT, PLAIN, 0.0029).kind == "better"
    assert verdict("split", SPLIT, PLAIN, 0.012) == Verdict(
        "busy", "No verdict: this machine is busy, and adds up to 12 ms to all times."
    )


def test_k_kills_the_chosen_engine_and_starts_it_again() -> None:
    one = controls()
    assert one.press("3", True) == Pressed(None, "Engine 3 is chosen: decode 1 and plain 2.")
    assert one.press("k", True) == Pressed("kill", "Engine 3 was killed: decode 1 and plain 2.")
    assert one.life(2) == "killed"
    pressed = one.press("k", False)
    assert pressed is not None
    assert pressed.change == "start"
    assert one.life(2) == "up"


def test_a_second_engine_is_not_killed_nor_the_only_one_that_decodes() -> None:
    one = controls()
    assert one.press("k", False) == Pressed(
        None, "The proxies do not use all engines yet: wait some seconds."
    )
    one.press("k", True)
    one.press("2", True)
    assert one.press("k", True) == Pressed(None, "Engine 1 is down: start it first, with k.")
    only = Controls(NAMES[:2], frozenset({1}), chosen=1)
    assert only.press("k", True) == Pressed(
        None, "Engine 2 is the only one that decodes: it stays."
    )
    assert only.lives == {}


def test_s_slows_the_chosen_engine_down_and_back() -> None:
    one = controls(chosen=1)
    assert [one.press("s", True), one.press("s", True)] == [
        Pressed("slow", "Engine 2 takes 8 times as long now: decode 0 and plain 1."),
        Pressed("usual", "Engine 2 is as fast as before: decode 0 and plain 1."),
    ]
    one.press("k", True)
    assert one.press("s", True) == Pressed(None, "Engine 2 is down: start it first, with k.")


@pytest.mark.parametrize(("more", "less"), [("+", "-"), ("=", "_"), (UP, DOWN)])
def test_the_load_has_a_highest_and_a_lowest_step(more: str, less: str) -> None:
    one = controls(load=len(LOADS) - 2)
    assert one.press(more, True) == Pressed("load", "The load is 18 req/s now.")
    assert one.press(more, True) == Pressed(None, "That is the highest load.")
    for _ in LOADS[1:]:
        one.press(less, True)
    assert one.load == 0
    assert one.press(less, True) == Pressed(None, "That is the lowest load.")


def test_l_changes_the_limits_and_a_the_way() -> None:
    one = controls()
    assert one.press("l", True) == Pressed("limits", f"In time now means {LOOSE.name}.")
    assert one.press("a", True) == Pressed(
        "way", "auto decides for each request now: split it, or serve it whole."
    )
    assert (one.limits, one.way) == (1, "auto")
    one.press("l", True)
    one.press("a", True)
    assert (one.limits, one.way) == (0, "split")


@pytest.mark.parametrize("key", ["x", "0", "4", "\x1b[C", "²", "\n"])
def test_other_keys_change_nothing(key: str) -> None:
    one = controls()
    assert one.press(key, True) is None
    assert one == controls()


def test_what_became_of_a_killed_engine_is_told() -> None:
    before = Seen(Recovery(continued=1, failed_legs=3), 2, "u")
    now = Seen(Recovery(continued=10, failed_legs=16), 2, "u"), Seen(Recovery(), 2, "v")
    assert reaction(Pressed("kill", "Killed."), (before, Seen(Recovery(), 2, "v")), now) == (
        "Killed. 0 requests failed. Split: 9 streams went on elsewhere, 4 requests were tried "
        "again; plain: 0 streams went on elsewhere, 0 requests were tried again."
    )


def test_what_became_of_a_slow_engine_and_of_auto_is_told() -> None:
    alone = Seen(Recovery(), 2, "u"), Seen(Recovery(), 2, "v")
    guarded = Seen(Recovery(failed_legs=1), 3, "u", 1), Seen(Recovery(), 2, "v")
    told = reaction(Pressed("kill", "Killed."), alone, guarded)
    assert "1 request failed (1 was alone there" in told
    assert "1 request was tried again; plain: 0 streams" in told
    none = Seen(Recovery(exclusions={"u": 1}), 0, "u")
    out = Seen(Recovery(exclusions={"u": 2}), 0, "u")
    told = reaction(Pressed("slow", "Slow."), (none, none), (none, out))
    assert told.startswith("Slow. The proxy of the plain fleet has excluded it for 30 s")
    assert "compare engines" in reaction(Pressed("slow", "Slow."), (none, none), (none, none))
    decided = Seen(Recovery(split=7, whole=3), 0, "u")
    assert reaction(Pressed("way", "auto."), (none, none), (decided, none)) == (
        "auto. So far 7 were split, 3 served whole."
    )
