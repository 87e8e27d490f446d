"""The page of `.ci/full` (docs/evidence/full.md): a row for each part, made of the output of its
last run. `python -m tests.full.page FOLDER` reads `FOLDER/PART.txt`: a part without a file keeps
its row.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.reference.markdown import ROOT, cell, code, table, wrapped

PAGE = ROOT / "docs" / "evidence" / "full.md"
_HEAD = """# The longer proofs

<!-- made by `.ci/full` of the outputs of its parts -->

`.ci/full` runs all parts, `.ci/full PART` one of them
([contributing](../internals/contributing.md#test)). A row is a part's last run; "and changes": the
tree had some that were not committed. "Said" is the last number of its output, which stays in
`.full/PART.txt` where it ran.
"""
_COLUMNS = ("part", "what", "commit", "day", "seconds", "tests", "result", "said")
_STEP = re.compile(r"^== (.*?)(?: \((\d+) s\))?$")
_SUMMARY = re.compile(r"^(?:=+ )?\d+ (?:failed|passed|skipped|errors?)\b.* in [\d.]+s")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?)\b")
_DONE, _FAILED = "== done", "^ FAILED"
_MAX_SAID = 160
"""Characters of a line that is shown."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the last run of a part has shown: cells of the table, Markdown."""

    part: str
    what: str = "no run"
    commit: str = ""
    day: str = ""
    seconds: str = ""
    tests: str = ""
    result: str = ""
    said: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells, in the order of the columns."""
        return tuple(getattr(self, name) for name in _COLUMNS)


def row_of(part: str, output: str) -> Row:
    """Return the row of a part's output.

    A run that has no last step was ended from outside.
    """
    lines = output.splitlines()
    end = next((at for at, line in enumerate(lines) if line.startswith(_DONE)), None)
    lines = lines if end is None else lines[: end + 1]
    steps = [found for line in lines if (found := _STEP.match(line))]
    words = [step[1] for step in steps if not step[0].startswith(_DONE)]
    times = [int(step[2]) for step in steps if step[2]]
    counts = {"passed": 0, "failed": 0}
    for line in lines:
        if _SUMMARY.match(line):
            for count, what in _COUNT.findall(line):
                counts["passed" if what == "passed" else "failed"] += int(count)
    has_failed = _FAILED in lines or counts["failed"] > 0
    commit, _, changes = lines[0].removeprefix("commit ").partition(" ")
    return Row(
        part,
        cell("; ".join(word.partition(":")[0] for word in words)),
        code(commit[:8]) + (" and changes" if changes else ""),
        lines[1].partition(",")[0],
        str(times[-1] - times[0]) if times else "",
        cell(", ".join(f"{count} {what}" for what, count in counts.items() if count)),
        "**failed**" if has_failed else "**did not end**" if end is None else "passed",
        cell(_said(lines[2:])),
    )


def _said(lines: Sequence[str]) -> str:
    """Return the last line that says a number, and no number of tests."""
    own = (
        line.strip(". ")
        for line in reversed(lines)
        if re.search(r"\d", line)
        and not (_SUMMARY.match(line) or line.startswith(("==", "FAILED")))
    )
    said = " ".join(next(own, "").replace("|", " ").split())
    return said if len(said) <= _MAX_SAID else f"{said[:_MAX_SAID]}..."


def read(page: str) -> Iterator[Row]:
    """Yield the rows of a page as it is."""
    for line in page.splitlines():
        cells = [one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(_COLUMNS) and cells[0].startswith("`"):
            yield Row(cells[0].strip("`"), *cells[1:])


def made(parts: Sequence[str], rows: Mapping[str, Row]) -> str:
    """Return the page with the rows of all parts."""
    shown = [rows.get(part, Row(part)) for part in parts]
    passed = sum(row.result == "passed" for row in shown)
    commits = {row.commit for row in shown if row.commit}
    of = f"all on {commits.pop()}" if len(commits) == 1 else f"on {len(commits)} commits"
    total = f"{passed} of {len(shown)} parts have passed, {of}."
    listed = table(_COLUMNS, ((code(row.part), *row.cells[1:]) for row in shown))
    return wrapped(f"{_HEAD}\n{total}\n\n{listed}")


def parts() -> list[str]:
    """Return the names of the parts, as `.ci/full` has them."""
    found = re.search(r"^PARTS=\(([^)]*)\)", (ROOT / ".ci" / "full").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def update(folder: Path, page: Path = PAGE) -> None:
    """Write the page anew with the outputs in a folder."""
    rows = {row.part: row for row in read(page.read_text())} if page.exists() else {}
    known = parts()
    for file in folder.glob("*.txt"):
        if file.stem in known:
            rows[file.stem] = row_of(file.stem, file.read_text(errors="replace"))
    page.write_text(made(known, rows))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tests.full.page FOLDER")
    update(Path(sys.argv[1]))
