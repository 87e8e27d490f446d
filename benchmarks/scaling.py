"""Throughput by the number of workers: requests and chunks per second, and CPU per request, beside
vllm-router if it is there.

Usage: scaling.py [--policies least_load,auto] [--workers 1,2,4,8] [--clients 256] [--pairs 4]
[--seconds 6] [--rounds 2] [--warmup 2000] [--budget 225] [--out results.json]

For a machine with 16 cores: 8 for the workers, and as many for the mock engines and the clients,
which run in processes of their own. Everything binds to the loopback. Each system is started once
per round, and gets whole answers, then streams, from the same clients. No round begins that would
not fit into `--budget` seconds. The last line is the whole result as JSON.

`cores`: how many the system used. `scheduler`: the part of one core that the process used which
chooses for all workers. `busy`: the part of the whole machine's CPU time that was used.
Where that is near 100 %, or where a system uses fewer cores than it has processes, clients and
engines limit it. `split P/D`: the part of the decode requests that had a prefill engine's KV; a
system with less of it does less.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paired
import stage

Row = dict[str, Any]
ROUTER = "vllm-router"
SCHEDULER = "pdproxy-sched"
"""How the name of the process begins that chooses for all workers."""
LOADS: dict[str, tuple[str, ...]] = {"whole": (), "streams": ("--stream",)}
CHUNKS, ITL = 64, 0.001
"""Of a stream: chunks, and seconds between two."""
LONGEST_START = 15.0
"""Seconds for which it is waited until a system does nothing."""
IDLE = 0.1
"""CPU seconds per second of one that does next to nothing."""
STREAMS_PER_WHOLE = 12
"""A stream takes about as much CPU time as so many whole answers."""


def systems(
    policies: list[str], workers: list[int], at: stage.Engines
) -> Iterator[tuple[str, stage.Peer]]:
    """Yield the systems that are compared, by their names."""
    for policy in policies:
        for count in workers:
            more = f"--workers {count} --policy {policy} " if count > 1 else f"--policy {policy} "
            yield (
                f"{count} workers, {policy}" if count > 1 else f"one process, {policy}",
                stage.Peer(
                    "{python} -m pdproxy serve "
                    + more
                    + "--prefill {prefills} --decode {decodes} --port {port}",
                    "/ready",
                    # nobody but this benchmark asks it, and there is nothing to load
                    env={"PDPROXY_LISTEN__LINGER": "0", "HF_HUB_OFFLINE": "1"},
                ),
            )
    if shutil.which(ROUTER) is None:
        print(f"left out: {ROUTER} is not on the path", file=sys.stderr)
        return
    legs = [f"--prefill {stage.url(port)}" for port in at.prefills] + [
        f"--decode {stage.url(port)}" for port in at.decodes
    ]
    yield (
        ROUTER,
        stage.Peer(
            f"{ROUTER} --vllm-pd-disaggregation {' '.join(legs)} --policy round_robin --host "
            f"127.0.0.1 "
            "--port {port} --prometheus-port {aux} --log-level warning",
            settle=3,
        ),
    )


def together(
    url: str, processes: int, clients: int, requests: int, flags: tuple[str, ...]
) -> list[Row]:
    """Run so many clients in so many processes, and return what each process reports."""
    with ThreadPoolExecutor(processes) as pool:
        parts = [
            pool.submit(
                stage.load,
                url,
                "--conc",
                max(1, clients // processes),
                "--n",
                requests // processes,
                *flags,
            )
            for _ in range(processes)
        ]
        return [part.result() for part in parts]


def rate(parts: list[Row], what: str = "ok") -> float:
    """Return how many per second all processes have had."""
    return float(sum(part[what] / part["wall_s"] for part in parts if part["wall_s"]))


def busy() -> tuple[float, float]:
    """Return the CPU seconds of the whole machine so far: of work, and all."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / stage.TICK, sum(ticks) / stage.TICK


def split(at: stage.Engines) -> tuple[int, int]:
    """Return how many decode requests had a handle so far, and how many there were."""
    counts = [json.loads(stage.get(f"{stage.url(port)}/_counts")) for port in at.decodes]
    return sum(each["decode_with_kv"] for each in counts), sum(each["decode"] for each in counts)


def scheduler_of(pid: int) -> int | None:
    """Return the process that chooses for all workers of a proxy, None if there is none."""
    for each in stage.tree(pid)[1:]:
        if Path(f"/proc/{each}/comm").read_text().startswith(SCHEDULER):
            return each
    return None


def wait_until_idle(pid: int) -> None:
    """Wait until a system does next to nothing: with `auto` a thread loads libraries first."""
    until = time.monotonic() + LONGEST_START
    while time.monotonic() < until:
        before = paired.cpu(pid)
        time.sleep(1.0)
        if paired.cpu(pid) - before < IDLE:
            return


def measure(pid: int, url: str, load: str, at: stage.Engines, options: argparse.Namespace) -> Row:
    """Measure one system under one load."""
    flags, part = LOADS[load], 1 if load == "whole" else STREAMS_PER_WHOLE
    warm = together(url, options.processes, options.clients, options.warmup // part, flags)
    requests = max(options.clients, int(rate(warm) * options.seconds))
    with_kv, decoded = split(at)
    scheduler = scheduler_of(pid)
    chosen = 0.0 if scheduler is None else paired.cpu(scheduler)
    spent, (work, whole) = paired.cpu(pid), busy()
    parts = together(url, options.processes, options.clients, requests, flags)
    spent, (work_after, whole_after) = paired.cpu(pid) - spent, busy()
    chosen = 0.0 if scheduler is None else paired.cpu(scheduler) - chosen
    seconds = max(each["wall_s"] for each in parts)
    with_kv, decoded = (
        after - before for after, before in zip(split(at), (with_kv, decoded), strict=True)
    )
    done, events = sum(each["ok"] for each in parts), sum(each["events"] for each in parts)
    return {
        "requests_s": round(rate(parts)),
        "chunks_s": round(rate(parts, "events")),
        "us_request": round(1e6 * spent / max(1, done), 1),
        "us_chunk": round(1e6 * spent / events, 2) if events else None,
        "cores": round(spent / seconds, 2),
        "scheduler": None if scheduler is None else round(chosen / seconds, 3),
        "busy": round((work_after - work) / max(0.01, whole_after - whole), 2),
        "first_p99_ms": max((each["first_p99_ms"] or 0.0) for each in parts),
        "split": round(with_kv / max(1, decoded), 3),
        "errors": sum(sum(each["errors"].values()) for each in parts),
    }


def run(options: argparse.Namespace) -> list[Row]:
    """Measure all systems under all loads, in turns."""
    began, rows, longest = time.monotonic(), list[Row](), 0.0
    with stage.engines(
        options.pairs, "--chunks", CHUNKS, "--itl", ITL, processes=options.engine_processes
    ) as at:
        found = list(systems(options.policies, options.workers, at))
        for number in range(options.rounds):
            start = time.monotonic()
            if number and start - began + longest > options.budget:
                print(f"round {number + 1} is left out: it would not end in time", file=sys.stderr)
                break
            for name, peer in found[:: 1 if number % 2 == 0 else -1]:
                if time.monotonic() - began > options.budget:
                    print(
                        f"left out: {name} in round {number + 1}, the time is over", file=sys.stderr
                    )
                    continue
                try:
                    with stage.proxy(peer, at) as (process, url):
                        wait_until_idle(process.pid)
                        for load in LOADS:
                            row = {"round": number, "system": name, "load": load}
                            rows.append(row | measure(process.pid, url, load, at, options))
                            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                except stage.NotStartedError as error:
                    print(f"left out: {name}: {error}", file=sys.stderr)
            longest = max(longest, time.monotonic() - start)
    return rows


def table(rows: list[Row]) -> str:
    """Return the medians of the rounds as Markdown, with ratios to the first system of the same
    policy; a system without one is compared with the very first.
    """
    lines = [
        (
            "| load | system | requests/s | x | chunks/s | CPU us/request | x | CPU us/chunk | "
            "cores | scheduler "
            "| busy | split P/D | errors |"
        ),
        "| --- " * 13 + "|",
    ]
    for load in LOADS:
        firsts: dict[str, Row] = {}
        for system in dict.fromkeys(row["system"] for row in rows):
            mine = [row for row in rows if row["system"] == system and row["load"] == load]
            if not mine:
                continue
            middle = {
                key: statistics.median(row[key] for row in mine)
                for key, value in mine[0].items()
                if isinstance(value, int | float)
            }
            policy = system.partition(", ")[2] or next(iter(firsts), "")
            first = firsts.setdefault(policy, middle)
            times = [middle[key] / max(first[key], 1e-9) for key in ("requests_s", "us_request")]
            cells = [
                load,
                system,
                f"{middle['requests_s']:.0f}",
                f"{times[0]:.2f}",
                f"{middle['chunks_s']:.0f}",
            ]
            cells += [f"{middle['us_request']:.0f}", f"{times[1]:.2f}"]
            cells += [f"{middle['us_chunk']:.1f}" if "us_chunk" in middle else ""]
            cells += [
                f"{middle['cores']:.1f}",
                f"{100 * middle['scheduler']:.0f} %" if "scheduler" in middle else "",
                f"{100 * middle['busy']:.0f} %",
                f"{middle['split']:.2f}",
            ]
            cells += [str(sum(row["errors"] for row in mine))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--policies", type=lambda text: text.split(","), default=["least_load", "auto"]
    )
    parser.add_argument(
        "--workers", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 4, 8]
    )
    parser.add_argument("--clients", type=int, default=256, help="of all processes together")
    parser.add_argument("--processes", type=int, default=max(1, cores // 4), help="of clients")
    parser.add_argument(
        "--pairs", type=int, default=4, help="prefill engines, and as many decode engines"
    )
    parser.add_argument("--engine-processes", type=int, default=max(2, cores // 3))
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement, about")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--warmup",
        type=int,
        default=2000,
        help="requests before a system is measured: their rate decides how many follow",
    )
    parser.add_argument("--budget", type=float, default=225.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    stage.raise_files()
    machine, rows = stage.machine(), run(options)
    result = {"machine": machine, "rows": rows}
    print(table(rows))
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["errors"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
