"""A row of the page of `.ci/full` says what the output of a part says, and of which product that
is; parts that did not run keep theirs.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.full import page
from tests.full.page import Row

HEAD = "commit 0123456789abcdef0123456789abcdef01234567{}\n2026-12-01, 2 cores, Python 3.11.7\n\n"
FIRST = "== agents: what they send (70 s)\n248 requests, 0 of them new\n195 passed in 13.29s\n\n"
SECOND = "== shapes | of all (90 s)\n===== {} =====\n\n"
DONE = "== done (130 s)\n"
PRODUCT, OLD = "89abcdef", "fedcba98"


@pytest.fixture(autouse=True)
def _products(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product is that of all commits."""
    monkeypatch.setattr(page, "product_of", lambda _: PRODUCT)


@pytest.mark.parametrize(
    ("output", "row"),
    [
        (
            HEAD.format("") + FIRST + SECOND.format("3 passed, 1 skipped in 9.5s (0:00:09)") + DONE,
            Row(
                *("clients", r"agents; shapes \| of all", PRODUCT, "`01234567`", "2026-12-01"),
                *("60", "198 passed", "passed", "248 requests, 0 of them new"),
            ),
        ),
        (
            HEAD.format(" with uncommitted changes")
            + FIRST
            + SECOND.format("2 failed, 3 passed in 9.5s")
            + f"^ FAILED\n{DONE}",
            Row(
                *("clients", r"agents; shapes \| of all", "", "`01234567` and changes"),
                *(
                    "2026-12-01",
                    "60",
                    "198 passed, 2 failed",
                    "**failed**",
                    "248 requests, 0 of them new",
                ),
            ),
        ),
        (
            HEAD.format("") + FIRST,
            Row(
                *("clients", "agents", PRODUCT, "`01234567`", "2026-12-01", "0"),
                *("195 passed", "**did not end**", "248 requests, 0 of them new"),
            ),
        ),
        (
            HEAD.format("") + f"== cost (1 s)\npip: no such file\n^ FAILED\n\n{DONE}",
            Row(
                *("clients", "cost", PRODUCT, "`01234567`", "2026-12-01", "129", "", "**failed**"),
                "",
            ),
        ),
    ],
    ids=["passed", "failed", "killed", "a command failed"],
)
def test_a_row_says_what_the_output_says(output: str, row: Row) -> None:
    assert page.row_of("clients", output) == row


def test_parts_that_did_not_run_keep_their_rows(tmp_path: Path) -> None:
    kept = tmp_path / "full.md"
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    for part in ("clients", "chart"):
        (outputs / f"{part}.txt").write_text(HEAD.format("") + FIRST + DONE)
    page.update(outputs, kept)
    (outputs / "clients.txt").unlink()
    (outputs / "chart.txt").write_text(HEAD.format("") + FIRST)
    (outputs / "unknown.txt").write_text("")
    page.update(outputs, kept)
    rows = {row.part: row for row in page.read(kept.read_text())}
    assert list(rows) == page.parts()
    assert rows["clients"].result == "passed"
    assert rows["chart"].result == "**did not end**"
    assert rows["busy"] == Row("busy")


def test_a_row_of_another_product_is_marked_and_is_not_counted_among_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one whose product is not known; a page that was read is written as it was."""
    kept, outputs = tmp_path / "full.md", tmp_path / "outputs"
    outputs.mkdir()
    for part, changes in (("clients", ""), ("chart", " with uncommitted changes")):
        (outputs / f"{part}.txt").write_text(HEAD.format(changes) + FIRST + DONE)
    monkeypatch.setattr(page, "product_of", lambda _: OLD)
    page.update(outputs, kept)
    assert f"1 of {len(page.parts())} parts have passed with the newest" in kept.read_text()
    for part in ("clients", "chart"):
        (outputs / f"{part}.txt").unlink()
    (outputs / "image.txt").write_text(HEAD.format("") + FIRST + DONE)
    (outputs / "busy.txt").write_text(HEAD.format("") + FIRST)
    monkeypatch.setattr(page, "product_of", lambda _: PRODUCT)
    page.update(outputs, kept)
    lines = kept.read_text().splitlines()
    assert (
        f"1 of {len(page.parts())} parts have passed with the newest product (`{PRODUCT}`), "
        "2 with an older one."
    ) in lines
    said = {line.split(" | ")[0]: line.split(" | ")[2] for line in lines if line.startswith("| `")}
    assert said["| `clients`"] == f"`{OLD}` older"
    assert said["| `chart`"] == "older"
    assert said["| `image`"] == said["| `busy`"] == f"`{PRODUCT}`"
    assert said["| `engines`"] == ""
    before = kept.read_text()
    page.update(tmp_path, kept)
    assert kept.read_text() == before


@pytest.mark.skipif(shutil.which("git") is None, reason="git asks what a commit has")
def test_a_product_is_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docs and tests change none; git says what the page tells its readers to ask."""
    monkeypatch.undo()
    monkeypatch.setattr(page, "ROOT", tmp_path)

    def git(*arguments: str) -> bytes:
        line = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(line, check=True, capture_output=True).stdout

    git("init", "-q")
    found = []
    for name in ("proxy/a.py", "docs/a.md", "tests/a.py", "pyproject.toml", "requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
        git("add", ".")
        git("commit", "-q", "-m", name)
        found.append(page.product_of("HEAD"))
    assert found[0] == found[1] == found[2]
    assert len({*found}) == 3
    asked = f"git -C {tmp_path} ls-tree HEAD proxy pyproject.toml requirements.lock | sha256sum"
    said = subprocess.run(["sh", "-c", asked], check=True, capture_output=True, text=True).stdout
    assert said[:8] == found[-1]
    assert page.product_of("0123456789") == ""
