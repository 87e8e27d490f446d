"""`pdproxy config`: print or check the settings without running anything."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from pdproxy.cli.options import add_settings_options, settings_from
from pdproxy.settings.dump import dump

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "config",
        help="print or validate settings",
        description="Print or check the settings that `pdproxy serve` would use with the same options, variables and file.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    printing = actions.add_parser(
        "print",
        help="print all settings as YAML",
        description="Print all settings as YAML, with defaults and with masked keys. It needs no engines.",
        usage="pdproxy config print [--config FILE] [option ...]",
    )
    printing.set_defaults(run=print_settings)
    validating = actions.add_parser(
        "validate",
        help="check the settings",
        description="Check whether `pdproxy serve` would accept these settings. The exit code is 0 or, with a message, 2.",
        usage="pdproxy config validate [--config FILE] [option ...]",
    )
    validating.set_defaults(run=validate_settings)
    for action in (printing, validating):
        add_settings_options(action)


def print_settings(arguments: argparse.Namespace) -> int:
    """Print the settings in force."""
    print(dump(settings_from(arguments, need_engines=False)), end="")
    return 0


def validate_settings(arguments: argparse.Namespace) -> int:
    """Check the settings in force, engines included."""
    settings = settings_from(arguments)
    # Imported here: the server's libraries take a while to load, and wrong settings should be reported at once.
    from pdproxy.app.credentials import Credentials

    Credentials(settings)  # reads the files that the settings name
    roles = Counter(node.role for node in settings.pool.nodes)
    print("ok: " + ", ".join(f"{count} {role}" for role, count in roles.items()))
    return 0
