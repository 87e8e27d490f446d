"""What commands that ask engines read from their command line alike, and what their terminal can show."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

LONGEST = 600.0
"""Seconds. A command that waits longer for one thing has been forgotten."""


def seconds(least: float) -> Callable[[str], float]:
    """Return what reads an option of seconds."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= LONGEST:
            raise argparse.ArgumentTypeError(f"expected {least:g} to {LONGEST:g} seconds, got {text!r}")
        return value

    return read


def can_print(text: str) -> bool:
    """Tell whether standard output has these letters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
