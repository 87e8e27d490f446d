"""The list of tests that need one worker names tests that are there."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.one_worker import ONE_WORKER, reason

FOLDER = Path(__file__).parents[1] / "proxy"


def test_every_name_is_that_of_a_test() -> None:
    for one in ONE_WORKER:
        file, _, name = one.partition("::")
        assert f"def {name or 'test_'}" in (FOLDER / file).read_text(), one


def test_others_are_not_left_out() -> None:
    file, name = next(iter(ONE_WORKER)).split("::")
    assert reason(file, name) == ONE_WORKER[f"{file}::{name}"]
    assert reason(file, f"{name}_as_well") is None
    assert reason("test_placement.py", "test_anything") == ONE_WORKER["test_placement.py"]
