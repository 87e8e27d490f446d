"""Plants bugs into copies of the package, one at a time, and runs the test that is to find each.

Usage: python -m tests.mutations.planted [NAME ...] [--jobs 2] [--limit 120]

Prints a line for each bug. Before, all these tests are run without a bug: they must pass. The exit
code is 1 if a bug was missed or a test fails without one, 2 if a name is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.mutations.__main__ import NOTICED, SURVIVED, tested
from tests.mutations.worker_bugs import BUGS


def main(arguments: Sequence[str]) -> int:
    """Plant the bugs, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations.planted", description="Have tests find planted bugs."
    )
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help=f"bugs (default: all): {', '.join(BUGS)}"
    )
    parser.add_argument("--jobs", type=int, default=2, help="at once (default: 2)")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds of a bug's test (default: 120)"
    )
    given = parser.parse_args(arguments)
    if wrong := [name for name in given.names if name not in BUGS]:
        parser.error(f"no bug named {', '.join(wrong)}")
    bugs = {name: BUGS[name] for name in given.names or BUGS}
    each = sorted({bug.test for bug in bugs.values()})
    if (found := tested(None, each, given.limit * len(each))) != SURVIVED:
        print(f"without a bug: {found}")
        return 1
    with ThreadPoolExecutor(given.jobs) as pool:
        results = pool.map(lambda bug: tested(bug.plant, [bug.test], given.limit), bugs.values())
        missed = 0
        for (name, bug), result in zip(bugs.items(), results, strict=True):
            print(f"| {name} | {result} | {bug.test.rpartition('::')[2]} |", flush=True)
            missed += result != NOTICED
    print(f"{len(bugs) - missed} of {len(bugs)} were found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
