"""`pdproxy check`: whether engines will work with prefill and decode split."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from pdproxy.cli.options import add_settings_options, fixed_settings_from, settings_from
from pdproxy.cli.parser import examples
from pdproxy.cli.reading import can_print, seconds
from pdproxy.settings.errors import SettingsError
from pdproxy.transfer.nixl import NIXL
from pdproxy.transfer.registry import AUTO

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "check",
        help=summary,
        description="Ask the engines for their settings, send a few requests through each pair of "
        "a "
        "prefill and a decode "
        "engine, and print what is wrong and how to fix it. For connector nixl; `pdproxy "
        "conformance` tests all connectors. "
        "Run it before there is traffic. The exit code is 0 if the engines are ready, 1 if not, "
        "2 if the settings are wrong. "
        "Nothing is changed on the engines.",
        usage="pdproxy check --prefill URL [URL ...] --decode URL [URL ...] [option ...]",
        epilog=examples(
            "pdproxy check --prefill 127.0.0.1:8200 --decode 127.0.0.1:8300",
            "pdproxy check --config pdproxy.yaml --strict --json",
            "pdproxy check --security --config pdproxy.yaml",
        ),
    )
    group = parser.add_argument_group("check")
    group.add_argument(
        "--timeout",
        metavar="S",
        type=seconds(minimum=0.1),
        default=10.0,
        help="seconds that each request may take (default: 10)",
    )
    group.add_argument(
        "--lease-watch",
        metavar="S",
        type=seconds(minimum=0.0),
        default=5.0,
        help="seconds to leave a KV handle unused, to see whether the prefill engine keeps its KV "
        "that long; 0: no such check "
        "(default: 5)",
    )
    group.add_argument(
        "--security",
        action="store_true",
        help="say what the settings of `pdproxy serve` leave open, and ask no engine; the exit "
        "code is 1 if anything is",
    )
    group.add_argument(
        "--strict", action="store_true", help="exit with 1 also if there are only warnings"
    )
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_settings_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the engines of the settings, or the settings themselves, and print what was found."""
    if arguments.security:
        return _security(arguments)
    settings = fixed_settings_from(arguments)
    # Its requests to prefill engines crash some engines of other connectors, such as LMCache's
    # sender.
    able = [at for at, pool in enumerate(settings.pools) if pool.connector in (NIXL.name, AUTO)]
    if not able:
        got = ", ".join(dict.fromkeys(pool.connector for pool in settings.pools))
        raise SettingsError(
            f"pools[0].connector: this check is for {NIXL.name} only, got {got}: "
            "run `pdproxy conformance`, which tests all connectors"
        )
    # Imported here: the libraries take a while to load, and wrong settings should be reported at
    # once.
    from pdproxy.check import report
    from pdproxy.check.gather import gather_all
    from pdproxy.check.machine import machine_facts
    from pdproxy.check.options import CheckOptions
    from pdproxy.check.rules import judge

    options = CheckOptions(timeout=arguments.timeout, lease_watch=arguments.lease_watch)
    try:
        facts = asyncio.run(
            gather_all(settings, able, options, machine_facts(settings, os.environ))
        )
    except KeyboardInterrupt:
        sys.stderr.write(
            "pdproxy check: interrupted: KV of its requests is freed when the lease ends\n"
        )
        return 130
    pools = {name: (one, judge(one)) for name, one in facts.items()}
    others = {pool.name: pool.connector for pool in settings.pools if pool.name not in pools}
    style = report.TextStyle(
        can_print("✓✗→·"), sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    if len(settings.pools) == 1:
        found, findings = pools[settings.pool.name]
        text, json = (
            partial(report.as_text, found, findings),
            partial(report.as_json, found, findings),
        )
    else:
        text, json = (
            partial(report.pools_as_text, pools, others),
            partial(report.pools_as_json, pools, others),
        )
    print(
        json(strict=arguments.strict).decode() if arguments.json else text(style),
        end="\n" if arguments.json else "",
    )
    return max(
        report.exit_code(findings, strict=arguments.strict) for _, findings in pools.values()
    )


def _security(arguments: argparse.Namespace) -> int:
    """Print what the settings leave open."""
    settings = settings_from(arguments, need_engines=False)
    from pdproxy.check import report
    from pdproxy.check.security.report import as_json, as_text, exit_code, judge
    from pdproxy.check.security.view import view_of

    findings = judge(view_of(settings))
    style = report.TextStyle(
        can_print("✗→"), sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    print(
        as_json(findings).decode() if arguments.json else as_text(findings, style),
        end="\n" if arguments.json else "",
    )
    return exit_code(findings)
