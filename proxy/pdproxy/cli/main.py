"""The entry point: finds the command, and reports wrong settings in one line per mistake with exit
code 2.

A command sets the function that is called as `run`. Owns what follows if standard output can't be
written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence

from pdproxy.cli.commands import parser_for
from pdproxy.cli.parser import USAGE_ERROR
from pdproxy.kit.plugins import PluginError
from pdproxy.settings.errors import SettingsError

_OWN = ("pdproxy", "pdproxy_lab", "pdproxy_operator")
_UNWRITABLE = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of a write to an open file. Commands report those of files that they open themselves."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (None: the process's own) and return its exit code."""
    # Closed by the parent process: only what is written there is lost.
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the end
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the end
    given = sys.argv[1:] if argv is None else argv
    return _written(lambda: _run(given))


def _run(given: Sequence[str]) -> int:
    if not given:
        with contextlib.suppress(OSError):  # standard error is closed
            parser_for(given).print_help(sys.stderr)
        return USAGE_ERROR
    try:
        return _called(given)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN:
            raise  # a defect
        with contextlib.suppress(OSError):  # standard error is closed
            sys.stderr.write(
                f"pdproxy: the Python module {error.name} is not installed, and pdproxy needs it: "
                f"install pdproxy with its dependencies\n"
            )
        return USAGE_ERROR


def _called(given: Sequence[str]) -> int:
    try:
        arguments = parser_for(given).parse_args(given)
    except SystemExit as stop:  # --help, --version, or arguments that don't parse
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    except PluginError as error:
        with contextlib.suppress(OSError):  # standard error is closed
            sys.stderr.write(f"pdproxy: {error}\n")
        return USAGE_ERROR
    try:
        code: int = arguments.run(arguments)
    except SettingsError as error:
        with contextlib.suppress(OSError):  # standard error is closed
            sys.stderr.writelines(f"{arguments.prog}: {mistake}\n" for mistake in error.mistakes)
        return USAGE_ERROR
    return code


def _written(run: Callable[[], int]) -> int:
    """Return the exit code of `run`, 1 if its output can't be written. A reader that has left, such
    as `head`, gets no error.
    """
    try:
        code = run()
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        # What is still in the buffer would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            with contextlib.suppress(OSError):  # standard error is closed
                sys.stderr.write(f"pdproxy: standard output can't be written: {error.strerror}\n")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
