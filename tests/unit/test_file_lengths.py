"""A file is one idea, whatever its length: more lines than docs/internals/contributing.md names are
a question, or too many.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import pdproxy

PACKAGES = Path(pdproxy.__file__).parents[1]
ASKED, MOST = 600, 1000


def longer(folder: Path, most: int) -> dict[str, int]:
    """Return the files with more lines than `most`, and how many they have."""
    lines = {
        path.relative_to(folder).as_posix(): path.read_text().count("\n")
        for path in folder.rglob("*.py")
    }
    return {name: count for name, count in lines.items() if count > most}


def test_no_file_is_too_long() -> None:
    for name, lines in longer(PACKAGES, ASKED).items():
        warnings.warn(f"{name} has {lines} lines: is it one idea?", stacklevel=1)
    assert longer(PACKAGES, MOST) == {}


@pytest.mark.parametrize(("lines", "found"), [(1000, 0), (1001, 1)])
def test_a_file_that_is_too_long_is_found(lines: int, found: int, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("\n" * lines)
    assert len(longer(tmp_path, MOST)) == found
