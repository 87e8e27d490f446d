"""Many times more requests than the engines can do: goodput, whose requests are served, how late
the event loop is.

Usage: overload.py [--virtual] [--seconds 60] [--times 10] [--engines 1] [--batch 16] [--tokens 64]
[--windows] [--mixed]
                   [--silent] [--seed 1] [--hardware gpu|steep] [--url URL --keys A,B] [--lines 20]
                   [--capacity N] [--out FILE]

Without `--url`: as many simulated prefill and decode engines as `--engines` says, each decode
engine of which runs `--batch` requests at once, and a proxy with as many places as that makes,
whose keys a and b have the weights 3 and 1. With `--windows` the proxy learns the number of places
(`limits.engine_requests: auto`). `--virtual`: all of it in one process in virtual time: a run takes
only its computing time, equal options give equal results, and what the proxy's own work costs is
not in them. With `--url`: a proxy that is there; `--engines` times `--batch` is then what its
engines run at once.

First some requests are sent one by one: their median time is that without load. Goodput is the
number of answers per second that came whole within twice that time, which clients ask for by
`X-Request-Timeout` (`--silent`: they don't). Its peak is looked for by loads up to twice of what
the engines can do: `--batch` answers in the time of one, or `--capacity`. Then each of `--times` as
much comes for `--seconds`, half of it with each key; at last half of what they can do, for a sixth
of that. Clients send when requests are due, whatever became of those before.
`--mixed`: short and long requests, streams, and lists of prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import simulated
from overload_load import Load, Shape, Tally, mixed
from overload_virtual import HARDWARE, Fleet, VirtualFleet, in_virtual_time
from stage import free_ports, machine, raise_files

RAMP = (0.5, 0.8, 1.0, 1.25, 1.5, 2.0)
"""Parts of what the engines can do at which goodput is measured, each for a sixth of
`--seconds`.
"""
AFTERWARDS = 0.5
"""The part of it that comes at last."""
KEY_LINES = "a:sk-a weight=3\nb:sk-b weight=1\n"
LATENESS = re.compile(r'^pdproxy_loop_lateness_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


@contextmanager
def processes(fleet: Fleet) -> Iterator[str]:
    """Run engines and a proxy as processes; yield its URL."""
    proxy, *ports = free_ports(1 + fleet.prefill + fleet.decode)
    prefill, decode = ports[: fleet.prefill], ports[fleet.prefill :]
    engines = [
        "--eos-every",
        "0",
        "--model",
        "sim",
        "--profile",
        "h200-8b",
        "--no-enable-prefix-caching",
    ]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        keys, file = folder / "keys", folder / "pdproxy.yaml"
        file.write_text("limits: {engine_requests: auto}\n")
        keys.write_text(KEY_LINES)
        batch = ("--max-num-seqs", str(fleet.batch))
        running = [
            *(("sim", "--role", "prefill", "--port", str(port), *engines) for port in prefill),
            *(
                ("sim", "--role", "decode", "--port", str(port), *batch, *engines)
                for port in decode
            ),
        ]
        urls: list[str] = []
        for role, found in (("--prefill", prefill), ("--decode", decode)):
            urls += [text for port in found for text in (role, f"127.0.0.1:{port}")]
        serve = [
            "serve",
            "--port",
            str(proxy),
            "--log-level",
            "error",
            "--api-keys-file",
            str(keys),
            *urls,
        ]
        if fleet.places is None:
            serve += ["--config", str(file)]
        else:
            serve += ["--max-inflight", str(fleet.places)]
        started = [stack.enter_context(simulated.running(*one)) for one in (*running, tuple(serve))]
        url = f"http://127.0.0.1:{proxy}"
        simulated.wait([f"{url}/ready"], started)
        yield url


def lateness(url: str) -> dict[float, float]:
    """Return the counts of the event loop's delays so far, by the upper bounds of their buckets."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return {
        float(bound.replace("+Inf", "inf")): float(count) for bound, count in LATENESS.findall(page)
    }


def percentile(before: dict[float, float], after: dict[float, float], part: float) -> float:
    """Return the upper bound of the bucket that holds a percentile of the delays in between, in
    seconds.
    """
    counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    most = max(counts.values(), default=0.0)
    return next((bound for bound, count in sorted(counts.items()) if count >= part * most), 0.0)


async def measured(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Return the results."""
    shapes = mixed(options.tokens) if options.mixed else (Shape(options.lines, options.tokens),)
    first, _, second = options.keys.partition(",")
    load = Load(
        url, (first, second), options.model, shapes, asks=not options.silent, seed=options.seed
    )
    unloaded = await load.alone()
    capacity = options.capacity or options.engines * options.batch / unloaded
    short, loads = options.seconds / len(RAMP), {}
    for part in RAMP:
        loads[part] = row(part, await load.run(part * capacity, short))
    peak = max(one["goodput_per_s"] for one in loads.values())
    before = None if options.virtual else lateness(url)
    for times in options.times:
        found = row(times, await load.run(times * capacity, options.seconds))
        loads[times] = {**found, "part_of_peak": found["goodput_per_s"] / peak if peak else 0.0}
    after = None if options.virtual else lateness(url)
    recovered = row(AFTERWARDS, await load.run(AFTERWARDS * capacity, short))
    load.connections.close()
    return {
        "unloaded_s": unloaded,
        "capacity_per_s": capacity,
        "peak_per_s": peak,
        "lateness_p99_s": None
        if before is None or after is None
        else percentile(before, after, 0.99),
        "loads": loads,
        "afterwards": recovered,
    }


def row(times: float, tally: Tally) -> dict[str, Any]:
    """Return what became of one load, and print it."""
    found = {
        "goodput_per_s": tally.goodput,
        "good": tally.good.total() + tally.outside,
        "shares": tally.good["a"] / max(tally.good["b"], 1),
        "late": tally.late,
        "most_over_s": round(tally.most_over, 3),
        "refused": dict(tally.refused),
        "failed": dict(tally.failed),
        "refusal_p50_s": median(tally.refusal_times) if tally.refusal_times else None,
    }
    print(f"{times:g} x: {json.dumps(found)}", flush=True)
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--virtual", action="store_true")
    found.add_argument("--seconds", type=float, default=60.0)
    found.add_argument(
        "--times", type=lambda text: [float(one) for one in text.split(",")], default=[10.0]
    )
    found.add_argument("--engines", type=int, default=1, help="of each role")
    found.add_argument("--batch", type=int, default=16)
    found.add_argument("--tokens", type=int, default=64)
    found.add_argument("--lines", type=int, default=20, help="of 45 characters in a prompt")
    found.add_argument("--capacity", type=float, help="answers per second that the engines can do")
    found.add_argument("--mixed", action="store_true")
    found.add_argument("--silent", action="store_true", help="clients name no deadline")
    found.add_argument("--seed", type=int, default=1)
    found.add_argument(
        "--hardware", choices=HARDWARE, default="gpu", help="of engines in virtual time"
    )
    found.add_argument("--model", default="sim")
    found.add_argument(
        "--url",
        help="a proxy that is there; otherwise one is started in front of simulated engines",
    )
    found.add_argument(
        "--keys", default="sk-a,sk-b", help="two keys of it, with the weights 3 and 1"
    )
    found.add_argument(
        "--windows",
        action="store_true",
        help="limits.engine_requests: auto, in place of fixed places",
    )
    found.add_argument("--out", type=Path)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run what the options say, and return the results."""
    places = None if options.windows else options.engines * options.batch
    fleet = Fleet(options.engines, options.engines, options.batch, places, options.hardware)
    if options.virtual:

        async def run(virtual: VirtualFleet) -> dict[str, Any]:
            return await measured(options, virtual.url)

        return in_virtual_time(fleet, KEY_LINES, options.seed, run)
    raise_files()
    with ExitStack() as stack:
        return asyncio.run(measured(options, options.url or stack.enter_context(processes(fleet))))


def main() -> None:
    """The command line."""
    options = parser().parse_args()
    found = {"machine": machine(), **measure(options)}
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
