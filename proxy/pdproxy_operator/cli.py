"""`pdproxy operator`: run the Kubernetes operator until it is stopped. `pdproxy operator crds`:
print its definitions.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, get_args

from pdproxy.cli.parser import examples
from pdproxy.settings.errors import SettingsError, quote
from pdproxy.settings.kubernetes import NAMESPACE
from pdproxy.settings.listen import LogFormat, LogLevel, place_of
from pdproxy_operator import definitions

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands

LISTEN = "127.0.0.1:8080"


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "operator",
        help=summary,
        description="Run the operator until SIGTERM or Ctrl-C: it makes engines and proxies of "
        "PDRuntimes and PDProxies. `crds` prints the definitions of these two kinds. The exit code "
        "is 0, 1 after a failure, 2 if the options are wrong.",
        epilog=examples(
            "pdproxy operator crds | kubectl apply --server-side -f -",
            "pdproxy operator --namespace llm",
            "pdproxy operator --leader-elect --listen 0.0.0.0:8080",
        ),
    )
    parser.add_argument(
        "action", metavar="ACTION", nargs="?", choices=["crds"], help="crds: print the definitions"
    )
    parser.add_argument(
        "--namespace",
        metavar="NS",
        nargs="+",
        action="extend",
        default=[],
        help="the namespaces to work in (default: all)",
    )
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="how to reach the API (default: the pod's service account; outside of a cluster the "
        "file that KUBECONFIG names, or ~/.kube/config)",
    )
    parser.add_argument(
        "--context", metavar="C", help="the context of that file (default: its current one)"
    )
    parser.add_argument(
        "--leader-elect",
        action="store_true",
        help="act only while no other operator does: for several replicas (default: act at once)",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=LISTEN,
        help=f"where /health, /ready and /metrics are (default: {LISTEN})",
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="32 or more characters, from which the keys to the proxies' /metrics are derived "
        "(default: the operator has no such keys)",
    )
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        choices=get_args(LogLevel),
        default="info",
        help="lowest level that is written: debug, info, warning, error (default: info)",
    )
    parser.add_argument(
        "--log-format",
        metavar="FORMAT",
        choices=get_args(LogFormat),
        default="text",
        help="text, or json: one object per line (default: text)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the operator, or print the definitions. Return the exit code."""
    if arguments.action == "crds":
        print(definitions.text(), end="")
        return 0
    for name in arguments.namespace:
        if not NAMESPACE.fullmatch(name):
            raise SettingsError(f"--namespace: {quote(name)} is no name of a namespace")
    try:
        place = place_of(arguments.listen)
    except ValueError:
        place = None
    if place is None or not place.host or place.port is None:
        raise SettingsError(f"--listen: {quote(arguments.listen)}: expected HOST:PORT")
    # Imported here: the libraries take a while to load, and wrong options should be reported at
    # once.
    from pdproxy_operator.run import Options
    from pdproxy_operator.run import run as run_operator

    return run_operator(
        Options(
            tuple(dict.fromkeys(arguments.namespace)),
            arguments.kubeconfig,
            arguments.context,
            arguments.leader_elect,
            place.host,
            place.port,
            arguments.secret_file,
            arguments.log_level,
            arguments.log_format,
        )
    )
