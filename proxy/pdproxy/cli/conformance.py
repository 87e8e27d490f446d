"""`pdproxy conformance`: do these engines do what their connector's contract says?"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING

from pdproxy.cli.options import add_settings_options, settings_from
from pdproxy.cli.reading import can_print, seconds

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "conformance",
        help="prove that engines do what their connector's contract says",
        description="Run the proxy in front of each pair of engines, send requests through it, and judge by the engines' own "
        "counters and by what an engine says alone. Exit with 0 if all that applies has passed, 1 if something failed, 2 if "
        "the settings are wrong, 3 if something could not be judged. Best run on engines without other traffic.",
        usage="pdproxy conformance --prefill URL [URL ...] --decode URL [URL ...] --connector NAME [--plain URL] [option ...]",
        epilog="example: pdproxy conformance --prefill 127.0.0.1:8200 --decode 127.0.0.1:8300 --connector nixl",
    )
    group = parser.add_argument_group("conformance")
    group.add_argument("--plain", metavar="URL", help="an engine with the same model and no connector, to compare with")
    group.add_argument(
        "--timeout", metavar="S", type=seconds(least=1.0), default=30.0, help="for each check (default: 30)"
    )
    group.add_argument(
        "--lease-watch",
        metavar="S",
        type=seconds(least=0.0),
        default=35.0,
        help="how long a KV handle is left alone until its lease must be over; 0: it isn't (default: 35)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prove the settings' connector and print what was found."""
    if (
        arguments.plain is not None
    ):  # one of the settings' engines, so that keys and TLS are found for it; no pair has it
        arguments.aggregated = [*arguments.aggregated, arguments.plain]
    settings = settings_from(arguments)
    # Imported here: the libraries take a while to load, and wrong settings should be told at once.
    from pdproxy.lab.check.report import Style
    from pdproxy.lab.conformance import report
    from pdproxy.lab.conformance.options import Options
    from pdproxy.lab.conformance.runner import run as run_checks
    from pdproxy.observe.logs import configure

    level = vars(arguments)["observe.log_level"]
    # The report says what went wrong; the proxy's own lines are for those who ask for them.
    log = configure("error" if level is None else settings.observe.log_level, settings.observe.log_format)
    plain = None if arguments.plain is None else settings.pool.nodes[-1].url
    options = Options(timeout=arguments.timeout, lease_watch=arguments.lease_watch, plain=plain)
    try:
        found = asyncio.run(run_checks(settings, options))
    except KeyboardInterrupt:
        sys.stderr.write("pdproxy conformance: interrupted: KV that was being looked at is freed when its lease ends\n")
        return 130
    finally:
        log.close()
    if arguments.json:
        print(report.as_json(found).decode())
    else:
        style = Style(can_print("✓✗·"), sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
        print(report.as_text(found, style), end="")
    return report.exit_code(found)
