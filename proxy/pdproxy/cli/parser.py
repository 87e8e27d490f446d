"""The argument parser that all commands share. Owns how wrong arguments are reported, and how help
is laid out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    # argparse gives the type no public name, and at run time it takes no parameter.
    from argparse import _SubParsersAction

    Commands = _SubParsersAction["Parser"]

USAGE_ERROR = 2
"""The exit code of wrong arguments and of wrong settings, as in argparse."""
_MAX_SHOWN = 80  # characters of an argument in an error


class Parser(argparse.ArgumentParser):
    """A parser with one line per wrong argument, with suggestions and without abbreviations.

    An abbreviation that is unique today may mean another option, or none, after an upgrade.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **options})
        # of the command that is run: the innermost parser's is kept
        self.set_defaults(prog=self.prog)
        self.keeps_rest = False
        """Whether what follows `--` is kept as it is, in `rest`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; unknown arguments are errors of the parser that met them. Otherwise the outermost
        would report those of all.
        """
        rest: list[str] = []
        if self.keeps_rest and "--" in args:
            at = args.index("--")
            args, rest = args[:at], args[at + 1 :]
        found, unknown = super().parse_known_args(args, namespace)
        if self.keeps_rest:
            found.rest = rest
        if unknown:
            options = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            self._fail(self._unknown(options) or [f"unexpected argument {_shown(unknown[0])}"])
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the message and where to find help, and exit with 2."""
        # argparse says "argument --port: ..."; an option needs no such word.
        message = message.removeprefix("argument ")
        required = message.removeprefix("the following arguments are required: ")
        for action in self._actions:
            if action.metavar == required and action.choices is not None:
                message = f"{required} is missing: expected {', '.join(map(str, action.choices))}"
        self._fail([message])

    def _unknown(self, options: Iterable[str]) -> list[str]:
        known = [
            name
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--")
        ]
        return [
            f"unknown option {_shown(option)}{_meant(option, known)}"
            for option in dict.fromkeys(options)
        ]

    def _check_value(self, action: argparse.Action, value: object) -> None:
        # argparse calls it for every argument with choices, subcommands included.
        if action.choices is None or value in action.choices:
            return
        known = [str(one) for one in action.choices]
        if action.option_strings:
            wanted = f"{action.option_strings[0]}: expected {' or '.join(known)}, got"
        else:
            wanted = f"unknown {str(action.metavar or 'value').lower()}"
        tail = _meant(str(value), known) or (
            "" if action.option_strings else f": expected {', '.join(known)}"
        )
        self._fail([f"{wanted} {_shown(str(value))}{tail}"])

    def _fail(self, mistakes: Iterable[str]) -> NoReturn:
        lines = [f"{self.prog}: {mistake}\n" for mistake in mistakes]
        sys.stderr.write(f"{''.join(lines)}See `{self.prog} --help`.\n")
        raise SystemExit(USAGE_ERROR)


class _Help(argparse.HelpFormatter):
    """Wraps texts to the width of the terminal, but keeps the lines of a text that has several:
    examples.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        return "".join(indent + line for line in text.splitlines(keepends=True))


def examples(*lines: str) -> str:
    """Return the end of a command's help: command lines that can be copied."""
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])


def _meant(wrong: str, known: list[str]) -> str:
    # Imported here: most arguments are right, and some commands run every few seconds.
    from difflib import get_close_matches

    beginning = [name for name in known if len(wrong) > 3 and name.startswith(wrong)]
    if beginning:
        return f": did you mean {' or '.join(beginning[:3])}?"
    close = get_close_matches(wrong[:_MAX_SHOWN], known, n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else ""


def _shown(text: str) -> str:
    """Return an argument as an error shows it: on one line, and not too long."""
    short = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
    return short if short.isprintable() and short and " " not in short else repr(short)
