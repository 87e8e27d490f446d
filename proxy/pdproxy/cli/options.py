"""The options that are settings, shared by all commands that need settings.

Values are passed on as text: only the schema checks them, so that a wrong value gets the same
message wherever it came from.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from pdproxy.cli.settings_flags import ENGINES, RECEIVER, FlagGroup, groups
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import CONFIG, EngineFlag, Flag, ReceiverFlag, load
from pdproxy.settings.schema import Settings, source_section


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    """Add all options that are settings to a command."""
    file = parser.add_argument_group(
        "settings file",
        "Options override variables (PDPROXY_LISTEN__PORT=9000), which override the file.",
    )
    file.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="YAML file with all settings, see `pdproxy config init --all` (default: the file that "
        "PDPROXY_CONFIG names, or none)",
    )
    engines = parser.add_argument_group(
        "engines",
        "They are added to the engines of the settings file. Each option takes several and may "
        "be repeated.",
    )
    for role, words in ENGINES.items():
        engines.add_argument(
            f"--{role.replace('_', '-')}",
            metavar="URL",
            nargs="+",
            action="extend",
            default=[],
            help=words,
        )
    engines.add_argument(
        "--stage-config",
        metavar="FILE",
        type=Path,
        help="vllm-omni's stage file, YAML: its prefill and decode stages are engines; a stage "
        "without a URL gets the next one "
        "of --prefill or --decode (default: none)",
    )
    add_groups(parser, groups())


def add_groups(parser: argparse.ArgumentParser, some: Iterable[FlagGroup]) -> None:
    """Add the options of some groups."""
    for title, about, _, flags, receivers in some:
        group = parser.add_argument_group(title, about)
        for names, metavar, key, words in flags:
            action = "append" if receivers else "store"
            group.add_argument(
                *names, metavar=metavar, dest=key, action=action, help=words.replace("%", "%%")
            )


def fixed_settings_from(arguments: argparse.Namespace) -> Settings:
    """Do as `settings_from`, for a command that asks the engines of the settings itself: each must
    have a URL of its own.

    Raises:
        SettingsError: as there, or a source names some of them.
    """
    settings = settings_from(arguments)
    for url in (node.url for pool in settings.pools for node in pool.nodes):
        if (section := source_section(url)) is not None:
            raise SettingsError(
                f"{url}: this command takes no engines that {section.who} names: give their URLs"
            )
    return settings


def settings_from(arguments: argparse.Namespace, *, need_engines: bool = True) -> Settings:
    """Return the settings of a parsed command line and the process's environment.

    Raises:
        SettingsError: a line for each mistake.
    """
    given = vars(arguments)
    flags, receivers = list[Flag](), list[ReceiverFlag]()
    for group in groups():
        for (option, *_), _, key, _ in group.flags:
            if given[key] is None:
                continue
            if group.receivers:
                receivers.append(ReceiverFlag(option, key.removeprefix(RECEIVER), given[key]))
            else:
                flags.append(Flag(option, key, given[key]))
    engines = [EngineFlag(role, url) for role in ENGINES for url in given[role]]
    return load(
        arguments.config,
        os.environ,
        flags,
        engines,
        receivers=receivers,
        stage_config=arguments.stage_config,
        need_engines=need_engines,
    )


def files_of(arguments: argparse.Namespace) -> list[Path]:
    """Return the files that `settings_from` reads."""
    named = os.environ.get(CONFIG)
    config = arguments.config or (Path(named) if named else None)
    return [path for path in (config, arguments.stage_config) if path is not None]
