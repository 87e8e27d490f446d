"""The entry point: finds the command, and reports wrong settings in one line per mistake with exit code 2.

A command sets the function that is called as `run`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from pdproxy.cli.commands import parser_for
from pdproxy.cli.parser import USAGE_ERROR
from pdproxy.settings.errors import SettingsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (None: the process's own) and return its exit code."""
    if sys.stderr is None:  # closed by the parent process: only what is written there is lost
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the end
    given = sys.argv[1:] if argv is None else argv
    try:
        arguments = parser_for(given).parse_args(given)
    except SystemExit as stop:  # --help, --version, or arguments that don't parse
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    try:
        code: int = arguments.run(arguments)
    except SettingsError as error:
        with contextlib.suppress(OSError):  # standard error is closed
            sys.stderr.writelines(f"{arguments.prog}: {mistake}\n" for mistake in error.mistakes)
        return USAGE_ERROR
    return code


if __name__ == "__main__":
    sys.exit(main())
