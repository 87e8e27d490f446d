"""The page of the command line, made from the parsers."""

from __future__ import annotations

import argparse
import textwrap

from pdproxy.cli.commands import COMMANDS, parser_of
from pdproxy.cli.settings_flags import RECEIVER
from pdproxy.settings.load import POOL
from tests.reference.markdown import NOTE, cell, code, table

_HEAD = f"""# The command line

{NOTE}

An option with the name of a setting behind it sets that: [settings](settings.md) says what it
means, and what it is by default. It overrides the setting's `PDPROXY_*` variable, and that
overrides the file of `--config`. A group of options that several commands have is shown at the
first of them. Options can't be abbreviated. The exit code is 2 if arguments or settings are wrong.
"""
_ELSEWHERE = {"pdproxy sim": "Faults: [their kinds and moments](../guide/simulator.md#faults)."}
"""What stands in place of a command's text below its options, before its examples."""
_SECTIONS = {POOL: "pools[]", RECEIVER.removesuffix("."): "pools[].nodes[].receiver"}
"""Sections of the settings, by the words for them in options."""


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
    seen: dict[tuple[str, ...], str] = {}
    known: dict[str, tuple[str, list[str]]] = {}
    return "\n".join([_HEAD, *(_section(one, seen, known) for one in ends(parser()))])


def ends(of: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the commands that have no further ones below them."""
    below = commands(of).values()
    return [end for child in below for end in ends(child)] if below else [of]


def shown(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """Return the options of a group that the help shows, without `--help` itself."""
    return [
        action
        for action in group._group_actions
        if action.help is not argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]


def _section(
    of: argparse.ArgumentParser,
    seen: dict[tuple[str, ...], str],
    known: dict[str, tuple[str, list[str]]],
) -> str:
    """Return a command's section. `seen` has the groups that stand above, by what they show, each
    with its command; `known` those of settings, by their titles, each with its command and options.
    """
    usage = of.format_usage().removeprefix("usage: ").strip()
    parts = [f"## {of.prog}", cell(of.description or ""), f"```text\n{usage}\n```"]
    above: dict[str, list[str]] = {}
    for group in of._action_groups:
        if not (actions := shown(group)):
            continue
        title = "" if group.title in (None, "options", "positional arguments") else group.title
        text = _group(of, group.description, actions)
        settings = [_names(of, one) for one in actions if "." in one.dest]
        if title and len(settings) == len(actions):
            # a group of settings may stand above with more of them
            first = known.setdefault(title, (of.prog, settings))
            if first[0] != of.prog and {*settings} <= {*first[1]}:
                without = ", ".join(one for one in first[1] if one not in settings)
                rest = f" (without {without})" if without else ""
                above.setdefault(first[0], []).append(f"**{cell(title)}**{rest}")
                continue
        if title and (at := seen.setdefault((title, *text), of.prog)) != of.prog:
            above.setdefault(at, []).append(f"**{cell(title)}**")
            continue
        parts += [f"**{cell(title)}**"] if title else []
        parts += text
    parts += [
        f"{', '.join(titles)}: as of [`{at}`](#{at.replace(' ', '-')})."
        for at, titles in above.items()
    ]
    before, _, examples = (of.epilog or "").partition("examples:\n")
    if before.strip():
        parts.append(_ELSEWHERE[of.prog])
    if examples:
        parts.append(f"```text\n{textwrap.dedent(examples).strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _group(
    of: argparse.ArgumentParser, about: str | None, actions: list[argparse.Action]
) -> list[str]:
    """Return the paragraphs of a group of options: those that set a setting only name it."""
    settings = [action for action in actions if "." in action.dest]
    rows = [_row(of, action) for action in actions if action not in settings]
    listed = ", ".join(f"{_names(of, one)} ({code(setting_of(one))})" for one in settings)
    return [
        *([cell(about)] if about else []),
        *([table(("option", "meaning"), rows)] if rows else []),
        *([listed] if listed else []),
    ]


def setting_of(action: argparse.Action) -> str:
    """Return the path of the setting that an option sets, as the page of the settings has it."""
    first, _, rest = action.dest.partition(".")
    return f"{_SECTIONS.get(first, first)}.{rest}"


def _row(of: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    return _names(of, action), cell(of._get_formatter()._expand_help(action))


def _names(of: argparse.ArgumentParser, action: argparse.Action) -> str:
    default = (action.option_strings or [action.dest])[0].removeprefix("--").upper()
    value = of._get_formatter()._format_args(action, default) if action.nargs != 0 else ""
    return code(f"{', '.join(action.option_strings)} {value}".strip())
