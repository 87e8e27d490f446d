"""The entry point: finds the command, and reports wrong settings in one line with exit code 2.

Owns the list of commands. A command is a module with `add(commands)`, which sets the function to call as `run`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from pdproxy import __version__
from pdproxy.cli import check, config, conformance, demo, notifier, serve, sim
from pdproxy.cli.parser import USAGE_ERROR, Parser
from pdproxy.settings.errors import SettingsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (None: the process's own) and return its exit code."""
    if sys.stderr is None:  # closed by the parent process: only what is written there is lost
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the end
    parser = Parser(
        prog="pdproxy", description="One OpenAI server in front of vLLM engines with prefill and decode split."
    )
    parser.add_argument("--version", action="version", version=f"pdproxy {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, demo, sim, check, conformance, notifier, config):
        command.add(commands)
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # --help, --version, or arguments that don't parse
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    try:
        code: int = arguments.run(arguments)
    except SettingsError as error:
        with contextlib.suppress(OSError):  # standard error is closed
            sys.stderr.write(f"pdproxy: {error}\n")
        return USAGE_ERROR
    return code


if __name__ == "__main__":
    sys.exit(main())
