"""Verdicts and exit codes, and how a report looks."""

from __future__ import annotations

import msgspec
import pytest

from pdproxy.check.report import WIDTH, TextStyle
from pdproxy_lab.conformance.report import as_json, as_text, exit_code, verdict
from pdproxy_lab.conformance.results import VERDICTS, PairResults, Report, Result, Verdict


def report(*verdicts: Verdict) -> Report:
    """A report of one pair."""
    results = [
        Result(name=f"c{n}", does="it was done " * 20, verdict=kind, says="so")
        for n, kind in enumerate(verdicts)
    ]
    return Report(
        connector="nixl",
        pairs=[PairResults(prefill="http://p", decode="http://d", results=results)],
    )


@pytest.mark.parametrize(
    ("verdicts", "code", "words"),
    [
        (["passed", "not_applicable"], 0, "CONFORMS to nixl: 1 passed, 1 not applicable"),
        (
            ["passed", "failed", "not_judged"],
            1,
            "DOES NOT CONFORM to nixl: 1 passed, 1 failed, 1 could not be judged",
        ),
        (["passed", "not_judged"], 3, "NOT PROVEN to nixl: 1 passed, 1 could not be judged"),
    ],
)
def test_the_verdict_is_that_of_the_worst(verdicts: list[Verdict], code: int, words: str) -> None:
    assert exit_code(report(*verdicts)) == code
    assert verdict(report(*verdicts)) == words
    assert as_text(report(*verdicts), TextStyle()).splitlines()[-1] == words


def test_each_check_has_a_mark_what_was_done_and_what_was_seen() -> None:
    lines = as_text(report(*VERDICTS), TextStyle(unicode=False)).splitlines()
    marks = [line[2] for line in lines if line.startswith("  ") and line[2] != " "]
    assert marks == ["+", "x", "-", "!"]
    assert [line.strip() for line in lines if line.endswith("so")] == [
        "passed: so",
        "failed: so",
        "not applicable: so",
        "could not be judged: so",
    ]
    assert max(map(len, lines)) <= WIDTH


def test_json_says_the_same() -> None:
    found = msgspec.json.decode(as_json(report("passed", "failed")))
    assert found["exit_code"] == 1
    assert found["counts"] == {"passed": 1, "failed": 1, "not_applicable": 0, "not_judged": 0}
    assert [one["verdict"] for one in found["pairs"][0]["results"]] == ["passed", "failed"]
