"""CPU time and memory per byte of every path that reads bytes of a client or an engine, as ratios.

Usage: bodies.py [--paths body,stream] [--sizes 65536,1048576] [--times 5] [--checkout DIR] [--out
FILE]

The unit is the body of a plain completion of 64 KiB: the CPU time per byte of parsing it is 1.
Memory is in bytes per byte of input, without the input itself. Times are CPU time of the event
loop's thread (the best of `--times` runs). Memory is the peak of the allocations, measured in a
separate run. `turn ms` is the longest time for which the loop was blocked. The paths and inputs are
those of tests/fuzz/cost (`PATHS` and the tables of recipes), where a path or an input is one line.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import stage

UNIT = ("body of completions", "a plain prompt", 65_536)
"""Path, input and size (bytes) of the unit."""


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all selected paths and inputs; print and return the rows."""
    from tests.fuzz.cost.measure import measured
    from tests.fuzz.cost.paths import PATHS

    logging.disable(logging.CRITICAL)
    unit_path = next(path for path in PATHS if path.name == UNIT[0])
    unit = measured(unit_path.run, unit_path.known[UNIT[1]].render(UNIT[2]), 50, best=True).ns
    print(f"the unit: {unit:.3f} ns per byte\n", flush=True)
    found = []
    sizes = [int(size) for size in options.sizes.split(",")]
    print(
        "| path | input | "
        + " | ".join(f"CPU x, {size // 1024} KiB | memory x | turn ms" for size in sizes)
        + " |\n|---|---|"
        + "---|" * (3 * len(sizes)),
    )
    for path in PATHS:
        if options.paths and not any(name in path.name for name in options.paths.split(",")):
            continue
        for name, one in path.known.items():
            cells, growth = [], 0.0
            for size in sizes:
                if size > path.most or growth > options.most_seconds:
                    cells += ["", "", ""]
                    continue
                try:
                    cost = measured(path.run, one.render(size), options.times, best=True)
                except Exception as error:
                    cells += [type(error).__name__, "", ""]
                    continue
                growth = cost.seconds * 256  # cost may grow with the square of the size
                row = {"path": path.name, "input": name, "size": cost.size, "ns": cost.ns}
                row |= {
                    "ratio": cost.ns / unit,
                    "memory": cost.bytes,
                    "turn_ms": 1000 * cost.longest,
                }
                found.append(row)
                cells += [f"{row['ratio']:.1f}", f"{row['memory']:.1f}", f"{row['turn_ms']:.1f}"]
            print(f"| {path.name} | {name} | " + " | ".join(cells) + " |", flush=True)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paths", help="parts of names, comma separated")
    parser.add_argument("--sizes", default="65536,1048576", help="bytes of inputs, smallest first")
    parser.add_argument("--times", type=int, default=5, help="runs of each input")
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=60.0,
        help="skip a larger input that is expected to take longer",
    )
    parser.add_argument(
        "--checkout",
        type=Path,
        default=stage.ROOT,
        help="the checkout to measure, with its own paths",
    )
    parser.add_argument("--out", type=Path, help="write the rows to this file as JSON")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    sys.path[:0] = [str(checkout), str(checkout / "proxy")]
    os.nice(5)
    result = {"machine": stage.machine(), "unit": UNIT, "rows": rows(options)}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
