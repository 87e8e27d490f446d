"""What .ci/run and .ci/full do about tests that fail. A test that failed once and passes alone lets
work land, with a row.

python -m tests.failures check COLLECTED    Is the list in order? COLLECTED: what `pytest
                                            --collect-only -q` has printed.
python -m tests.failures few REPORT         May what failed last run again, alone? Not more than
                                            three tests.
python -m tests.failures rows REPORT --where TEXT --to FILE
                                            Print the rows of tests that failed, and write them to a
                                            file. Exit code 3 if a test has a row in the list: it
                                            failed before, and nobody has mended it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

from tests.failures.recorder import recorded
from tests.failures.rows import LIST, Row, parse, unknown

MOST = 3
"""So many tests of one run may fail and run again. More of them are no accident."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
KNOWN = 3


def check(collected: Path) -> str | None:
    """Return what is wrong with the list."""
    names = {line for line in collected.read_text().splitlines() if "::" in line}
    try:
        listed = parse(LIST.read_text())
    except ValueError as error:
        return f"{LIST.name}: {error}"
    missing = unknown(listed.named(), names)
    return f"{LIST.name}: there is no test {', '.join(missing)}" if missing else None


def few(report: Path, last_failed: Path = LAST_FAILED) -> str | None:
    """Return why the tests that failed may not run again."""
    failed, known = set(json.loads(last_failed.read_text())), recorded(report).keys()
    if failed != known:
        return f"pytest would run {sorted(failed)} again, but {sorted(known)} failed"
    return (
        None
        if 0 < len(failed) <= MOST
        else f"{len(failed)} tests failed: only up to {MOST} run again"
    )


def rows(report: Path, where: str, to: Path, known: set[str]) -> int:
    """Print and write the rows of a report. Return an exit code."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    )
    today = datetime.datetime.now(datetime.UTC).date()
    found = [
        Row(test, commit.stdout.strip(), today, where, said)
        for test, said in recorded(report).items()
    ]
    text = "\n".join(row.toml() for row in found)
    to.write_text(text)
    print(text)
    print(f"{len(found)} rows for tests/{LIST.name}, also in {to}")
    again = [row.test for row in found if row.test in known]
    for test in again:
        print(f"{test} has a row in tests/{LIST.name}: it failed before, and nobody has mended it")
    return KNOWN if again else 0


def main(arguments: list[str]) -> int:
    """Run a command. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.failures")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("collected", type=Path)
    commands.add_parser("few").add_argument("report", type=Path)
    made = commands.add_parser("rows")
    made.add_argument("report", type=Path)
    made.add_argument("--where", required=True)
    made.add_argument("--to", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.command == "rows":
        return rows(
            given.report,
            given.where,
            given.to,
            {row.test for row in parse(LIST.read_text()).failed},
        )
    wrong = check(given.collected) if given.command == "check" else few(given.report)
    if wrong is not None:
        print(wrong, file=sys.stderr)
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
