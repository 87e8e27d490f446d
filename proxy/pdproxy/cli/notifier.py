"""`pdproxy notifier`: print the file that makes vLLM's NIXL connector report its KV transfers to
the proxy.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pdproxy.cli.parser import examples

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands

MODULE = "pdproxy_nixl"
NOTIFY = "tcp://127.0.0.1:7500"


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "notifier",
        help=summary,
        description="Print or write (--out) a Python file for engines: vLLM's NIXL connector, "
        "which "
        "also "
        "reports to the proxy"
        " when KV is ready, loaded or released. The command also prints the flags that the "
        "engines need. Engines with the file"
        " work together with engines without it. The proxy needs --kv-notifier true.",
        usage="pdproxy notifier [--out FOLDER] [--notify ADDRESS [ADDRESS ...]]",
        epilog=examples("pdproxy notifier --out /opt/pdproxy --notify tcp://10.0.0.5:7500"),
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help=f"folder into which {MODULE}.py is written (default: print it)",
    )
    parser.add_argument(
        "--notify",
        metavar="ADDRESS",
        nargs="+",
        type=_address,
        default=[NOTIFY],
        help="where proxies listen for notices (--kv-ready-host, --kv-ready-port): "
        "tcp://HOST:PORT or ipc://PATH; each proxy "
        f"gets all notices (default: {NOTIFY})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print or write the file. How to use it is printed elsewhere, so that the output stays a valid
    file.
    """
    text = files("pdproxy.notifier").joinpath(f"{MODULE}.py").read_text(encoding="utf-8")
    folder: Path | None = arguments.out
    if folder is None:
        sys.stdout.write(text)
        sys.stderr.write(_advice(Path("FOLDER"), arguments.notify))
        return 0
    path = folder / f"{MODULE}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"pdproxy notifier: {path}: {error.strerror or error}\n")
        return 1
    print(f"wrote {path}")
    print(_advice(folder.resolve(), arguments.notify), end="")
    return 0


def _advice(folder: Path, notify: list[str]) -> str:
    lines = [
        (
            f"Start the engines with {MODULE}.py's folder on their PYTHONPATH, and in place of "
            f"their "
            f"--kv-transfer-config:"
        )
    ]
    for role, kind in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": kind,
            "kv_connector_extra_config": {
                "pdproxy_notify": notify[0] if len(notify) == 1 else notify
            },
        }
        flags = shlex.join(["--kv-transfer-config", json.dumps(config)])
        lines.append(
            f"  {role + ':':8} PYTHONPATH={shlex.quote(str(folder))} vllm serve ... {flags}"
        )
    return "\n".join(lines) + "\n"


def _address(text: str) -> str:
    if not text.startswith(("tcp://", "ipc://")) or len(text) < len("tcp://x"):
        raise argparse.ArgumentTypeError(f"expected tcp://HOST:PORT or ipc://PATH, got {text!r}")
    return text
