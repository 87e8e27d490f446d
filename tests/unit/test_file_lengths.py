"""No file has more lines than docs/internals/contributing.md allows."""

from __future__ import annotations

from pathlib import Path

import pytest

import pdproxy

PACKAGE = Path(pdproxy.__file__).parent
FEWER = ("serving", "app", "web")
MOST, MOST_OF_THOSE = 400, 300
NOTIFIER = "notifier/pdproxy_nixl.py"
"""One file, because it is copied as one into the environments of engines."""


def too_long(package: Path) -> dict[str, int]:
    """Return the files with too many lines, and how many they have."""
    found = {}
    for path in package.rglob("*.py"):
        name = path.relative_to(package)
        most = MOST_OF_THOSE if name.parts[0] in FEWER else MOST
        lines = path.read_text().count("\n")
        if lines > most and name.as_posix() != NOTIFIER:
            found[name.as_posix()] = lines
    return found


def test_no_file_is_too_long() -> None:
    assert (PACKAGE / NOTIFIER).exists()
    assert too_long(PACKAGE) == {}


@pytest.mark.parametrize(
    ("folder", "lines", "found"), [("app", 300, 0), ("app", 301, 1), ("wire", 301, 0), ("wire", 401, 1)]
)
def test_a_file_that_is_too_long_is_found(folder: str, lines: int, found: int, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "x.py").write_text("\n" * lines)
    assert len(too_long(tmp_path)) == found
