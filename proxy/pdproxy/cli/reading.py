"""Parts that several commands share: options in seconds, and what the terminal can show."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

MAX_SECONDS = 600.0
"""The longest time that most of such options may give."""


def seconds(minimum: float, maximum: float = MAX_SECONDS) -> Callable[[str], float]:
    """Return a reader of options in seconds, from `minimum` to `maximum`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(
                f"expected {minimum:g} to {maximum:g} seconds, got {text!r}"
            )
        return value

    return read


def can_print(text: str) -> bool:
    """Return whether standard output can print these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
