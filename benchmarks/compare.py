"""Costs of proxies, side by side: CPU microseconds per request and per streamed chunk, in front of
the same mock engines.

Usage: compare.py [--rounds 3] [--loads NAME,...] [--only NAME,...] [--out results.json] [--plot
results.svg]
       compare.py --against OLD.json NEW.json

The CPU time of each proxy's whole process tree is read from /proc before and after a load. CPU time
is usable on noisy machines where throughput is not, but it differs between machines. Proxies take
turns within each round, so quote ratios of one run. Peers are installed by hand (`pip install
vllm-router`); one that is not installed is left out with a message.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import stage


@dataclass(frozen=True)
class Case:
    """One load: how the engines stream (`itl`: seconds between two chunks) and what the clients
    send.
    """

    chunks: int
    itl: float
    clients: int
    requests: int
    flags: tuple[str, ...] = ()


STREAM = ("--stream",)
FAST = 0.001
"""Seconds between two chunks of a fast engine. With 0, the mock engines would write a whole stream
before the proxy's next read, and only batching would be measured. 32 streams at this interval, or
128 at four times this interval, make 32,000 chunks per second.
"""
PACED = 0.02
"""Seconds between two chunks as in typical use."""
CASES = {
    "paced128-128": Case(128, PACED, 128, 256, STREAM),
    "stream64-32": Case(64, FAST, 32, 1500, STREAM),
    "stream256-128": Case(256, FAST * 4, 128, 512, STREAM),
    "chat64-32": Case(64, FAST, 32, 1500, (*STREAM, "--chat")),
    "whole-32": Case(64, 0, 32, 6000),
    "prompt64k-8": Case(64, 0, 8, 3000, ("--prompt-bytes", "65536")),
    "prompt256k-8": Case(64, 0, 8, 1000, ("--prompt-bytes", "262144")),
    "chat256k-8": Case(64, 0, 8, 1000, ("--prompt-bytes", "262144", "--chat")),
    "chat256k-stream-8": Case(64, 0, 8, 1000, ("--prompt-bytes", "262144", "--chat", *STREAM)),
    "first-1": Case(16, 0, 1, 400, STREAM),
}
ENGINES_ALONE = "engines alone"
"""P and D are called directly: waits and gaps without any proxy."""
WARMUP_REQUESTS = 64
MIN_CPU_SECONDS = 1.0
"""CPU seconds that a row needs at least: /proc counts hundredths of a second."""
MAX_REPEATS = 8
"""The load is repeated at most this many times to reach `MIN_CPU_SECONDS`."""

Row = dict[str, Any]


def _flags(case: Case, requests: int) -> list[object]:
    return ["--conc", case.clients, "--n", requests, *case.flags]


def measure(peer: stage.Peer, case: Case) -> Row:
    """Run one proxy under one load."""
    with (
        stage.engines(2, "--chunks", case.chunks, "--itl", case.itl) as at,
        stage.proxy(peer, at) as (process, url),
    ):
        stage.load(url, *_flags(case, WARMUP_REQUESTS))
        began = stage.cpu(process.pid)
        parts = [stage.load(url, *_flags(case, case.requests))]
        spent = stage.cpu(process.pid) - began
        if spent < MIN_CPU_SECONDS:
            more = min(MAX_REPEATS, math.ceil(MIN_CPU_SECONDS / max(spent, 0.01)) - 1)
            parts += [stage.load(url, *_flags(case, case.requests)) for _ in range(more)]
            spent = stage.cpu(process.pid) - began
        rss = stage.rss(process.pid)
        split = at.split()
    requests = sum(part["ok"] for part in parts)
    events = sum(part["events"] for part in parts)
    return {
        "requests": requests,
        "events": events,
        "cpu_s": round(spent, 2),
        "us_request": round(1e6 * spent / max(1, requests), 1),
        "us_chunk": round(1e6 * spent / events, 2) if events else None,
        "errors": sum(sum(part["errors"].values()) for part in parts),
        "split": round(split, 3),
        "rss_mb": round(rss / 1024),
        **_waits(parts),
    }


def measure_engines_alone(case: Case) -> Row:
    """Run one load without a proxy."""
    with stage.engines(2, "--chunks", case.chunks, "--itl", case.itl) as at:
        stage.load(*at.pairs, *_flags(case, WARMUP_REQUESTS))
        parts = [stage.load(*at.pairs, *_flags(case, case.requests))]
    return {"errors": sum(sum(part["errors"].values()) for part in parts), **_waits(parts)}


def _waits(parts: list[Row]) -> Row:
    names = (
        "events_per_read",
        "events_per_chunk",
        "first_p50_ms",
        "first_p99_ms",
        "gap_p50_ms",
        "gap_p99_ms",
    )
    return {name: report.median(part[name] for part in parts) for name in names}


def _peers(options: argparse.Namespace) -> dict[str, stage.Peer]:
    found = {
        name: stage.Peer(**peer) for name, peer in json.loads(options.peers.read_text()).items()
    }
    for name, _, folder in (text.partition("=") for text in options.checkout):
        path = Path(folder).resolve() / "proxy"
        found[name] = stage.Peer(stage.PDPROXY.cmd, "/ready", env={"PYTHONPATH": str(path)})
    only = options.only.split(",") if options.only else list(found)
    for name in [name for name, peer in found.items() if name in only and not _installed(peer)]:
        print(f"left out: {name} is not installed", file=sys.stderr)
        only.remove(name)
    return {name: peer for name, peer in found.items() if name in only}


def _installed(peer: stage.Peer) -> bool:
    program = shlex.split(peer.cmd)[0]
    return program == "{python}" or shutil.which(program) is not None


def run(peers: dict[str, stage.Peer], loads: list[str], rounds: int) -> list[Row]:
    """Measure every peer under every load; peers take turns."""
    rows: list[Row] = []
    for number in range(rounds):
        for load in loads:
            case = CASES[load]
            turns = list(peers.items())[:: 1 if number % 2 == 0 else -1]
            if case.itl == PACED or case.clients == 1:
                rows.append(
                    {
                        "round": number,
                        "load": load,
                        "peer": ENGINES_ALONE,
                        **measure_engines_alone(case),
                    }
                )
            for name, peer in turns:
                try:
                    row = {"round": number, "load": load, "peer": name, **measure(peer, case)}
                except stage.NotStartedError as error:
                    print(f"left out: {name}: {error}", file=sys.stderr)
                    del peers[name]
                    continue
                rows.append(row)
                print(
                    f"round {number}, {load}, {name}: {row['us_request']:.0f} us/request",
                    file=sys.stderr,
                    flush=True,
                )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, default=stage.HERE / "peers.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--loads", default=",".join(CASES), help=f"comma separated, from {', '.join(CASES)}"
    )
    parser.add_argument("--only", default="", help="names of peers, comma separated")
    parser.add_argument(
        "--checkout",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        help="pdproxy of another checkout",
    )
    parser.add_argument("--reference", default="vllm-router", help="the peer that ratios refer to")
    parser.add_argument(
        "--out", type=Path, help="write all rounds and the machine's description as JSON"
    )
    parser.add_argument("--plot", type=Path, help="write the ratios as SVG")
    parser.add_argument(
        "--against",
        metavar=("OLD.json", "NEW.json"),
        type=Path,
        nargs=2,
        help="compare two results",
    )
    options = parser.parse_args()
    if options.against:
        old, new = (json.loads(path.read_text()) for path in options.against)
        print(report.against(old, new))
        return
    stage.raise_files()
    machine = stage.machine()
    rows = run(_peers(options), options.loads.split(","), options.rounds)
    result = {"machine": machine, "reference": options.reference, "rows": rows}
    print(report.describe(machine), report.table(result), sep="\n\n")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(report.plot(result))


if __name__ == "__main__":
    main()
