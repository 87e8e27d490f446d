"""The argument parser that all commands share. Owns how wrong arguments are reported."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    # argparse gives the type no public name, and at run time it takes no parameter.
    from argparse import _SubParsersAction

    Commands = _SubParsersAction["Parser"]

USAGE_ERROR = 2
"""The exit code of wrong arguments and of wrong settings, as in argparse."""


class Parser(argparse.ArgumentParser):
    """A parser with errors of two lines, however many options there are, and without abbreviations.

    An abbreviation that is unique today may mean another option, or none, after an upgrade.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Print a line of usage and the message, and exit with 2."""
        sys.stderr.write(f"usage: {self.prog} ... (see {self.prog} --help)\n{self.prog}: error: {message}\n")
        raise SystemExit(USAGE_ERROR)
