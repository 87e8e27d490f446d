"""Files of keys that change: what is half-written, or was cut, opens nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdproxy.kit.reloading_file import ReloadingFile
from tests.fakes.files import renewed

WHOLE = "team:key models=nothing max_tokens=1\n"
NO_NEWLINE = "has no newline behind its last line"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of keys."""
    path = tmp_path / "keys"
    path.write_text(WHOLE)
    return path


def followed(path: Path, *, of_lines: bool = True) -> ReloadingFile[str]:
    return ReloadingFile("keys", [str(path)], path.read_text, of_lines=of_lines)


@pytest.mark.parametrize("of_lines", [True, False])
def test_a_file_is_read_once_it_was_the_same_at_two_looks(path: Path, of_lines: bool) -> None:
    """Also one that was emptied to be written again, and one that is missing for a moment."""
    file = followed(path, of_lines=of_lines)
    for text in ("", "team:k", "team:key", "team:key\n"):
        path.write_text(text)
        assert (file.reload_if_changed(), file.is_changing, file()) == (False, True, WHOLE)
    path.unlink()
    assert (file.reload_if_changed(), file.failure) == (False, None)
    path.write_text("team:other\n")
    assert [file.reload_if_changed() for _ in range(3)] == [False, True, False]
    assert (file(), file.is_changing) == ("team:other\n", False)


@pytest.mark.parametrize("cut", ["team:key", "team:k", "other:key\nteam:key models=n"])
def test_a_file_that_was_cut_in_place_is_refused(path: Path, cut: str) -> None:
    """The old content stays in force until the last line is whole; a file renamed to this place
    needs no newline.
    """
    file = followed(path)
    path.write_text(cut)
    for _ in range(3):
        file.reload_if_changed()
    path.chmod(0o600)
    for _ in range(3):
        file.reload_if_changed()
    assert file() == WHOLE
    assert NO_NEWLINE in str(file.failure)
    path.write_text(f"{cut}\n")
    assert [file.reload_if_changed() for _ in range(2)] == [False, True]
    assert (file(), file.failure) == (f"{cut}\n", None)
    renewed(path, cut)
    assert [file.reload_if_changed() for _ in range(2)] == [False, True]
    assert (file(), file.failure) == (cut, None)


def test_the_first_file_needs_no_newline_nor_does_another_mode_change_it(path: Path) -> None:
    path.write_text("team:key")
    file = followed(path)
    path.chmod(0o400)
    assert [file.reload_if_changed() for _ in range(2)] == [False, True]
    assert (file(), file.failure) == ("team:key", None)


def test_an_empty_file_is_whole(path: Path) -> None:
    """Who removes the last key has withdrawn it."""
    file = followed(path)
    path.write_text("")
    assert [file.reload_if_changed() for _ in range(2)] == [False, True]
    assert (file(), file.failure) == ("", None)


def test_what_changes_while_it_is_read_is_not_used(path: Path) -> None:
    """The next looks decide."""

    def read() -> str:
        text = path.read_text()
        if text == "team:half\n":
            path.write_text(WHOLE + "other:key\n")
        return text

    file = ReloadingFile("keys", [str(path)], read)
    path.write_text("team:half\n")
    assert [file.reload_if_changed() for _ in range(2)] == [False, False]
    assert (file(), file.is_changing) == (WHOLE, True)
    assert [file.reload_if_changed() for _ in range(2)] == [False, True]
    assert file() == WHOLE + "other:key\n"
