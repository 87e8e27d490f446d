"""A row of the page of `.ci/full` says what the output of a part says, and parts that did not run
keep theirs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.full import page
from tests.full.page import Row

HEAD = "commit 0123456789abcdef0123456789abcdef01234567{}\n2026-12-01, 2 cores, Python 3.11.7\n\n"
FIRST = "== agents: what they send (70 s)\n248 requests, 0 of them new\n195 passed in 13.29s\n\n"
SECOND = "== shapes | of all (90 s)\n===== {} =====\n\n"
DONE = "== done (130 s)\n"


@pytest.mark.parametrize(
    ("output", "row"),
    [
        (
            HEAD.format("") + FIRST + SECOND.format("3 passed, 1 skipped in 9.5s (0:00:09)") + DONE,
            Row(
                *("clients", r"agents; shapes \| of all", "`01234567`", "2026-12-01", "60"),
                *("198 passed", "passed", "248 requests, 0 of them new"),
            ),
        ),
        (
            HEAD.format(" with uncommitted changes")
            + FIRST
            + SECOND.format("2 failed, 3 passed in 9.5s")
            + f"^ FAILED\n{DONE}",
            Row(
                *("clients", r"agents; shapes \| of all", "`01234567` and changes", "2026-12-01"),
                *("60", "198 passed, 2 failed", "**failed**", "248 requests, 0 of them new"),
            ),
        ),
        (
            HEAD.format("") + FIRST,
            Row(
                *("clients", "agents", "`01234567`", "2026-12-01", "0", "195 passed"),
                *("**did not end**", "248 requests, 0 of them new"),
            ),
        ),
        (
            HEAD.format("") + f"== cost (1 s)\npip: no such file\n^ FAILED\n\n{DONE}",
            Row("clients", "cost", "`01234567`", "2026-12-01", "129", "", "**failed**", ""),
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
    assert f"1 of {len(rows)} parts have passed, all on `01234567`." in kept.read_text()
