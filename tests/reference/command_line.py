"""The page of the command line, made from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from pdproxy.cli.commands import COMMANDS, parser_of
from tests.reference.markdown import NOTE, cell, code, table

_HEAD = f"""# The command line

{NOTE}

Options of all commands that read settings mean the same in each. An option that is a setting
overrides its `PDPROXY_*` variable, and that overrides the file of `--config`:
[settings](settings.md). Options can't be abbreviated. The exit code is 2 if arguments or settings
are wrong.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with all commands."""
    return parser_of(COMMANDS)


def commands(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands below a parser by name, in their order."""
    return {name: child for action in of._actions for name, child in _choices(action).items()}


def options(of: argparse.ArgumentParser) -> set[str]:
    """Return the long options of a command."""
    return {
        name for action in of._actions for name in action.option_strings if name.startswith("--")
    }


def _choices(action: argparse.Action) -> dict[str, argparse.ArgumentParser]:
    return action.choices if isinstance(action, argparse._SubParsersAction) else {}


def page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_sections(parser())])


def _sections(of: argparse.ArgumentParser) -> Iterator[str]:
    for child in commands(of).values():
        if commands(child):
            yield from _sections(child)
        else:
            yield _section(child)


def _section(of: argparse.ArgumentParser) -> str:
    usage = of.format_usage().removeprefix("usage: ").strip()
    parts = [f"## {of.prog}", cell(of.description or ""), f"```text\n{usage}\n```"]
    for group in of._action_groups:
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        rows = [
            _row(of, action) for action in shown if not isinstance(action, argparse._HelpAction)
        ]
        if rows:
            own = group.title not in ("options", "positional arguments")
            parts += [f"**{cell(group.title)}**"] if own and group.title else []
            parts += [cell(group.description)] if group.description else []
            parts.append(table(("option", "meaning"), rows))
    if of.epilog:
        parts.append(f"```text\n{of.epilog.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _row(of: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    formatter = of._get_formatter()
    default = (action.option_strings or [action.dest])[0].removeprefix("--").upper()
    value = formatter._format_args(action, default) if action.nargs != 0 else ""
    names = ", ".join(action.option_strings)
    return code(f"{names} {value}".strip()), cell(formatter._expand_help(action))
