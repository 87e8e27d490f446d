"""`pdproxy engines`: list, add, drain and remove the engines of a running proxy, by its admin
API.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as escaped

from pdproxy.cli.admin_client import (
    AdminClient,
    AdminFailed,
    add_admin_options,
    printable,
    run_with_client,
)
from pdproxy.cli.parser import examples
from pdproxy.cli.reading import seconds
from pdproxy.settings.engines import with_scheme
from pdproxy.settings.errors import SettingsError

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands, Parser

ROLES = ("encode", "prefill", "decode", "aggregated", "any")
LOOK = 0.2
"""Seconds between two looks of `--wait`."""
SILENCE = 30.0
"""Seconds without an answer after which `--wait` gives up. A worker that stands still is killed
sooner.
"""
MAX_WAIT = 86_400.0
MAX_DRAIN = 604_800.0
"""Seconds that a drain may take at most, as the admin API has it."""
_ENGINE = "its URL, http://HOST:PORT or HOST:PORT, or its id (`pdproxy engines list`)"


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "engines",
        help=summary,
        description="List, add, drain and remove the engines of a running proxy, by its admin API "
        "(listen.admin). The exit code "
        "is 0 if it was done, 1 with a line if the proxy refuses it or does not answer, 2 if "
        "arguments or settings are wrong.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = _action(
        actions,
        "list",
        list_engines,
        "show all engines",
        "Show what is wrong, and all engines: state, requests, latency, tokens per second, KV in "
        "use, failed legs; in a wide terminal also pairs, who has added them, and their ids; and "
        "which part of the prompt tokens of the last 5 minutes one engine has served alone.",
        "[--pool NAME] [--watch] [--json]",
        "pdproxy engines list",
        "pdproxy engines list --watch --admin unix:/run/pdproxy/admin.sock",
        "pdproxy engines list --json | jq -r '.engines[].url'",
    )
    listing.add_argument(
        "--pool", metavar="NAME", help="only engines of this pool (default: of all)"
    )
    listing.add_argument(
        "--watch",
        action="store_true",
        help="show a live table until Ctrl-C (default: print it once)",
    )
    listing.add_argument(
        "--interval",
        metavar="S",
        type=seconds(minimum=0.1),
        default=1.0,
        help="with --watch: seconds between two questions (default: 1)",
    )
    adding = _action(
        actions,
        "add",
        add_engine,
        "add an engine",
        "Add an engine. It stays until the proxy ends, also when the settings are read again.",
        "URL --role ROLE [--pool NAME]",
        "pdproxy engines add 10.0.0.5:8300 --role decode",
        "pdproxy engines add 10.0.0.5:8300 --role decode --pool large --label rack=7 --wait",
        """pdproxy engines add 10.0.0.5:8300 --role decode --fields '{"facts": {"max_num_seqs": 64}}'""",  # noqa: E501
    )
    adding.add_argument(
        "engine", metavar="URL", help="http://HOST:PORT, https://HOST:PORT or HOST:PORT (http)"
    )
    adding.add_argument(
        "--role",
        choices=ROLES,
        required=True,
        metavar="ROLE",
        help=f"{', '.join(ROLES)} (required)",
    )
    adding.add_argument(
        "--pool",
        metavar="NAME",
        help="the pool that it comes into (default: the only one; with several it must be named)",
    )
    adding.add_argument(
        "--label",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a label, as pair_within names it; may be repeated (default: none)",
    )
    adding.add_argument(
        "--fields",
        metavar="JSON",
        help="more settings of the engine, as in the settings file (default: none)",
    )
    _wait(adding, "until it serves")
    draining = _action(
        actions,
        "drain",
        drain_engine,
        "give an engine no more requests",
        "Give an engine no more requests. Those that it has run on. It stays until it is "
        "undrained.",
        "ENGINE [--seconds S]",
        "pdproxy engines drain 10.0.0.5:8300 --wait && ssh 10.0.0.5 systemctl restart vllm",
    )
    undraining = _action(
        actions,
        "undrain",
        undrain_engine,
        "give an engine requests again",
        "Give an engine that was drained requests again.",
        "ENGINE",
        "pdproxy engines undrain 10.0.0.5:8300 --wait",
    )
    removing = _action(
        actions,
        "remove",
        remove_engine,
        "drain and remove an engine",
        "Drain an engine that the admin API has added, and remove it.",
        "ENGINE [--seconds S] [--at-once]",
        "pdproxy engines remove 10.0.0.5:8300",
        "pdproxy engines remove 1f4a09c2b7de --at-once",
    )
    for one in (draining, undraining, removing):
        one.add_argument("engine", metavar="ENGINE", help=_ENGINE)
    for one in (draining, removing):
        one.add_argument(
            "--seconds",
            metavar="S",
            type=seconds(minimum=0.0, maximum=MAX_DRAIN),
            help="until its requests are ended (default: deadlines.engine_drain of the proxy)",
        )
    removing.add_argument(
        "--at-once",
        action="store_true",
        help="do not drain it: its requests go on (default: drain)",
    )
    _wait(draining, "until nothing of its work is left")
    _wait(undraining, "until it serves")
    _wait(removing, "until it is gone")


def _action(
    actions: Commands,
    name: str,
    run: Callable[[AdminClient, argparse.Namespace], Any],
    words: str,
    about: str,
    usage: str,
    *lines: str,
) -> Parser:
    parser = actions.add_parser(
        name,
        help=words,
        description=about,
        usage=f"pdproxy engines {name} {usage} [option ...]",
        epilog=examples(*lines),
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_admin_options(parser)
    parser.set_defaults(run=lambda arguments: run_with_client(run, arguments))
    return parser


def _wait(parser: Parser, until: str) -> None:
    parser.add_argument(
        "--wait", action="store_true", help=f"wait {until} (default: return at once)"
    )
    parser.add_argument(
        "--wait-for",
        metavar="S",
        type=seconds(minimum=0.1, maximum=MAX_WAIT),
        default=600.0,
        help="with --wait: seconds at most (default: 600)",
    )


def list_engines(client: AdminClient, arguments: argparse.Namespace) -> Any:
    """Print the engines, or show them live."""
    if arguments.json and arguments.watch:
        raise SettingsError("--watch: shows a table: leave out --json")
    path = (
        "/engines"
        if arguments.pool is None
        else f"/engines?pool={escaped(arguments.pool, safe='')}"
    )
    if arguments.json:
        return client.ask("GET", path)
    # Imported here: the library of the table takes a while to load.
    from pdproxy.cli import engines_table

    def ask() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return client.ask("GET", path), client.ask("GET", "/requests")

    if arguments.watch:
        engines_table.watch(ask, arguments.interval)
    else:
        engines_table.show(*ask())
    return None


def add_engine(client: AdminClient, arguments: argparse.Namespace) -> Any:
    """Add an engine."""
    fields: object = {}
    if arguments.fields is not None:
        try:
            fields = json.loads(arguments.fields)
        except (ValueError, RecursionError):
            fields = None
    if not isinstance(fields, dict):
        raise SettingsError(
            '--fields: expected a JSON object, such as {"facts": {"max_num_seqs": 64}}'
        )
    labels = dict(_label(text) for text in arguments.label)
    body: dict[str, Any] = {**fields, "url": with_scheme(arguments.engine), "role": arguments.role}
    if arguments.pool is not None:
        body["pool"] = arguments.pool
    if labels:
        body["labels"] = {**(body.get("labels") or {}), **labels}
    changed = client.ask("POST", "/engines", body)
    _report(changed, arguments)
    if arguments.wait:
        changed["engine"] = _until(client, changed, arguments, "serving", "warming")
    return changed


def drain_engine(client: AdminClient, arguments: argparse.Namespace) -> Any:
    """Drain an engine."""
    body = {} if arguments.seconds is None else {"seconds": arguments.seconds}
    changed = client.ask("POST", f"{_path(arguments.engine)}/drain", body)
    _report(changed, arguments)
    if arguments.wait:
        states = () if changed["result"] == "removing" else ("drained",)
        changed["engine"] = _until(client, changed, arguments, *states)
    return changed


def undrain_engine(client: AdminClient, arguments: argparse.Namespace) -> Any:
    """Use an engine again."""
    changed = client.ask("POST", f"{_path(arguments.engine)}/undrain")
    _report(changed, arguments)
    if arguments.wait:
        changed["engine"] = _until(client, changed, arguments, "serving", "warming")
    return changed


def remove_engine(client: AdminClient, arguments: argparse.Namespace) -> Any:
    """Remove an engine."""
    query = f"?at_once={str(arguments.at_once).lower()}"
    if arguments.seconds is not None:
        query += f"&seconds={arguments.seconds}"
    changed = client.ask("DELETE", _path(arguments.engine) + query)
    _report(changed, arguments)
    if arguments.wait and changed["result"] == "removing":
        changed["engine"] = _until(client, changed, arguments)
    return changed


def _path(engine: str) -> str:
    is_id = len(engine) == 12 and all(one in "0123456789abcdef" for one in engine)
    return f"/engines/{escaped(engine if is_id else with_scheme(engine), safe='')}"


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SettingsError(f"--label: expected NAME=VALUE, got {json.dumps(text[:80])}")
    return name, value


def _report(changed: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    if not arguments.json:
        print(f"{changed['result'].replace('_', ' ')}: {printable(changed['note'])}", flush=True)


def _until(
    client: AdminClient, changed: Mapping[str, Any], arguments: argparse.Namespace, *states: str
) -> Any:
    """Wait until an engine is in one of some states and up, without any state until it is gone.
    Return it, None if it is gone.

    Raises:
        AdminFailed: it will not be, or it takes longer than `--wait-for`, or the proxy has not
            answered for `SILENCE`.
    """
    answered = time.monotonic()
    late = answered + arguments.wait_for
    while True:
        try:
            entry = client.ask("GET", f"/engines/{changed['engine']['id']}")
        except AdminFailed as error:
            if error.status == 404 and not states:
                return None
            # A worker was killed with the connection, or one stands still and it is not known what
            # it has.
            if error.status not in (None, 503) or time.monotonic() > min(late, answered + SILENCE):
                raise
            time.sleep(LOOK)
            continue
        answered = time.monotonic()
        drain = entry["drain"]
        if entry["state"] in states and (drain is not None or entry["health"]["state"] != "down"):
            return entry
        if drain is None and ("drained" in states or not states):
            raise AdminFailed("it was undrained meanwhile")
        if time.monotonic() > late:
            state = f"{entry['state']}, {entry['health']['reason'] or entry['health']['state']}"
            raise AdminFailed(f"after {arguments.wait_for:g} s it is {printable(state)}")
        time.sleep(LOOK)
