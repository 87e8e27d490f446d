"""The list of tests that need one worker names tests that are there."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.one_worker import ONE_WORKER, reason

FOLDER = Path(__file__).parents[1] / "proxy"


def test_every_name_is_that_of_a_test() -> None:
    gone = [one for one in ONE_WORKER if f"def {one.split('::')[1]}(" not in (FOLDER / one.split("::")[0]).read_text()]
    assert gone == []


def test_others_are_not_left_out() -> None:
    file, name = next(iter(ONE_WORKER)).split("::")
    assert reason(file, name) == ONE_WORKER[f"{file}::{name}"]
    assert reason(file, f"{name}_as_well") is None
