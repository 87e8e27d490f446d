"""`pdproxy conformance`: prove that engines do what their connector's contract says."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING

from pdproxy.cli.options import add_settings_options, fixed_settings_from
from pdproxy.cli.parser import examples
from pdproxy.cli.reading import can_print, seconds

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "conformance",
        help=summary,
        description="Run the proxy in front of each pair of engines, send requests through it, and "
        "compare with the engines' own "
        "counters and with the answers of one engine alone. The exit code is 0 if all checks "
        "that apply passed, 1 if one "
        "failed, 2 if the settings are wrong, 3 if one could not be judged. The engines should "
        "have no other traffic.",
        usage="pdproxy conformance --prefill URL [URL ...] --decode URL [URL ...] --connector NAME "
        "[--plain URL] [option ...]",
        epilog=examples(
            "pdproxy conformance --prefill 127.0.0.1:8200 --decode 127.0.0.1:8300 --connector nixl",
            "pdproxy conformance --config pdproxy.yaml --plain 127.0.0.1:8100 --json",
        ),
    )
    group = parser.add_argument_group("conformance")
    group.add_argument(
        "--plain",
        metavar="URL",
        help="an engine with the first pool's model and no connector, to compare answers with "
        "(default: none)",
    )
    group.add_argument(
        "--timeout",
        metavar="S",
        type=seconds(minimum=1.0),
        default=30.0,
        help="seconds that each check may take (default: 30)",
    )
    group.add_argument(
        "--lease-watch",
        metavar="S",
        type=seconds(minimum=0.0),
        default=35.0,
        help="seconds to leave a KV handle unused, after which the prefill engine must have freed "
        "its KV; 0: no such check "
        "(default: 35)",
    )
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_settings_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Test the settings' connector and print the report."""
    # an engine of the settings, so that it has its key and TLS; it is in no pair
    if arguments.plain is not None:
        arguments.aggregated = [*arguments.aggregated, arguments.plain]
    settings = fixed_settings_from(arguments)
    # Imported here: the libraries take a while to load, and wrong settings should be reported at
    # once.
    from pdproxy.check.report import TextStyle
    from pdproxy.observe.logs import configure
    from pdproxy_lab.conformance import report
    from pdproxy_lab.conformance.options import ConformanceOptions
    from pdproxy_lab.conformance.runner import run_all

    level = vars(arguments)["observe.log_level"]
    # The report says what failed; the proxy's own log lines are shown only with --log-level.
    log = configure(
        "error" if level is None else settings.observe.log_level, settings.observe.log_format
    )
    plain = None if arguments.plain is None else settings.pool.nodes[-1].url
    options = ConformanceOptions(
        timeout=arguments.timeout, lease_watch=arguments.lease_watch, plain=plain
    )
    try:
        reports = asyncio.run(run_all(settings, options))
    except KeyboardInterrupt:
        sys.stderr.write(
            "pdproxy conformance: interrupted: KV of its requests is freed when the lease ends\n"
        )
        return 130
    finally:
        log.close()
    one = reports[settings.pool.name] if len(settings.pools) == 1 else None
    if arguments.json:
        print((report.pools_as_json(reports) if one is None else report.as_json(one)).decode())
    else:
        style = TextStyle(can_print("✓✗·"), sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
        print(
            report.pools_as_text(reports, style) if one is None else report.as_text(one, style),
            end="",
        )
    return report.exit_code(*reports.values())
