"""`pdproxy notifier`: hand out the file that makes vLLM's NIXL connector tell the proxy what becomes of KV."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands

MODULE = "pdproxy_nixl"
NOTIFY = "tcp://127.0.0.1:7500"


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "notifier",
        help="hand out the file that makes vLLM report its KV transfers",
        description="vLLM's NIXL connector with notices to the proxy is one Python file, which goes where the engines are."
        " Print it, or write it with --out, and say which flags the engines need."
        " Engines with it and engines without it work with each other.",
        usage="pdproxy notifier [--out FOLDER] [--notify ADDRESS [ADDRESS ...]]",
        epilog="example: pdproxy notifier --out /opt/pdproxy --notify tcp://10.0.0.5:7500",
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help=f"write {MODULE}.py there (default: print it)")
    parser.add_argument(
        "--notify",
        metavar="ADDRESS",
        nargs="+",
        type=_address,
        default=[NOTIFY],
        help=f"where the proxies listen for notices; each gets all of them (default: {NOTIFY})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print or write the file, and say how to use it: beside the file, so never in it."""
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
        f"Start the engines with {MODULE}.py's folder on their PYTHONPATH, and in place of their --kv-transfer-config:"
    ]
    for role, kind in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": kind,
            "kv_connector_extra_config": {"pdproxy_notify": notify[0] if len(notify) == 1 else notify},
        }
        flags = shlex.join(["--kv-transfer-config", json.dumps(config)])
        lines.append(f"  {role + ':':8} PYTHONPATH={shlex.quote(str(folder))} vllm serve ... {flags}")
    return "\n".join(lines) + "\n"


def _address(text: str) -> str:
    if not text.startswith(("tcp://", "ipc://")) or len(text) < len("tcp://x"):
        raise argparse.ArgumentTypeError(f"expected tcp://HOST:PORT or ipc://PATH, got {text!r}")
    return text
