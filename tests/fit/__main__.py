"""`python -m tests.fit MEASURED`: print the table of a profile's fit to a file of measurements, as
Markdown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdproxy.engine_model.profile import load
from tests.fit.measured import read
from tests.fit.predict import predict
from tests.fit.table import markdown

USAGE_ERROR = 2
_MAX_SEEDS = 1000


def run(arguments: list[str] | None = None) -> int:
    """Print the table; return the exit code: 0, or 2 if a file or an option can't be used."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fit", description="How well a profile predicts."
    )
    parser.add_argument(
        "measured",
        metavar="FILE",
        type=Path,
        help="what was measured: JSON, see tests.fit.measured",
    )
    parser.add_argument(
        "--profile", metavar="NAME", default="h200-8b", help="a shipped profile, or a file"
    )
    parser.add_argument("--seeds", metavar="N", default="15", help="runs per row (default: 15)")
    given = parser.parse_args(arguments)
    try:
        if (
            not given.seeds.isascii()
            or not given.seeds.isdigit()
            or not 1 <= int(given.seeds[:9]) <= _MAX_SEEDS
        ):
            raise ValueError(f"--seeds must be 1 to {_MAX_SEEDS}, got {given.seeds!r}")
        seeds, measured, profile = int(given.seeds), read(given.measured), load(given.profile)
        predictions = [predict(row, measured.load, profile, range(seeds)) for row in measured.rows]
    except ValueError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return USAGE_ERROR
    sys.stdout.write(markdown(measured, predictions, profile, seeds))
    return 0


if __name__ == "__main__":
    sys.exit(run())
