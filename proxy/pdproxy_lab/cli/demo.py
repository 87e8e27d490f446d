"""`pdproxy demo`: engines, the proxy, traffic and a live view, in one command."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdproxy.cli.parser import USAGE_ERROR, examples

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands

MAX_ENGINES = 64
"""Per role. A larger number is a typing error."""
MAX_SECONDS = 604_800.0
"""One week."""


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "demo",
        help=summary,
        description="Run simulated prefill and decode engines and as many plain ones, a proxy in "
        "front of each, and the same requests to both, and show which serves more of them in time. "
        "No GPU and no model are needed. Keys kill an engine, slow it down, and change the load. "
        "Ctrl-C ends everything; without a terminal it ends after a minute. --quiet, --engine vllm "
        "and more than 8 engines: no comparison.",
        usage="pdproxy demo [--prefill N] [--decode N] [--engine sim|vllm] [option ...]",
        epilog=examples(
            "pdproxy demo --prefill 1 --decode 3",
            "pdproxy demo --plain-chunk 512",
            "pdproxy demo --engine vllm --model Qwen/Qwen3-0.6B",
        ),
    )
    parser.add_argument(
        "--engine",
        choices=("sim", "vllm"),
        default="sim",
        help="simulated or real engines (default: sim)",
    )
    parser.add_argument(
        "--prefill",
        metavar="N",
        type=_count,
        help="number of prefill engines (default: 2; vllm: 1)",
    )
    parser.add_argument(
        "--decode", metavar="N", type=_count, help="number of decode engines (default: 2; vllm: 1)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="name of the model; vllm: the model to serve (default: a tiny model that runs on "
        "CPUs)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address on which the proxy listens (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        help="TCP port of the proxy; 0: any free one (default: 8000)",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="send no requests of its own; without a terminal, print no figures",
    )
    parser.add_argument(
        "--seconds",
        metavar="N",
        type=_seconds,
        help="end after N seconds (default: at Ctrl-C; a comparison without a terminal: 60)",
    )
    parser.add_argument(
        "--plain-chunk",
        metavar="TOKENS",
        type=_chunk,
        default=4096,
        help="--max-num-batched-tokens of the plain engines that are compared: small ones delay "
        "tokens less (default: 4096, as of the others)",
    )
    group = parser.add_argument_group("real engines (--engine vllm)")
    group.add_argument(
        "--vllm",
        metavar="PATH",
        default="vllm",
        help="the program vllm (default: the one on the PATH)",
    )
    group.add_argument(
        "--wait",
        metavar="S",
        type=_seconds,
        default=600.0,
        help="seconds until all engines must be ready (default: 600)",
    )
    group.add_argument(
        "--vllm-args",
        metavar="FLAGS",
        default="",
        help="more flags for each engine, as one quoted text, such as '--max-model-len 8192' "
        "(default: none)",
    )
    # a folder for the comparison's last view, as SVG
    parser.add_argument("--capture", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo, return its exit code."""
    try:
        flags = tuple(shlex.split(arguments.vllm_args))
    except ValueError as error:
        return _fail(f"--vllm-args: {error}", USAGE_ERROR)
    # Imported here: the libraries take a while to load, and wrong options should be reported at
    # once.
    from pdproxy_lab.demo.options import DemoOptions
    from pdproxy_lab.demo.run import run as run_demo
    from pdproxy_lab.up.errors import UpError

    usual = 2 if arguments.engine == "sim" else 1
    options = DemoOptions(
        engine=arguments.engine,
        prefill=arguments.prefill or usual,
        decode=arguments.decode or usual,
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        quiet=arguments.quiet,
        seconds=arguments.seconds,
        wait=arguments.wait,
        vllm=arguments.vllm,
        vllm_args=flags,
        plain_chunk=arguments.plain_chunk,
        capture=arguments.capture,
    )
    try:
        return run_demo(options, _say)
    except UpError as error:
        return _fail(str(error), error.code)
    except BrokenPipeError:
        # The reader of standard output is gone. The rest of the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _say(text: str) -> None:
    print(text, flush=True)


def _fail(text: str, code: int) -> int:
    sys.stderr.write(f"pdproxy demo: {text}\n")
    return code


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_ENGINES:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_ENGINES}, got {text!r}")
    return int(text)


def _chunk(text: str) -> int:
    if not text.isdecimal() or not 256 <= int(text) <= 16384:
        raise argparse.ArgumentTypeError(f"expected 256 to 16384, got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"expected 0 to 65535, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")
    return value
