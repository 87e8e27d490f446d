"""What `pdproxy simulate` costs: CPU time and memory by the number of engines, and the share of the
proxy's scheduling in it.

Usage: simulate_cost.py [--trace FILE] [--requests 100000] [--engines 8 64 512 1000] [--per-engine
0.5]

The trace is repeated and scaled to `--per-engine` requests per second and engine, with its times
spread; without a file it is made up: conversations with 7,000 tokens and 340 of answer on average.
Each number of engines runs in its own process, plain and with five of eight engines for prefill.
The share of the ledger is measured in a run of its own, since measuring costs time.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdproxy.engine_model.profile import load
from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.trace import TraceEntry, read_trace, spread
from pdproxy_lab.simulate.cluster import Cluster
from pdproxy_lab.simulate.load import TraceReplay
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import summarise


def main() -> None:
    """Print a line per fleet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512, 1000])
    parser.add_argument("--per-engine", type=float, default=0.5)
    parser.add_argument("--prefill", type=int, help=argparse.SUPPRESS)  # run one fleet
    parser.add_argument("--ledger", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prefill is not None:
        print(json.dumps(one_fleet(arguments)))
        return
    print(
        f"{arguments.requests} requests, {arguments.per_engine:g} per second and engine; CPU "
        f"seconds of one core"
    )
    print(
        "  engines         CPU s  memory MB  events  steps passed  ledger s  TTFT p50 ms  TPOT "
        "p50 ms"
    )
    for engines in arguments.engines:
        for prefill in (0, engines * 5 // 8):
            plain, timed = (
                in_process(arguments, engines, prefill, ledger=ledger) for ledger in (False, True)
            )
            name = f"{prefill}P{engines - prefill}D" if prefill else f"{engines} plain"
            print(
                f"  {name:12}  {plain['cpu_s']:7.1f}  {plain['mb']:9.0f}  "
                f"{plain['events'] / 1e6:5.1f}M"
                f"  {plain['steps'] / 1e6:11.1f}M  {timed['ledger_s']:8.1f}  "
                f"{plain['ttft_ms']:11.0f}  {plain['tpot_ms']:11.1f}"
            )


def in_process(
    arguments: argparse.Namespace, engines: int, prefill: int, *, ledger: bool
) -> dict[str, Any]:
    """Simulate one fleet in a process of its own."""
    line = [sys.executable, __file__, "--engines", str(engines), "--prefill", str(prefill)]
    line += ["--requests", str(arguments.requests), "--per-engine", str(arguments.per_engine)]
    line += ["--trace", str(arguments.trace)] if arguments.trace else []
    line += ["--ledger"] if ledger else []
    found: dict[str, Any] = json.loads(
        subprocess.run(line, check=True, capture_output=True, timeout=3600).stdout
    )
    return found


def one_fleet(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate one fleet, return what it took."""
    (engines,), prefill = arguments.engines, arguments.prefill
    entries = spread(read_trace(arguments.trace)) if arguments.trace else made_up()
    rate = len(entries) / (entries[-1].time - entries[0].time)
    replay = TraceReplay(
        entries=entries, scale=arguments.per_engine * engines / rate, requests=arguments.requests
    )
    fleet = (
        Fleet(prefill=prefill, decode=engines - prefill) if prefill else Fleet(aggregated=engines)
    )
    profile = load("h200-8b")
    shapes = dict.fromkeys(
        Role, Shape(kv_tokens=profile.engine.num_gpu_blocks * profile.engine.block_size)
    )
    cluster = Cluster(
        fleet, profile.hardware, shapes, {Role.PREFILL: "least_load", Role.DECODE: "least_load"}
    )
    taken = [0]
    if arguments.ledger:
        for name in ("assign", "assign_alone", "close"):
            setattr(cluster.ledger, name, timed(getattr(cluster.ledger, name), taken))
    began = time.process_time()
    cluster.run(replay.calls(0))
    cpu = time.process_time() - began
    summary = summarise(cluster, [])
    assert summary.ttft is not None
    assert summary.tpot is not None
    return {
        "cpu_s": cpu,
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "events": cluster.events,
        "steps": sum(engine.steps for engine in cluster.engines.values()),
        "ledger_s": taken[0] / 1e9,
        "ttft_ms": 1000 * (summary.ttft.percentiles[50] or 0.0),
        "tpot_ms": 1000 * (summary.tpot.percentiles[50] or 0.0),
    }


def timed(work: Callable[..., Any], taken: list[int]) -> Callable[..., Any]:
    """Return a function that adds its CPU time, in nanoseconds, to `taken`."""

    def call(*arguments: Any, **named: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return work(*arguments, **named)
        finally:
            taken[0] += time.thread_time_ns() - began

    return call


def made_up(count: int = 12_000) -> list[TraceEntry]:
    """Return conversations whose turns repeat what came before."""
    chance, entries, next_id = random.Random(0), [], 1
    known: list[tuple[int, ...]] = []
    for number in range(count):
        ids = known.pop(chance.randrange(len(known))) if known and chance.random() < 0.6 else (0,)
        more = chance.randint(1, 10)
        ids = (*ids, *range(next_id, next_id + more))
        next_id += more
        known.append(ids)
        tokens = (len(ids) - 1) * 512 + chance.randint(1, 511)
        entries.append(TraceEntry(number * 0.3, tokens, 1 + int(chance.expovariate(1 / 340)), ids))
    return entries


if __name__ == "__main__":
    main()
