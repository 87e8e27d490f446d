"""Sweeps over request rates: their bounds, the curves, and what is said of servers that can't
follow.
"""

import json
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from pdproxy_lab.bench.curves import curves_of, served, served_text
from pdproxy_lab.bench.outcome import Observed, Outcome
from pdproxy_lab.bench.reading import sweep
from pdproxy_lab.bench.record import Record
from pdproxy_lab.bench.sweep import SETTLE, Sweep
from pdproxy_lab.bench.sweep_report import text_of
from pdproxy_lab.bench.workload import Planned
from tests.bench.servers import FAST, engines
from tests.bench.test_compare import record

PLANNED = [Planned(float(second), 4, 2) for second in range(11)]


def answered(count: int, given_up: str = "") -> Observed:
    outcomes = [Outcome(due=0.0, asked_input=4, asked_output=2) for _ in PLANNED]
    for outcome in outcomes[count:]:
        outcome.fail("timeout", "")
    return Observed(outcomes=outcomes, loop_lags=[], seconds=1.0, given_up=given_up)


def sweep_records() -> list[Record]:
    """Two servers at three rates: at the highest one, `plain` was not measured, and half of
    `split`'s requests were good.
    """
    found = []
    for rate in (2.0, 4.0, 8.0):
        for name in ("split", "plain"):
            wrong = 50 if rate == 8 else 0
            found.append(record(name, count=100, wrong=wrong) | {"request_rate": rate})
            found[-1]["pdproxy"]["cached_share"] = 0.25
    found[-1] = record("plain", count=1, wrong=1) | {"request_rate": 8.0}
    found[-1]["pdproxy"]["not_measured"] = {"run": "far beyond its capacity at 8 req/s: x"}
    return found


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("8,2,4", (2, 4, 8)),
        ("2:10:4", (2, 6, 10)),
        ("0.1:0.3:0.1", (0.1, 0.2, 0.3)),
        (",".join(map(str, range(1, 17))), tuple(range(1, 17))),
    ],
)
def test_rates_are_a_list_or_a_range(text: str, rates: tuple[float, ...]) -> None:
    assert sweep(text) == rates


@pytest.mark.parametrize("text", ["2", "2:3", "3:2:1", "1:9:inf", "1:1e5:1e-9", "0,1", "1,nan", ""])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        sweep(text)


def test_a_server_far_beyond_its_capacity_is_measured_no_more() -> None:
    bounds = Sweep(1000, clock=lambda: 0.0)
    bounds.note("a", 4, PLANNED, answered(6))
    assert bounds.refusal("a", PLANNED) == ""
    bounds.note("a", 8, PLANNED, answered(5))
    assert bounds.refusal("a", PLANNED) == (
        "far beyond its capacity at 8 req/s: 5 of 11 requests were answered"
    )
    bounds.note("b", 8, PLANNED, answered(11, given_up=bounds.limit(PLANNED)[1]))
    assert "not all answered after 50 s" in bounds.refusal("b", PLANNED)
    for name, first in (("late", 26.0), ("slow", 24.0)):
        seen = answered(11)
        seen.outcomes[3].times = [first, 40.0]
        bounds.note(name, 8, PLANNED, seen)
    assert "had their last first token after 26 s" in bounds.refusal("late", PLANNED)
    assert bounds.refusal("slow", PLANNED) == ""
    assert bounds.limit(PLANNED)[0] == 20 + SETTLE
    assert bounds.refusal("c", PLANNED) == ""


def test_the_seconds_of_a_sweep_end_it_and_are_no_overload() -> None:
    now = [0.0]
    bounds = Sweep(30, clock=lambda: now[0])
    assert bounds.refusal("a", PLANNED) == ""
    seconds, why = bounds.limit(PLANNED)
    assert (seconds, why) == (30, "the sweep's 30 s are over (--max-seconds)")
    bounds.note("a", 8, PLANNED, answered(1, given_up=why))
    assert bounds.stopped == {}
    now[0] = 21.0
    assert bounds.refusal("a", PLANNED) == why, "a run of 10 s has no time any more"


def test_curves_say_up_to_which_rate_a_server_served() -> None:
    records = sweep_records()
    split, plain = curves_of(records)
    assert split.rates == plain.rates == (2, 4, 8)
    assert [rate for rate, _ in plain.points("throughput", "req/s")] == [2, 4]
    assert served(split, "ttft=500ms") == 4
    assert served_text(split, "tight") == "less than 2 req/s"
    text = text_of([split, plain], records)
    assert "90 % of the requests were good (ttft=500ms) up to: split 4 req/s; plain 4 req/s" in text
    assert "prompt tokens cached (%)" in text
    assert "good (prompt tokens cached)" not in text
    assert text.count("split: not measured: cached_tokens: ") == 1, "it is the same at all rates"
    assert "plain: NOT MEASURED at 8 req/s: far beyond its capacity" in text
    assert "split, 8 req/s, seed 0: 50 x status 503: busy" in text
    assert text.count("needs 100 values") == 0
    assert "a percentile needs more values" in text
    last = [line for line in text.splitlines() if line.startswith("8  ")]
    assert last[1].split()[1:] == ["-"] * (len(last[0].split()) - 1)


def test_runs_at_one_rate_each_are_no_sweep() -> None:
    records = [record("a", count=5) | {"request_rate": 1.0}]
    assert curves_of([*records, record("b", count=5) | {"request_rate": 2.0}]) == []
    assert curves_of([record("a", count=5) | {"request_rate": "inf"}]) == []


def test_a_sweep_stops_a_server_that_fails_and_goes_on_with_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = tmp_path / "sweep.jsonl", tmp_path / "sweep.svg"
    load = ["--requests", "20", "--input-tokens", "8", "--output-tokens", "2", "--seeds", "1"]
    words = [*load, "--allow-lag", "--slo", "x:ttft=60s", "--warm-up", "0"]
    failing = ("status:status=503,rate=1",)
    with engines(FAST) as (good,), engines(FAST, faults=failing) as (bad,):
        code = main(
            [
                "bench",
                f"good={good.url}",
                f"bad={bad.url}",
                "--sweep",
                "100,200,400",
                *words,
                "--json",
                str(path),
                "--plot",
                str(plot),
            ]
        )
        sent = [len(engine.requests) for engine in (good, bad)]
        prompts = {tuple(request.json["prompt"]) for request in good.requests}
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    assert sent == [60, 20]
    assert len(prompts) == 60, "no rate finds the prompts of another one in the caches"
    assert "up to: good at least 400 req/s; bad less than 100 req/s" in captured.out
    why = "far beyond its capacity at 100 req/s: 0 of 20 requests were answered"
    assert f"bad: NOT MEASURED at 200, 400 req/s: {why}" in captured.out
    made = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["label"], one["request_rate"]) for one in made] == [
        (name, rate) for rate in (100, 200, 400) for name in ("good", "bad")
    ]
    assert made[-1]["pdproxy"]["not_measured"]["run"] == why
    assert plot.stat().st_size > 5000
    assert main(["bench", "--compare", str(path)]) == 0
    assert capsys.readouterr().out == captured.out
