"""Inputs that fuzzing found, or that took it somewhere: each still holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.run import HERE, cut, seeds, targets

FOUND = sorted(path for path in (HERE / "corpus").glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_once(path: Path) -> None:
    """The target's check passes on the input."""
    targets()[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("target", ["body", "ingress", "stream", "answer", "registration"])
def test_a_target_runs(target: str) -> None:
    """Each target takes its seeds, so that it can be fuzzed at any time."""
    check = targets()[target]
    assert seeds(target)
    for one in seeds(target)[:5]:
        check(one)


def test_an_input_names_its_cuts() -> None:
    """The last bytes of an input say where it is cut."""
    assert cut(b"") == (b"", [])
    assert cut(b"abc\x00") == (b"abc", [])
    assert cut(b"abc\x00\x02\x01") == (b"abc", [2])
