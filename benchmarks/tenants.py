"""What separate caches of tenants cost: prompts with one system prompt for all, shared and
separate, in hits and in TTFT.

Usage: tenants.py [--tenants 1 2 8 32 128 512] [--system 2048] [--question 512] [--requests 4000]
[--rate 20]
                  [--proxy-tenants 2 8] [--each 8]

First through a proxy over HTTP, in front of a simulated prefill and decode engine (nixl): tenants
ask in turn, each with a key of its own, and the prefill engine's own counters say how many of the
tokens it has found in its cache. Then in virtual time: engines of the profile h200-8b, one half for
each role, with policy `prefix`; each prompt is the system prompt and a question of its own, of a
tenant that is drawn evenly. Separate tenants' system prompts are different prompts there, as they
are to an engine. Nothing of both depends on how fast this machine is.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import stage
from pdproxy.engine_model.profile import load
from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.measures import spread_of
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.shape import Fleet, Shape

PROFILE, ENGINES, ANSWER = "h200-8b", 4, 64
SHARED, SEPARATE = "shared", "separate"
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


def counted(url: str, name: str) -> float:
    """Return a counter of an engine."""
    page = stage.get(f"{url}/metrics").decode()
    return sum(
        float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    )


def asked(url: str, key: str, text: str, question: str) -> None:
    """Ask a proxy, with a key."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    body = json.dumps(
        {"model": "sim", "messages": messages, "max_tokens": 4, "temperature": 0}
    ).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/chat/completions", body, headers), timeout=60
    ) as one:
        one.read()


def through_a_proxy(caches: str, tenants: int, each: int) -> float:
    """Return the part of the prompts' tokens that the prefill engine has found in its cache."""
    ports = stage.free_ports(3)
    prefill, decode, proxy = map(stage.url, ports)
    sim = [
        sys.executable,
        "-m",
        "pdproxy",
        "sim",
        "--connector",
        "nixl",
        "--model",
        "sim",
        "--speed",
        "0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        (keys := Path(folder) / "keys").write_text(
            "".join(f"t{n}:sk-{n}\n" for n in range(tenants))
        )
        settings = {
            "auth": {"api_keys_file": str(keys)},
            "tenants": {"caches": caches},
            "pools": [
                {"nodes": [{"url": prefill, "role": "prefill"}, {"url": decode, "role": "decode"}]}
            ],
        }
        (file := Path(folder) / "settings.yaml").write_text(json.dumps(settings))
        serve = [
            sys.executable,
            "-m",
            "pdproxy",
            "serve",
            "--config",
            str(file),
            "--port",
            str(ports[2]),
        ]
        with (
            stage.running([*sim, "--role", "prefill", "--port", str(ports[0])]) as p,
            stage.running([*sim, "--role", "decode", "--port", str(ports[1])]) as d,
        ):
            stage.wait_for(f"{prefill}/health", p)
            stage.wait_for(f"{decode}/health", d)
            with stage.running(serve) as process:
                stage.wait_for(f"{proxy}/ready", process)
                before = counted(prefill, QUERIES), counted(prefill, HITS)
                for turn in range(each):
                    for tenant in range(tenants):
                        asked(
                            proxy,
                            f"sk-{tenant}",
                            "You answer questions about ships. " * 60,
                            f"{tenant} {turn}?",
                        )
                queries, hits = (
                    counted(prefill, name) - was
                    for name, was in zip((QUERIES, HITS), before, strict=True)
                )
    return hits / queries


def calls(caches: str, tenants: int, unit: int, arguments: argparse.Namespace) -> Iterator[Call]:
    """Yield the requests of a run in virtual time."""
    chance, owners, due = random.Random(1), random.Random(2), 0.0
    length, fresh = arguments.system + arguments.question, 10**9
    for number in range(arguments.requests):
        due += chance.expovariate(arguments.rate)
        owner = owners.randrange(tenants) if caches == SEPARATE else 0
        keys = [owner * 10_000 + at for at in range(arguments.system // unit)]
        own = length // unit - len(keys)
        keys += range(fresh, fresh + own)
        fresh += own
        yield Call(number, due, length, ANSWER, keys)


def in_virtual_time(
    caches: str, tenants: int, arguments: argparse.Namespace
) -> tuple[float, float | None, float | None]:
    """Return the part of the tokens that was found in caches, and the TTFT: its median and 95th
    percentile in seconds.
    """
    profile = load(PROFILE)
    size = profile.engine.block_size
    shape = Shape(
        kv_tokens=profile.engine.num_gpu_blocks * size,
        max_num_seqs=profile.engine.max_num_seqs,
        block_size=size,
        unit_tokens=256,
    )
    roles = (Role.PREFILL, Role.DECODE)
    fleet = Fleet(prefill=ENGINES // 2, decode=ENGINES // 2)
    cluster = Cluster(
        fleet, profile.hardware, dict.fromkeys(Role, shape), dict.fromkeys(roles, "prefix")
    )
    cluster.run(calls(caches, tenants, shape.unit_tokens, arguments))
    records = cluster.records
    ttft = spread_of([records.first[n] - records.due[n] for n in range(len(records))])
    assert ttft is not None
    computed = sum(engine.prefill_tokens for engine in cluster.engines.values())
    return 1 - computed / sum(records.prompt), ttft.percentiles[50], ttft.percentiles[95]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tenants", nargs="*", type=int, default=[1, 2, 8, 32, 128, 512])
    parser.add_argument("--system", type=int, default=2048)
    parser.add_argument("--question", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--proxy-tenants", nargs="*", type=int, default=[2, 8])
    parser.add_argument("--each", type=int, default=8)
    arguments = parser.parse_args()
    print(
        f"through a proxy, {arguments.each} requests per tenant: tokens found in the prefill "
        f"engine's cache"
    )
    print("tenants  shared  separate")
    for tenants in arguments.proxy_tenants:
        found = [through_a_proxy(caches, tenants, arguments.each) for caches in (SHARED, SEPARATE)]
        print(f"{tenants:7} {found[0]:7.1%} {found[1]:9.1%}", flush=True)
    print(
        f"\nin virtual time: {ENGINES} engines, {arguments.requests} requests, "
        f"{arguments.rate:g} per second; prompts of"
        f" {arguments.system} + {arguments.question} tokens"
    )
    print("tenants  caches    found  TTFT p50     p95 (s)")
    for tenants in arguments.tenants:
        for caches in (SHARED, SEPARATE):
            found_share, median, high = in_virtual_time(caches, tenants, arguments)
            print(
                f"{tenants:7}  {caches:8} {found_share:6.1%} {median:9.3f} {high:7.3f}", flush=True
            )


if __name__ == "__main__":
    main()
