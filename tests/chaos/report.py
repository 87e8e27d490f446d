"""What is printed of runs."""

from __future__ import annotations

from collections.abc import Iterable

from tests.chaos.course import Result
from tests.chaos.finding import Finding
from tests.chaos.options import Options
from tests.chaos.run import Shortest


def line(options: Options, result: Result) -> str:
    """Return one line about a run."""
    ends = ", ".join(f"{count} {how}" for how, count in result.calls.items()) or "no requests"
    count = len(result.findings)
    verdict = "no findings" if not count else f"{count} finding{'s' if count > 1 else ''}"
    return (
        f"seed {options.seed}: {verdict}; {ends}; {sum(result.faults.values())} faults; "
        f"{result.virtual:.0f} virtual s in"
        f" {result.cpu:.1f} CPU s; digest {result.digest}"
    )


def findings(found: Iterable[Finding]) -> list[str]:
    """Return a line for each finding."""
    return [f"  {one.rule}: {one.text}" for one in found]


def shrunk(options: Options, found: Shortest) -> list[str]:
    """Return the lines about the shortest schedule."""
    only = frozenset(item.number for item in found.items)
    lines = [
        (
            f"  the shortest schedule that fails, after {found.runs} runs, has {len(found.items)} "
            f"items:"
        )
    ]
    lines += [f"    {item.number}: {item.words()}" for item in found.items]
    lines += ["  it fails with:", *(f"  {one}" for one in findings(found.findings))]
    return [*lines, f"  repeat it: {options.command(only)}"]
