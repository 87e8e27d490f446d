"""The list of all commands. A command is a module of its name with `add(commands)`, which sets the function to call as `run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pdproxy.cli.parser import Parser, examples

COMMANDS = (
    "serve",
    "demo",
    "sim",
    "check",
    "conformance",
    "bench",
    "calibrate",
    "simulate",
    "plan",
    "chaos",
    "health",
    "engines",
    "notifier",
    "config",
    "completion",
)


def parser_for(argv: Sequence[str]) -> Parser:
    """Return the parser of a command line. A command that is named first is imported alone: others may take long to import."""
    return parser_of(argv[:1] if argv and argv[0] in COMMANDS else () if list(argv) == ["--version"] else COMMANDS)


def parser_of(names: Sequence[str]) -> Parser:
    """Return the parser with these commands."""
    parser = Parser(
        prog="pdproxy",
        description="One OpenAI server in front of vLLM engines with prefill and decode split. "
        "`pdproxy COMMAND --help` describes a command.",
        epilog=examples(
            "pdproxy demo",
            "pdproxy serve --prefill 127.0.0.1:8200 --decode 127.0.0.1:8300",
            "pdproxy check --prefill 127.0.0.1:8200 --decode 127.0.0.1:8300",
        ),
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        import_module(f"pdproxy.cli.{name}").add(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version, which takes a search through the installed packages: only where it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from pdproxy import __version__

        print(f"pdproxy {__version__}")
        parser.exit()
