"""The table of all commands. A command is a module with `add(commands, summary)`, which sets the
function to call as `run`.

Modules are named here and imported when their command is called: so the proxy imports neither
tools (`pdproxy_lab`) nor the operator.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import NamedTuple

from pdproxy.cli.parser import Parser, examples


class Command(NamedTuple):
    """A command: the name of its module, and what it does, in a line."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("pdproxy.cli.serve", "run the proxy"),
    "up": Command(
        "pdproxy_lab.cli.up",
        "start engines on this machine's GPUs and the proxy in front of them",
    ),
    "demo": Command(
        "pdproxy_lab.cli.demo", "run engines, the proxy and some traffic, with a live view"
    ),
    "sim": Command("pdproxy_lab.cli.sim", "run a simulated engine"),
    "check": Command(
        "pdproxy.cli.check",
        "check whether engines will work with prefill and decode split (connector nixl)",
    ),
    "conformance": Command(
        "pdproxy_lab.cli.conformance", "prove that engines do what their connector's contract says"
    ),
    "bench": Command(
        "pdproxy_lab.cli.bench", "measure servers under an open-loop load, side by side"
    ),
    "calibrate": Command("pdproxy_lab.cli.calibrate", "measure an engine, and write its profile"),
    "simulate": Command(
        "pdproxy_lab.cli.simulate",
        "predict what engines would do with a load, with this proxy's scheduling",
    ),
    "plan": Command(
        "pdproxy_lab.cli.plan",
        "find the engines that serve a load best: how many of which role, with which chunk size",
    ),
    "operator": Command(
        "pdproxy_operator.cli", "run the Kubernetes operator of PDRuntimes and PDProxies"
    ),
    "health": Command(
        "pdproxy.cli.health", "check whether a running proxy answers, for health checks"
    ),
    "engines": Command(
        "pdproxy.cli.engines", "list, add, drain and remove the engines of a running proxy"
    ),
    "requests": Command(
        "pdproxy.cli.requests", "show the requests of a running proxy, and where their time went"
    ),
    "why": Command("pdproxy.cli.why", "show why a request went to its engines, and what ended it"),
    "notifier": Command(
        "pdproxy.cli.notifier", "print the file that makes vLLM report its KV transfers"
    ),
    "config": Command("pdproxy.cli.config", "begin a settings file; print or check the settings"),
    "completion": Command(
        "pdproxy.cli.completion", "print a script for completion in bash, zsh or tcsh"
    ),
}


def parser_for(argv: Sequence[str]) -> Parser:
    """Return the parser of a command line. The command that it names is imported alone: others may
    take long to import.
    """
    return parser_of([word for word in argv if word in COMMANDS][:1])


def parser_of(names: Collection[str]) -> Parser:
    """Return the parser with all commands. Those of these names take arguments, others are only
    listed.
    """
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
    for name, command in COMMANDS.items():
        if name in names:
            import_module(command.module).add(commands, command.summary)
        else:
            commands.add_parser(name, help=command.summary)
    return parser


class _Version(argparse.Action):
    """Prints the version, which takes a search through the installed packages: only where it is
    asked for.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from pdproxy import __version__

        print(f"pdproxy {__version__}")
        parser.exit()
