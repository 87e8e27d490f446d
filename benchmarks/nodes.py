"""The cost of a large fleet: CPU time per request, and when idle, with 4 engines and with 200.

Usage: nodes.py [--nodes 4,200] [--rounds 3] [--requests 4000]

All engines are ports of two processes. Probing and scraping cost per second, choosing an engine
costs per request: the first is measured without any load, and subtracted from the second.
"""

from __future__ import annotations

import argparse
import time

import report
import stage

IDLE = 15.0
"""Seconds without load: three scrapes of every engine."""
CLIENTS = 32


def measure(nodes: int, requests: int) -> tuple[float, float, float]:
    """Return CPU us per request, the same without the idle cost, and the idle cost in CPU ms per
    second.
    """
    quiet = stage.Peer(stage.PDPROXY.cmd, stage.PDPROXY.ready, settle=3.0)
    with (
        stage.engines(nodes // 2, "--chunks", 64, processes=2) as at,
        stage.proxy(quiet, at) as (process, url),
    ):
        stage.load(url, "--conc", CLIENTS, "--n", 4 * nodes)  # connections to every engine
        began = stage.cpu(process.pid)
        time.sleep(IDLE)
        idle = (stage.cpu(process.pid) - began) / IDLE
        began = stage.cpu(process.pid)
        found = stage.load(url, "--conc", CLIENTS, "--n", requests)
        spent = stage.cpu(process.pid) - began
    if found["errors"]:
        raise SystemExit(f"{nodes} engines: {found['errors']}")
    return (
        1e6 * spent / found["ok"],
        1e6 * (spent - idle * found["wall_s"]) / found["ok"],
        1000 * idle,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="4,200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args()
    stage.raise_files()
    counts = [int(count) for count in options.nodes.split(",")]
    found: dict[int, list[tuple[float, float, float]]] = {count: [] for count in counts}
    for _ in range(options.rounds):
        for count in counts:
            found[count].append(measure(count, options.requests))
    print("| engines | CPU us/request | without idle cost | idle, CPU ms/s |\n|---|---|---|---|")
    medians = {
        count: [report.median(values) or 0.0 for values in zip(*found[count], strict=True)]
        for count in counts
    }
    for count, (whole, net, idle) in medians.items():
        print(f"| {count} | {whole:.0f} | {net:.0f} | {idle:.1f} |")
    first, last = medians[counts[0]], medians[counts[-1]]
    added = f"{last[1] - first[1]:+.0f} us per request, {last[2] - first[2]:+.1f} ms per second"
    print(f"\n{counts[-1]} engines instead of {counts[0]}: {added}")


if __name__ == "__main__":
    main()
