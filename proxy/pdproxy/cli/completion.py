"""`pdproxy completion`: print a script that makes a shell complete commands, options and file
names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdproxy.cli.parser import examples

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands

SHELLS = ("bash", "zsh", "tcsh")


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "completion",
        help=summary,
        description="Print a script with which the shell completes commands, options and file "
        "names "
        "of "
        "pdproxy. Print it again "
        "after an upgrade.",
        epilog=examples(
            "pdproxy completion bash > ~/.local/share/bash-completion/completions/pdproxy",
            "pdproxy completion zsh > ~/.zfunc/_pdproxy",
            "pdproxy completion tcsh > ~/.pdproxy.tcsh",
        )
        + "\nMake the folder first if it is missing: mkdir -p "
        "~/.local/share/bash-completion/completions ~/.zfunc"
        + "\nbash needs the package bash-completion; new shells read the file."
        + "\nzsh needs these lines in ~/.zshrc: fpath=(~/.zfunc $fpath); autoload -U compinit; "
        "compinit" + "\ntcsh needs this line in ~/.tcshrc: source ~/.pdproxy.tcsh",
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or tcsh")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    # Imported here: only this command needs the library, and all commands.
    import shtab

    from pdproxy.cli.commands import COMMANDS, parser_of

    parser = parser_of(COMMANDS)
    kinds = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "PATH": shtab.FILE}
    for action in _actions(parser):
        if action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, arguments.shell) + "\n")
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subcommands."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of them; the library reads it, too
        yield action
        if isinstance(action.choices, dict):
            for one in action.choices.values():
                yield from _actions(one)
