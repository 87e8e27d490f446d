"""`pdproxy serve`: run the proxy until it is stopped."""

from __future__ import annotations

import argparse
import contextlib
import signal
from typing import TYPE_CHECKING

from pdproxy.cli.options import add_settings_options, files_of, settings_from
from pdproxy.cli.parser import examples
from pdproxy.kit.reloading_file import stamp

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "serve",
        help=summary,
        description="Serve the OpenAI API from prefill and decode engines until SIGTERM or Ctrl-C; "
        "requests in flight are "
        "completed. The exit code is 0, 1 after a failure, 2 with a line for each mistake if the "
        "settings are wrong.",
        usage="pdproxy serve --prefill URL [URL ...] --decode URL [URL ...] [option ...]",
        epilog=examples(
            "pdproxy serve --prefill 127.0.0.1:8200 --decode 127.0.0.1:8300",
            "pdproxy serve --prefill 10.0.0.1:8200 10.0.0.2:8200 --decode 10.0.0.3:8300 --host "
            "0.0.0.0 --api-keys-file keys.txt",
            "pdproxy serve --config pdproxy.yaml",
        ),
    )
    add_settings_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the settings, run the server, return its exit code."""
    _survive_hangups()
    files = files_of(arguments)
    stamps = [stamp(str(path)) for path in files]
    settings = settings_from(arguments)
    # Imported here: the server's libraries take a while to load, and wrong settings should be
    # reported at once.
    from pdproxy.app.reloading import SettingsSource

    source = SettingsSource(settings, lambda: settings_from(arguments), files, stamps)
    if settings.listen.workers > 1:
        from pdproxy.workers.parent import run as run_workers

        return run_workers(settings, source)
    from pdproxy.app.server import run as run_server

    return run_server(settings, source)


def _survive_hangups() -> None:
    """Ignore SIGHUP until the server takes it: a service manager may send it at once, and nothing
    has to be read again yet.
    """
    with contextlib.suppress(ValueError):  # another thread than the main one: a test
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
