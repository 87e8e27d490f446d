"""Plants bugs into copies of the package, one at a time, and has chaos find them; without any bug
it must find nothing.

Usage: python -m tests.chaos.planted [NAME ...] [--seeds 30] [--first 0] [--seconds 15] [--faults 3]
[--jobs 2] [--control N]

Prints for each bug the seed that caught it, the rules that were broken, and the CPU seconds of all
its seeds. The control runs N seeds without a bug (by default as many as are tried with one). The
exit code is 1 if a bug was missed or the control found anything, 2 if a name is wrong.
"""

from __future__ import annotations

import argparse
import sys

from tests.chaos.options import Options
from tests.chaos.planted.bugs import BUGS
from tests.chaos.planted.hunt import HEAD, Hunt, hunts

_CONTROL = "no bug"


def main(arguments: list[str]) -> int:
    """Hunt the bugs, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.planted", description="Have chaos find planted bugs."
    )
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help=f"bugs (default: all): {', '.join(BUGS)}"
    )
    parser.add_argument("--seeds", type=int, default=30, help="seeds per bug at most (default: 30)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=15.0,
        help="virtual seconds of load and faults (default: 15)",
    )
    parser.add_argument(
        "--faults", type=float, default=3.0, help="faults per virtual second (default: 3)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="bugs at once (default: 2)")
    parser.add_argument("--control", type=int, help="seeds without a bug (default: as --seeds)")
    given = parser.parse_args(arguments)
    if wrong := [name for name in given.names if name not in BUGS]:
        parser.error(f"no bug named {', '.join(wrong)}")
    seeds = range(given.first, given.first + given.seeds)
    control = seeds if given.control is None else seeds[: given.control]
    hunted = [(name, BUGS[name], seeds) for name in given.names or BUGS]
    without = [
        (_CONTROL, None, part)
        for first in range(given.jobs)
        if (part := control[first :: given.jobs])
    ]
    print(HEAD, flush=True)
    options = Options(seconds=given.seconds, faults=given.faults)
    good = [_say(found) for found in hunts([*hunted, *without], options, given.jobs)]
    print(f"{sum(good)} of {len(good)} are as they should be")
    return int(not all(good))


def _say(found: Hunt) -> bool:
    print(found.line(), flush=True)
    for seed, one in found.others:
        print(f"  seed {seed} of {found.name}: {one.rule}: {one.text}", flush=True)
    return found.good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
