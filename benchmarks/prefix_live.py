"""What knowing prefix caches gains over real sockets: a slice of a trace through proxies before
simulated engines, in real time.

Usage: prefix_live.py --trace FILE [--systems NAME ...] [--engines 4] [--rate 6] [--slice 0:600]
[--requests 300] [--rounds 2]

Engines serve whole, with the times and the caches of the profile h200-8b, and publish KV events.
Systems: pdproxy with `auto`, `prefix`, `least_load` and `power_of_two`, and vllm-router (`pip
install vllm-router`) with its `cache_aware` and `power_of_two`. Each gets new engines and the same
requests, in turn. Printed: the part of the prompt tokens that engines computed, TTFT, and good
requests. The engines share this machine's cores: look at the load generator's own lag, and keep the
rate low enough.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import stage

SYSTEMS = (
    "auto",
    "prefix",
    "least_load",
    "power_of_two",
    "router:cache_aware",
    "router:power_of_two",
)
PROFILE, CHUNK, LONGEST = "h200-8b", 2048, 16_000
SLO = "ttft=500ms,tpot=15ms"
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@contextmanager
def engines(count: int) -> Iterator[list[str]]:
    """Run simulated engines with KV events; yield their URLs."""
    ports = stage.free_ports(3 * count)
    with ExitStack() as stack:
        for port, events, replay in zip(*[iter(ports)] * 3, strict=True):
            published = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://127.0.0.1:{events}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            }
            command = [
                sys.executable,
                "-m",
                "pdproxy",
                "sim",
                "--profile",
                PROFILE,
                "--port",
                str(port),
            ]
            command += [
                "--max-num-batched-tokens",
                str(CHUNK),
                "--kv-events-config",
                json.dumps(published),
            ]
            stage.wait_for(f"{stage.url(port)}/health", stack.enter_context(stage.running(command)))
        yield [stage.url(port) for port in ports[::3]]


def command_of(system: str, urls: Sequence[str], port: int, folder: Path) -> tuple[list[str], str]:
    """Return how a system is started, and where it answers when it is ready."""
    if system.startswith("router:"):
        (metrics,) = stage.free_ports(1)
        command = [
            "vllm-router",
            "--worker-urls",
            *urls,
            "--policy",
            system.removeprefix("router:"),
            "--host",
            "127.0.0.1",
        ]
        return [
            *command,
            "--port",
            str(port),
            "--prometheus-port",
            str(metrics),
            "--log-level",
            "warning",
        ], "/health"
    engines: list[dict[str, object]] = [
        {"url": url, "role": "aggregated", "facts": {"max_num_batched_tokens": CHUNK}}
        for url in urls
    ]
    pool = {
        "policy": system,
        "kv_events": {"enabled": system in ("auto", "prefix")},
        "nodes": engines,
    }
    if system == "auto":
        ttft, tpot = (int(number) / 1000 for number in re.findall(r"(\d+)ms", SLO))
        pool |= {"profile": PROFILE, "slo": {"ttft": ttft, "tpot": tpot}}
    file = folder / f"{system}.yaml"
    file.write_text(json.dumps({"pools": [pool]}))
    return [
        sys.executable,
        "-m",
        "pdproxy",
        "serve",
        "--config",
        str(file),
        "--port",
        str(port),
    ], "/ready"


def counted(urls: Sequence[str], name: str) -> float:
    """Return the sum of a counter over the engines."""
    pages = [stage.get(f"{url}/metrics").decode() for url in urls]
    return sum(
        float(value)
        for page in pages
        for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    )


def measured(system: str, number: int, arguments: argparse.Namespace, folder: Path) -> str:
    """Run a round of a system, return its line."""
    with engines(arguments.engines) as urls:
        (port,) = stage.free_ports(1)
        command, ready = command_of(system, urls, port, folder)
        with stage.running(command) as process:
            stage.wait_for(stage.url(port) + ready, process)
            file = folder / f"{system}-{number}.jsonl"
            load = [
                sys.executable,
                "-m",
                "pdproxy",
                "bench",
                f"x={stage.url(port)}",
                "--trace",
                str(arguments.trace),
            ]
            load += [
                "--slice",
                arguments.slice,
                "--spread",
                "--max-tokens",
                str(LONGEST),
                "--endpoint",
                "chat",
            ]
            load += [
                "--rate",
                str(arguments.rate),
                "--requests",
                str(arguments.requests),
                "--seeds",
                "1",
                "--slo",
                f"A:{SLO}",
            ]
            load += [
                "--first-seed",
                str(number),
                "--salt",
                str(number),
                "--json",
                str(file),
                "--allow-lag",
            ]
            shown = subprocess.run(load, stdout=subprocess.PIPE, check=True, text=True).stdout
        run = json.loads(file.read_text().splitlines()[-1])
        queries, hits = counted(urls, QUERIES), counted(urls, HITS)
    lag, good = (
        re.search(rf"{words}\s+([\d.]+)", shown)
        for words in (r"own lag p99 \(ms\)", r"good: A \(%\)")
    )
    assert lag is not None
    assert good is not None
    return (
        f"{system:20} {number:5} {1 - hits / queries:9.1%} {run['median_ttft_ms']:9.0f} "
        f"{run['p95_ttft_ms']:6.0f}"
        f" {good[1]:>7} {run['failed']:7} {lag[1]:>8}"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--systems", nargs="*", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--slice", default="0:600")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    print(
        f"{arguments.engines} engines, {arguments.rate} req/s, {arguments.requests} requests of "
        f"seconds {arguments.slice}"
    )
    print("system               round  computed  TTFT p50    p95  good %  failed  lag (ms)")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for system in arguments.systems:
                if system.startswith("router:") and shutil.which("vllm-router") is None:
                    print(f"{system}: vllm-router is not installed")
                else:
                    print(measured(system, number, arguments, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
