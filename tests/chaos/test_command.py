"""`python -m tests.chaos`: a seed passes and replays exactly in another process; what was found is
shrunk and repeated.
"""

# That a defect of the package is found is for `tests.chaos.planted`, of which the gate has a part.

from __future__ import annotations

import re
import sys

import pytest

from tests.chaos import run as runner
from tests.chaos.__main__ import main
from tests.chaos.course import Result
from tests.chaos.finding import Finding
from tests.chaos.options import Options


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_seed_passes_and_replays_exactly_in_another_process(workers: int) -> None:
    options = Options(seed=3, seconds=2, rate=10, faults=3, workers=workers)
    first, second = runner.run_one(options), runner.run_one(options)
    assert first.findings == []
    assert first.calls["right"] > 5
    assert sum(first.faults.values()) == 6
    assert (first.digest, first.deliveries, first.virtual) == (
        second.digest,
        second.deliveries,
        second.virtual,
    )


def _broken(guilty: set[int]) -> object:
    def run_one(options: Options, trace: str | None = None) -> Result:
        broken = guilty <= (options.only if options.only is not None else guilty)
        return Result([Finding("a rule", "text")] if broken else [], "digest", {"right": 1}, {})

    return run_one


def test_the_shortest_schedule_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "run_one", _broken({7, 50}))
    assert main(["--seed", "5", "--seconds", "6"]) == 1
    said = capsys.readouterr().out
    assert "a rule: text" in said
    assert "has 2 items" in said
    assert re.search(r"^    7: at .* a client ", said, re.MULTILINE)
    assert re.search(r"^    50: at ", said, re.MULTILINE)
    assert said.endswith("  repeat it: python -m tests.chaos --seed 5 --seconds 6 --only 7,50\n")


def test_a_failure_that_does_not_repeat_is_said_to_be_flaky(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = iter([Result([Finding("a rule", "text")]), Result([])])
    monkeypatch.setattr(runner, "run_one", lambda options, trace=None: next(results))
    assert main(["--seconds", "6"]) == 1
    assert "this failure is flaky" in capsys.readouterr().out


def test_a_process_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (found,) = runner.run_one(Options()).findings
    assert found.rule == "the run ends"
    assert "exit code 1" in found.text


@pytest.mark.parametrize(
    "wrong",
    [
        ["--seconds", "0"],
        ["--seed", "-1"],
        ["--only", "3,x"],
        ["--prefill", "0"],
        ["--seeds", "2", "--only", "3"],
        ["--seeds", "2", "--trace", "file"],
        ["--connector", "lmcache-pd"],
        ["--connector", "moriio"],
        ["--connector", "none"],
        ["--connector", "cpu", "--prefill", "1"],
        ["--connector", "cpu", "--pool", "any"],
        ["--pool", "some"],
    ],
)
def test_wrong_options(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(wrong)
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m tests.chaos: ")
    assert said.splitlines()[1:] in ([], ["See `python -m tests.chaos --help`."])
