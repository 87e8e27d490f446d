"""From a request's times to measures: known sequences, due times, refusals, SLOs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.serving.request.hints import read_hints
from pdproxy_lab.bench.measures import Summary, needed, percentile, spread_of, summarise
from pdproxy_lab.bench.outcome import Observed, Outcome
from pdproxy_lab.bench.slo import OWN_CLASS, BenchSlo, parse_slo, slo_headers


def one(due: float = 0.0, **fields: Any) -> Outcome:
    """Return a request that got three tokens after 0.1, 0.2 and 0.4 s."""
    known: dict[str, Any] = {
        "asked_input": 10,
        "asked_output": 3,
        "sent": due,
        "times": [due + 0.1, due + 0.2, due + 0.4],
        "prompt_tokens": 10,
        "output_tokens": 3,
        "answered": True,
    }
    return Outcome(due=due, **(known | fields))


def failed(kind: str = "timeout", **fields: Any) -> Outcome:
    outcome = one(times=[], **fields)
    outcome.fail(kind, "why")
    return outcome


def summary(
    *outcomes: Outcome,
    slos: tuple[BenchSlo, ...] = (),
    lags: tuple[float, ...] = (),
    **options: Any,
) -> Summary:
    observed = {"seconds": 10.0} | {
        key: options.pop(key) for key in ("cut", "given_up") if key in options
    }
    return summarise(
        Observed(outcomes=list(outcomes), loop_lags=list(lags), **observed), slos, **options
    )


def test_a_known_sequence_has_known_measures() -> None:
    found = one(due=5.0)
    assert found.ttft == pytest.approx(0.1)
    assert found.tpot == pytest.approx(0.15)
    assert found.gaps == [pytest.approx(0.1), pytest.approx(0.2)]
    assert found.worst_gap == pytest.approx(0.2)
    assert found.e2e == pytest.approx(0.4)


def test_times_count_from_when_a_request_was_due() -> None:
    late = one(due=0.0, sent=2.0, times=[2.1, 2.2])
    assert (late.ttft, late.e2e, late.lag) == (2.1, 2.2, 2.0)
    made = summary(late, allow_lag=True)
    assert made.ttft is not None
    assert made.ttft.mean == pytest.approx(2.1)
    assert made.ttft_from_sent is not None
    assert made.ttft_from_sent.mean == pytest.approx(0.1)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=300), st.sampled_from((50, 90, 95, 99)))
def test_percentiles_are_numpys(values: list[float], which: int) -> None:
    import numpy  # half a second, which each process that collects tests would take

    assert percentile(sorted(values), which) == pytest.approx(
        float(numpy.percentile(values, which))
    )


def test_a_percentile_needs_enough_values() -> None:
    assert [needed(which) for which in (50, 90, 95, 99, 99.9)] == [2, 10, 20, 100, 1000]
    made = summary(*[one() for _ in range(99)])
    assert made.ttft is not None
    assert made.ttft.percentiles[95] is not None
    assert made.ttft.percentiles[99] is None
    assert made.refused["p99_ttft"] == "needs 100 values, got 99"
    full = summary(*[one() for _ in range(100)])
    assert "p99_ttft" not in full.refused
    assert spread_of([]) is None


def test_one_token_has_no_tpot_and_no_gap() -> None:
    made = summary(*[one(times=[0.1], output_tokens=1, asked_output=1) for _ in range(3)])
    assert (made.tpot, made.gap, made.itl) == (None, None, None)
    assert made.refused["tpot"] == "no answer has more than one token"
    assert "gap" in made.refused
    mixed = summary(one(), one(times=[0.1], output_tokens=1))
    assert mixed.tpot is not None
    assert mixed.tpot.count == 1


def test_gaps_between_events_of_several_tokens_are_no_itl() -> None:
    made = summary(*[one(output_tokens=6) for _ in range(3)])
    assert made.itl is None
    assert (
        made.refused["itl"]
        == "events carry several tokens: 9 of 18 tokens had no event of their own"
    )
    assert made.tpot is not None
    assert made.tpot.mean == pytest.approx(0.06)
    assert made.gap is not None


def test_without_usage_nothing_per_token_is_reported() -> None:
    made = summary(
        one(output_tokens=None, prompt_tokens=None),
        one(),
        slos=(parse_slo("tpot=1s"), parse_slo("ttft=1s")),
    )
    assert (made.tpot, made.itl, made.input_tokens, made.output_tokens) == (None, None, None, None)
    assert {
        "tpot",
        "itl",
        "input_tokens",
        "output_tokens",
        "goodput tpot=1s",
    } <= made.refused.keys()
    assert made.good == {"tpot=1s": None, "ttft=1s": 2}


@pytest.mark.parametrize(
    ("cached", "total", "says"),
    [
        ((0, 5), 5, ""),
        ((0, 0), 0, ""),
        ((None, None), None, "the server reports no cached tokens"),
        ((5, None), None, "1 of 2 answers report no cached tokens"),
        ((5, 11), None, "more cached tokens than prompts have"),
    ],
)
def test_cached_tokens_are_known_of_all_answers_or_not(
    cached: tuple[int | None, ...], total: int | None, says: str
) -> None:
    made = summary(*[one(cached_tokens=count) for count in cached], failed())
    assert made.cached_tokens == total
    assert says in made.refused.get("cached_tokens", "")
    assert bool(says) == ("cached_tokens" in made.refused)


def test_errors_are_counted_by_kind_and_are_not_good() -> None:
    made = summary(one(), failed(), failed(), failed("status 503"), slos=(parse_slo("ttft=1s"),))
    assert (made.requests, made.completed, made.failed) == (4, 1, 3)
    assert made.errors == {"timeout": 2, "status 503": 1}
    assert made.error_texts == {"timeout": "why", "status 503": "why"}
    assert made.good == {"ttft=1s": 1}
    assert any("3 of 4 requests failed" in remark for remark in made.remarks)


def test_a_run_without_an_answer_measures_nothing() -> None:
    assert summary(failed()).refused == {"run": "no request was answered"}
    assert summary().refused == {"run": "no request has ended"}


def test_a_run_that_was_late_itself_is_refused() -> None:
    late = [one(sent=0.02) for _ in range(3)]
    assert "late itself: p99 20.0 ms" in summary(*late).refused["run"]
    assert summary(*late).ttft is None
    allowed = summary(*late, allow_lag=True)
    assert allowed.ttft is not None
    assert "late itself" in allowed.remarks[0]
    assert "late itself" in summary(one(), lags=(0.5, 0.5)).refused["run"]
    assert "run" not in summary(one(sent=0.009), lags=(0.009,)).refused


def test_nothing_of_a_run_that_was_given_up_is_used() -> None:
    made = summary(one(), given_up="too many in flight")
    assert made.refused["run"] == "too many in flight"
    assert made.ttft is None


def test_requests_that_were_cut_are_no_errors_and_leave_goodput_unknown() -> None:
    made = summary(one(), failed("cut"), slos=(parse_slo("ttft=1s"),), cut=True)
    assert (made.requests, made.failed, made.cut, made.partial) == (1, 0, 1, True)
    assert made.good == {"ttft=1s": None}
    assert made.ttft is not None


def test_short_answers_are_counted() -> None:
    made = summary(one(asked_output=9), one())
    assert made.short == 1
    assert "1 answers are shorter than asked" in made.remarks[0]


# -- SLOs


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("ttft=100ms", True),
        ("ttft=99ms", False),
        ("tpot=151ms", True),
        ("tpot=149ms", False),
        ("gap=0.201s", True),
        ("gap=0.199s", False),
        ("e2e=0.41s", True),
        ("e2e=0.39s", False),
        ("ttft=1s,tpot=1s,gap=1s,e2e=1s", True),
        ("ttft=1s,tpot=1s,gap=1s,e2e=1ms", False),
    ],
)
def test_an_slo_is_kept_or_not(text: str, good: bool) -> None:
    assert parse_slo(text).kept(one()) is good


def test_an_slo_of_a_class_is_for_its_requests() -> None:
    slos = (
        parse_slo("all:ttft=1ms"),
        parse_slo("a:ttft=200ms", "a"),
        parse_slo("b:ttft=50ms,tpot=1s", "b"),
    )
    two = [one(class_name="a"), failed(class_name="a"), one(output_tokens=None)]
    made = summary(*two, one(class_name="b"), slos=slos)
    assert made.good == {"all": 0, "a": 1, "b": 0, OWN_CLASS: 1}
    assert made.judged == {"all": 4, "a": 2, "b": 1, OWN_CLASS: 3}
    parts = {name: (part.requests, part.good[OWN_CLASS]) for name, part in made.classes.items()}
    assert parts == {"a": (2, 1), "b": (1, 0)}
    assert "1 requests are of no class" in made.remarks
    unknown = summary(one(class_name="b", output_tokens=None), one(class_name="a"), slos=slos)
    assert unknown.good == {"all": 0, "a": 1, "b": None, OWN_CLASS: None}


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        ("ttft=0.5s,tpot=8ms,e2e=1s", {"ttft": "500", "tpot": "8"}),
        ("gap=999999999s,ttft=0.001ms", {"gap": "604800000", "ttft": "0.001"}),
        ("ttft=0.000001ms", {"ttft": "0.000001"}),
        ("e2e=1s", {}),
    ],
)
def test_the_headers_of_an_slo_are_what_pdproxy_reads(text: str, headers: dict[str, str]) -> None:
    found = slo_headers(parse_slo(text))
    assert found == {f"x-pdproxy-slo-{name}-ms": value for name, value in headers.items()}
    lines = [(name.encode(), value.encode()) for name, value in found.items()]
    assert (read_hints(lines, None).slo is None) == (not headers)


def test_a_failed_request_is_never_good_and_one_token_has_no_tpot_to_miss() -> None:
    tight = parse_slo("tight:tpot=1ms,gap=1ms")
    assert tight.name == "tight"
    assert not tight.kept(failed())
    assert tight.kept(one(times=[0.1], output_tokens=1))
    assert not tight.knows(one(output_tokens=None))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft",
        "ttft=5",
        "ttft=5m",
        "ttft=-1s",
        "ttft=0ms",
        "ttft=1s,ttft=2s",
        "x=1s",
        "a b:ttft=1s",
        ":ttft=1s",
        "ttft=nans",
        "ttft=1e9s",
    ],
)
def test_a_wrong_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|a name has") as error:
        parse_slo(text)
    assert "\n" not in str(error.value)
