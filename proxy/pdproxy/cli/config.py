"""`pdproxy config`: print, check or describe the settings without running anything, or begin a
settings file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pdproxy.cli.options import add_settings_options, settings_from
from pdproxy.cli.parser import examples
from pdproxy.settings.dump import dump
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.files import spell_file
from pdproxy.settings.json_schema import json_schema
from pdproxy.settings.schema import Settings

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "config",
        help=summary,
        description="Begin a settings file, or print or check the settings that `pdproxy serve` "
        "would "
        "use with the same options, "
        "variables and file. No engine is asked.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    beginning = actions.add_parser(
        "init",
        help="print or write a settings file to begin with",
        description="Print or write (--out) a YAML file with the settings that most deployments "
        "set, or with --all every setting, its default and a comment. Only its two engines are "
        "examples. Settings that you delete keep their defaults.",
        epilog=examples(
            "pdproxy config init --out pdproxy.yaml", "pdproxy serve --config pdproxy.yaml"
        ),
    )
    beginning.add_argument(
        "--all",
        action="store_true",
        help="every setting with its default and a comment (default: a few)",
    )
    beginning.add_argument(
        "--out", metavar="FILE", type=Path, help="file to write (default: print it)"
    )
    beginning.add_argument(
        "--force", action="store_true", help="overwrite the file if it exists (default: refuse)"
    )
    beginning.set_defaults(run=begin_file)
    printing = actions.add_parser(
        "print",
        help="print the settings in force as YAML",
        description="Print all settings from all sources as YAML, with defaults and with masked "
        "keys. "
        "No "
        "engine is needed.",
        usage="pdproxy config print [--config FILE] [option ...]",
        epilog=examples("pdproxy config print --config pdproxy.yaml --port 9000"),
    )
    printing.set_defaults(run=print_settings)
    validating = actions.add_parser(
        "validate",
        help="check the settings, and the files that they name",
        description="Check whether `pdproxy serve` would accept these settings, and read the files "
        "of "
        "keys and certificates that "
        "they name. The exit code is 0, or 2 with a line for each mistake.",
        usage="pdproxy config validate [--config FILE] [option ...]",
        epilog=examples("pdproxy config validate --config pdproxy.yaml"),
    )
    validating.set_defaults(run=validate_settings)
    describing = actions.add_parser(
        "schema",
        help="print what a settings file may hold, as a JSON Schema",
        description="Print a JSON Schema of the settings file, for editors and other programs that "
        "check YAML. It says what each setting may hold; what settings must have together, "
        "`pdproxy config validate` alone checks.",
        epilog=examples("pdproxy config schema > pdproxy.schema.json"),
    )
    describing.set_defaults(run=print_schema)
    for action in (printing, validating):
        add_settings_options(action)


def begin_file(arguments: argparse.Namespace) -> int:
    """Print or write a settings file: one to begin with, or the one that explains every setting."""
    name = "reference.yaml" if arguments.all else "starter.yaml"
    text = files("pdproxy.settings").joinpath(name).read_text(encoding="utf-8")
    path: Path | None = arguments.out
    if arguments.force and path is None:
        raise SettingsError("--force: has no effect without --out")
    if path is None:
        sys.stdout.write(text)
        return 0
    try:
        with path.open("w" if arguments.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        sys.stderr.write(
            f"{arguments.prog}: {spell_file(path)}: exists already: --force overwrites it\n"
        )
        return 1
    except (OSError, ValueError) as error:  # a ValueError is a null byte in the name
        why = error.strerror if isinstance(error, OSError) else "is no name of a file"
        sys.stderr.write(f"{arguments.prog}: {spell_file(path)}: can't be written: {why}\n")
        return 1
    print(f"wrote {spell_file(path)}")
    return 0


def print_settings(arguments: argparse.Namespace) -> int:
    """Print the settings in force."""
    print(dump(settings_from(arguments, need_engines=False)), end="")
    return 0


def print_schema(_: argparse.Namespace) -> int:
    """Print the JSON Schema of the settings."""
    print(json.dumps(json_schema(Settings), indent=2))
    return 0


def validate_settings(arguments: argparse.Namespace) -> int:
    """Check the settings in force, engines included."""
    settings = settings_from(arguments)
    # Imported here: the server's libraries take a while to load, and wrong settings should be
    # reported at once.
    from pdproxy.app.credentials import Credentials

    for warning in Credentials(settings).warnings():  # reads the files that the settings name
        sys.stderr.write(f"{arguments.prog}: warning: {warning}\n")
    roles = Counter(node.role for pool in settings.pools for node in pool.fixed_nodes)
    print("ok: " + ", ".join(f"{count} {role}" for role, count in roles.items()))
    return 0
