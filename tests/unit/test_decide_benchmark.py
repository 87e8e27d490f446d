"""The benchmarks of `auto`: their loads, what a cell holds, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench import figure
from pdproxy_lab.plan.capacity import Level

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decide
import decide_cost
import decide_table
import shares


def test_the_alternating_load_has_the_same_requests_at_each_rate() -> None:
    load = decide.Alternating(engines=1)
    slow, fast = (list(load.calls(rate, 450, 0)) for rate in (1.0, 4.0))
    assert [(one.prompt, one.output) for one in slow] == [(one.prompt, one.output) for one in fast]
    assert [one.due for one in slow] == pytest.approx([4 * one.due for one in fast])
    assert [one.prompt for one in slow] == 2 * (75 * [4000] + 150 * [1000])
    assert slow[-1].due == pytest.approx(450, rel=0.15)
    first, second = slow[74].due, slow[224].due - slow[74].due
    assert first == pytest.approx(second, rel=0.5)
    assert [one.due for one in load.calls(1.0, 450, 1)] != [one.due for one in slow]


def test_the_load_with_steps_has_its_rate_on_average() -> None:
    load = decide.Alternating(engines=2, phases=decide.STEPS, counts=decide.STEP_REQUESTS)
    calls = list(load.calls(8.0, 640, 0))
    assert calls[-1].due == pytest.approx(80.0, rel=0.1)
    low, high = calls[79].due, calls[319].due - calls[79].due
    assert low == pytest.approx(high, rel=0.3)
    assert {(one.prompt, one.output) for one in calls} == {(4000, 128)}


def test_half_of_the_mix_are_documents() -> None:
    calls = list(decide.Mix().calls(4.0, 800, 0))
    assert calls[-1].due == pytest.approx(200.0, rel=0.1)
    documents = [one for one in calls if one.prompt >= 10_000]
    assert len(documents) == pytest.approx(400, rel=0.1)
    assert all(one.prompt <= 700 for one in calls if one not in documents)


def test_shares_of_good_requests_are_shown_by_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weight of long prompts moves misses from these to others."""
    cell = shares.Cell("2 mix E", 2, shares.E, 2048, (4.0,))
    monkeypatch.setattr(shares, "CELLS", {"mix": (cell,)})
    monkeypatch.setattr(shares, "CHUNKS", (512,))
    monkeypatch.setattr(
        sys,
        "argv",
        ["x", "--seeds", "2", "--first-seed", "0", "--loads", "mix", "--long-weight", "9"],
    )
    shares.main()
    rows = capsys.readouterr().out.splitlines()
    title, best, auto, weighed, _, last = rows
    assert title.split()[:5] == ["good", "short", "long", "late", "first"]
    assert best.startswith("2 mix E, 4 req/s: 1P1D ")
    assert auto.split("auto/best")[1].split()[0] in last
    good, short, long, _late, _first = map(float, auto.split()[1:6])
    assert min(short, long) <= good <= max(short, long)
    _, weighed_short, weighed_long, *_ = map(float, weighed.split()[3:])
    assert weighed_long > long
    assert weighed_short < short


def test_a_cell_is_run_once_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decide, "BUSY", (2,))
    monkeypatch.setattr(decide, "RATIOS", {4: (2,)})
    monkeypatch.setattr(decide, "levels", lambda *_: (None, Level(60, 1, 1)))
    file = tmp_path / "cells.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["decide.py", "--results", str(file), "--cells", "4 4000/128 C", "--seeds", "1"],
    )
    decide.main()
    (cell,) = json.loads(file.read_text()).values()
    assert cell["best"]["rate"] > 0
    assert list(cell["auto"]) == [str(cell["plan"]["chunk"])]
    assert cell["ratio"] > 0.8
    assert "4 plain 512" in cell["static"]
    assert any(", busy 2" in key for key in cell["static"])
    assert "4 4000/128 C" in capsys.readouterr().out

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(decide, "search", never)
    decide.main()
    assert "plain, chunk 512" in capsys.readouterr().out


@pytest.mark.parametrize("replicas", ["1", "3"])
def test_the_cost_of_decisions_is_measured(
    replicas: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["x", "--engines", "16", "--requests", "600", "--repeat", "1"]
    arguments += ["--replicas", replicas]
    monkeypatch.setattr(sys, "argv", arguments)
    decide_cost.main()
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_bytecodes_of_decisions_are_counted() -> None:
    """They are the same in each run, and more with another replica."""
    counts = []
    for replicas in (1, 1, 2):
        ledger = decide_cost.ledger_of([Role.PREFILL, Role.DECODE], None, replicas)
        counts.append(decide_cost.bytecodes(ledger, 2, 50, (Role.PREFILL, Role.DECODE)))
    assert counts[0] == counts[1] > 100
    assert counts[2] > counts[0]
    assert sys.gettrace() is None


def test_the_heat_map_names_what_was_not_run() -> None:
    results = {"4 4000/128 A": {"ratio": 0.97}, "4 4000/128 B": {"static": {}}}
    drawn = decide_table._heat_map(results, [4], ["4000/128"], ["A", "B"])
    text = figure.svg(drawn, "cells")
    assert "4 engines, auto / best static: higher is better" in text
    assert ">0.97<" in text
    assert "not run (grey): 4 4000/128 B" in text
