"""How long one client waits: with a plain engine, with P and D directly, with P and D through
pdproxy. One request at a time.

Usage: latency.py [--requests 20] [--lengths 100,1000,1900] [--tokens 16] [--plain URL --prefill URL
--decode URL --proxy URL]

Without addresses the tests' engines are started (or reused, if a run kept them) with a pdproxy in
front of one pair. The three ways take turns, with new token ids for each request, so that no cache
helps and other load on the machine hits all three. Prints p50 and p90 in milliseconds, and ratios
to the plain engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
PATH = "/v1/completions"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


@dataclass(frozen=True)
class Addresses:
    """Base URLs without a trailing slash."""

    plain: str
    prefill: str
    decode: str
    proxy: str


@dataclass
class Waits:
    """Seconds from the request's start, one entry per request."""

    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


Way = Callable[[aiohttp.ClientSession, Addresses, dict[str, Any], Waits], Awaitable[None]]


async def _stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], waits: Waits, began: float
) -> None:
    first = 0.0
    seen = b""
    async with session.post(url + PATH, json=body | {"stream": True}) as response:
        async for data in response.content.iter_any():
            first = first or time.perf_counter() - began
            seen += data
    if (
        response.status != 200
        or not seen.endswith(b"data: [DONE]\n\n")
        or b'data: {"error"' in seen
    ):
        raise SystemExit(f"{url} answered {response.status}: {seen[-500:]!r}")
    waits.first.append(first)
    waits.total.append(time.perf_counter() - began)


async def plain(
    session: aiohttp.ClientSession, at: Addresses, body: dict[str, Any], waits: Waits
) -> None:
    """One engine does both."""
    await _stream(session, at.plain, body, waits, time.perf_counter())


async def direct(
    session: aiohttp.ClientSession, at: Addresses, body: dict[str, Any], waits: Waits
) -> None:
    """The minimum for P and D: this client sends both legs, without a proxy."""
    began = time.perf_counter()
    leg = body | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": PREFILL}
    async with session.post(at.prefill + PATH, json=leg) as response:
        answer = await response.json()
    if response.status != 200:
        raise SystemExit(f"{at.prefill} answered {response.status}: {answer}")
    leg = body | {"kv_transfer_params": answer["kv_transfer_params"]}
    await _stream(session, at.decode, leg, waits, began)


async def proxied(
    session: aiohttp.ClientSession, at: Addresses, body: dict[str, Any], waits: Waits
) -> None:
    """The same pair through pdproxy."""
    await _stream(session, at.proxy, body, waits, time.perf_counter())


WAYS: dict[str, Way] = {"plain engine": plain, "P, D directly": direct, "P, D by pdproxy": proxied}


async def measure(at: Addresses, length: int, requests: int, tokens: int) -> dict[str, Waits]:
    """Send `requests` prompts of `length` token ids in each way, after two that don't count."""
    found = {name: Waits() for name in WAYS}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        for number in range(requests + 2):
            for name, way in random.sample(sorted(WAYS.items()), len(WAYS)):
                prompt = [random.randrange(300, 4000) for _ in range(length)]
                body = {
                    "prompt": prompt,
                    "max_tokens": tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                await way(session, at, body, found[name] if number > 1 else Waits())
    return found


def _row(length: int, name: str, waits: Waits, base: Waits) -> str:
    cells = [str(length), name]
    for mine, other in ((waits.first, base.first), (waits.total, base.total)):
        p50, p90 = statistics.median(mine), statistics.quantiles(mine, n=10)[-1]
        cells += [f"{1000 * p50:.1f}", f"{1000 * p90:.1f}", f"{p50 / statistics.median(other):.2f}"]
    return "| " + " | ".join(cells) + " |"


async def report(at: Addresses, lengths: list[int], requests: int, tokens: int) -> None:
    """Print the table."""
    print("| prompt tokens | way | TTFT p50 ms | p90 | x plain | total p50 ms | p90 | x plain |")
    print("|---|---|---|---|---|---|---|---|")
    for length in lengths:
        found = await measure(at, length, requests, tokens)
        for name, waits in found.items():
            print(_row(length, name, waits, found["plain engine"]), flush=True)


def _own_engines(stack: ExitStack) -> Addresses:
    sys.path.insert(0, str(ROOT))
    from tests.engines.fleet import Fleet, keep
    from tests.engines.proxy import Proxy

    fleet = Fleet.start()
    stack.callback(fleet.launcher.close if keep() else fleet.stop)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    proxy = Proxy.start(fleet.prefills[:1], fleet.decodes[:1], folder)
    stack.callback(proxy.stop)
    return Addresses(fleet.plain.url, fleet.prefills[0].url, fleet.decodes[0].url, proxy.url)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=20, help="prompts of each length in each way"
    )
    parser.add_argument("--lengths", default="100,1000,1900", help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    for name in ("plain", "prefill", "decode", "proxy"):
        parser.add_argument(f"--{name}", metavar="URL")
    options = parser.parse_args()
    given = [options.plain, options.prefill, options.decode, options.proxy]
    if any(given) and not all(given):
        parser.error("give all four addresses, or none")
    with ExitStack() as stack:
        at = Addresses(*given) if all(given) else _own_engines(stack)
        print(f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}")
        print(
            f"{options.requests} requests per cell, one at a time, streamed, {options.tokens} "
            f"tokens each\n"
        )
        asyncio.run(
            report(
                at,
                [int(one) for one in options.lengths.split(",")],
                options.requests,
                options.tokens,
            )
        )


if __name__ == "__main__":
    main()
