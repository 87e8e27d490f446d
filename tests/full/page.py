"""The page of `.ci/full` (docs/evidence/full.md): a row for each part, made of the output of its
last run. `python -m tests.full.page FOLDER` reads `FOLDER/PART.txt`: a part without a file keeps
its row. Parts run behind different commits, many of which change only docs or tests: so a row also
says which product was proven.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.reference.markdown import ROOT, cell, code, table, wrapped

PAGE = ROOT / "docs" / "evidence" / "full.md"
_HEAD = """# The longer proofs

<!-- made by `.ci/full` of the outputs of its parts -->

`.ci/full` runs all parts, `.ci/full PART` one of them
([contributing](../internals/contributing.md#test)). A row is a part's last run; "and changes": the
tree had some that were not committed. "Product" is what is installed:
`git ls-tree COMMIT proxy pyproject.toml requirements.lock | sha256sum`, the first eight digits.
"Older" is all but the newest. "Said" is the last number of its output, which stays in
`.full/PART.txt` where it ran.
"""
_COLUMNS = ("part", "what", "product", "commit", "day", "seconds", "tests", "result", "said")
_INSTALLED = ("proxy", "pyproject.toml", "requirements.lock")
_OLDER = "older"
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
    product: str = ""
    """Nothing if it is not known: the tree had changes, or its commit is gone."""
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


def product_of(commit: str) -> str:
    """Return the short hash of what is installed of a commit; nothing if git does not know it."""
    line = ["git", "-C", str(ROOT), "ls-tree", commit, *_INSTALLED]
    done = subprocess.run(line, capture_output=True, check=False)
    return "" if done.returncode else hashlib.sha256(done.stdout).hexdigest()[:8]


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
        "" if changes else product_of(commit),
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
            part, what, product, *others = cells
            known = product.removesuffix(_OLDER).strip(" `")
            yield Row(part.strip("`"), what, known, *others)


def made(parts: Sequence[str], rows: Mapping[str, Row], newest: str) -> str:
    """Return the page with the rows of all parts. `newest`: the product that they should be of."""
    shown = [rows.get(part, Row(part)) for part in parts]
    of = [row.product == newest for row in shown if row.result == "passed"]
    total = (
        f"{of.count(True)} of {len(shown)} parts have passed with the newest product "
        f"({code(newest)}), {of.count(False)} with an older one."
    )
    listed = table(_COLUMNS, (_shown(row, newest).cells for row in shown))
    return wrapped(f"{_HEAD}\n{total}\n\n{listed}")


def _shown(row: Row, newest: str) -> Row:
    known = code(row.product) if row.product else ""
    older = _OLDER if row.result and row.product != newest else ""
    return replace(row, part=code(row.part), product=f"{known} {older}".strip())


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
    page.write_text(made(known, rows, product_of("HEAD")))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tests.full.page FOLDER")
    update(Path(sys.argv[1]))
