"""Runs many seeds of chaos, and sums them up: what broke a rule, and what each seed took.

The number of a seed says how KV moves in it: see `KINDS`. Six seeds in a row have them all.
`--others` runs one seed of each other way instead.

Usage: python -m tests.chaos.many [--first 0] [--seeds 50] [--seconds 60] [--faults 1.5] [--jobs 2]
[--cpu 10] [--workers 1] [--others]

The exit code is 1 if a seed has findings, takes more than `--cpu` CPU seconds, or has so few right
answers that it shows nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from tests.chaos import report
from tests.chaos.course import Result
from tests.chaos.options import Options
from tests.chaos.run import run_each
from tests.chaos.setup import CONNECTORS

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"notices": "notifier"},
    {"connector": "nixl-push"},
    {},
    {"notices": "early"},
    {"connector": "mooncake"},
)
"""Options of the seed `n`: those at the place `n % len(KINDS)`."""
_SEEN = {Options().connector, *(kind.get("connector") for kind in KINDS)}
RIGHT = 5
"""Right answers of a seed at least."""
OTHERS: tuple[Options, ...] = (
    *(Options(seed=3, connector=one) for one in CONNECTORS if one not in _SEEN),
    Options(seed=2, prefill=1, decode=2, pool="any"),
    Options(seed=4, prefill=2, decode=2, encode=2),
    Options(seed=5, workers=2, notices="early"),
)


def main(arguments: list[str]) -> int:
    """Run the seeds, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.many", description="Run many seeds of chaos."
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=50, help="how many (default: 50)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="virtual seconds of load and faults (default: 60)",
    )
    parser.add_argument(
        "--faults", type=float, default=1.5, help="faults per virtual second (default: 1.5)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="seeds at once (default: 2)")
    parser.add_argument(
        "--cpu", type=float, default=10.0, help="CPU seconds of a seed at most (default: 10)"
    )
    parser.add_argument("--workers", type=int, default=1, help="workers of each proxy (default: 1)")
    parser.add_argument(
        "--others", action="store_true", help="one seed of each way that those have not"
    )
    given = parser.parse_args(arguments)
    seeds = range(given.first, given.first + given.seeds)
    usual = [Options(seed=one, workers=given.workers, **KINDS[one % len(KINDS)]) for one in seeds]
    runs = [
        replace(one, seconds=given.seconds, faults=given.faults)
        for one in (OTHERS if given.others else usual)
    ]
    return summed(run_each(runs, given.jobs), given.cpu)


def summed(results: Iterable[tuple[Options, Result]], most: float) -> int:
    """Print the seeds that failed, and a summary of all; return the exit code. `most`: CPU seconds
    of a seed.
    """
    cpu: list[float] = []
    ends: Counter[str] = Counter()
    faults = failed = slow = few = 0
    for one, result in results:
        cpu.append(result.cpu)
        faults += sum(result.faults.values())
        for how, count in result.calls.items():
            ends[" ".join(how.split(" ")[:3])] += count
        slow += result.cpu > most
        few += result.calls.get("right", 0) < RIGHT
        if result.findings:
            failed += 1
            lines = [
                report.line(one, result),
                *report.findings(result.findings),
                f"  repeat it: {one.command()}",
            ]
            print("\n".join(lines), flush=True)
    told = ", ".join(f"{count} {how}" for how, count in ends.most_common())
    print(
        f"{len(cpu)} seeds, {failed} with findings; {ends.total()} requests under {faults} "
        f"faults: {told}"
    )
    print(
        f"CPU seconds of a seed: {fmean(cpu):.1f} on average, {max(cpu):.1f} at most; {slow} "
        f"took more than {most:g}"
    )
    if few:
        print(f"seeds with fewer than {RIGHT} right answers: {few}")
    return int(failed > 0 or slow > 0 or few > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
