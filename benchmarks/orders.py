"""What it gains to ask both engines at once: connector nixl-push in both orders of the legs, beside
connector nixl.

Usage: orders.py [--scale 1.0] [--speed 1.0] [--limit 200] [--json FILE]

Simulated engines as processes, one P and one D per connector, with the times that were measured on
two H200s with an 8B model. Two proxies share the engines of nixl-push: `sequential` (P first) and
`concurrent` (both at once). A closed loop of streams with 32 tokens, prompts that no cache knows;
the ways take turns in each row, so that other load on the machine meets all of them. Prints a table
with, per way:

    overlap      seconds in which both engines had been asked and P had not answered (mean, of the
                 proxy's metrics)
    wait for KV  from P's answer to D's first data (phase `kv`, mean, of the proxy's metrics)
    TTFT         what the client waits for the first token; the ratio of means to nixl-push in the
                 order `sequential` (prompts are prefilled in pairs, so medians jump between the
                 first of a pair and the second)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from load import percentile
from pdproxy_lab.sim.vocabulary import WORDS
from serving import Figures, one
from simulated import pair

OUTPUT = 32
"""Tokens of each answer."""
WARMUP = 2
"""Prompts before the first row: engines meet, and the proxy of `concurrent` learns where P is, from
its answers.
"""
SEQUENTIAL, CONCURRENT = "sequential", "concurrent"
WAYS = (("nixl", SEQUENTIAL), ("nixl-push", SEQUENTIAL), ("nixl-push", CONCURRENT))
REFERENCE = WAYS[1]
HARDWARE = {
    "prefill-tokens-per-s": 40_000,
    "decode-step-s": 0.005,
    "transfer-latency-s": 0.0133,  # 3.5 ms, and 9.8 ms until the first transfer is posted
    "kv-bytes-per-token": 131_072,
    "link-bytes-per-s": 44e9,  # 2.98 us per token
}
"""Two H200s with NVLink, 8B model, vLLM 0.26.0: what fits the measurements best."""
MEMORY = {"max-model-len": 20_000, "max-num-batched-tokens": 8192, "num-gpu-blocks": 40_000}
COLUMNS = (
    "prompt tokens",
    "clients",
    "connector",
    "order",
    "overlap s",
    "wait for KV ms",
    "TTFT mean ms",
    "p50",
    "p99",
    "mean x sequential push",
    "req/s",
    "failed",
)
_SAMPLE = re.compile(rb"^(\w+?)_(sum|count)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_OVERLAP, _KV = "pdproxy_legs_overlap_seconds", "pdproxy_phase_seconds"


@dataclass(frozen=True)
class Case:
    """One row: closed-loop clients and what they send."""

    tokens: int
    clients: int
    requests: int


CASES = (
    Case(1000, 1, 16),
    Case(4000, 1, 16),
    Case(16_000, 1, 8),
    Case(4000, 10, 60),
    Case(4000, 50, 150),
)


@dataclass(frozen=True)
class Result:
    """What one way did in one row; times in seconds, TTFT in milliseconds. None: nothing was
    counted.
    """

    connector: str
    order: str
    case: Case
    failed: int
    overlap_s: float | None
    kv_s: float | None
    first_mean_ms: float | None
    first_p50_ms: float | None
    first_p99_ms: float | None
    per_s: float


def words(tokens: int, chance: random.Random) -> str:
    """Return a text of so many tokens of the simulator: its tokenizer knows each word with the
    space before it.
    """
    return " " + " ".join(chance.choices(_WORDS, k=tokens))


_WORDS = [word for word in dict.fromkeys(WORDS.split()) if re.fullmatch("[A-Za-z]+", word)]


def sums(page: bytes) -> dict[str, tuple[float, float]]:
    """Return the sum and the count of the overlap, and of the phase `kv`, from a page of
    metrics.
    """
    found = {_OVERLAP: [0.0, 0.0], _KV: [0.0, 0.0]}
    for name, kind, labels, value in _SAMPLE.findall(page):
        if (key := name.decode()) in found and (key == _OVERLAP or b'phase="kv"' in labels):
            found[key][kind == b"count"] += float(value)
    return {name: (total, count) for name, (total, count) in found.items()}


def mean(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    """Return the mean of what was counted between two readings of a sum and a count; None: nothing
    was.
    """
    count = after[1] - before[1]
    return (after[0] - before[0]) / count if count else None


async def ask(
    session: aiohttp.ClientSession, url: str, case: Case, chance: random.Random
) -> Figures:
    """Have the clients send their requests; return what they saw."""
    figures, numbers = Figures(), iter(range(case.requests))

    async def client() -> None:
        for _ in numbers:
            body = {
                "model": "sim",
                "prompt": words(case.tokens, chance),
                "max_tokens": OUTPUT,
                "temperature": 0,
            }
            await one(session, url, body | {"ignore_eos": True, "stream": True}, figures)

    await asyncio.gather(*(client() for _ in range(case.clients)))
    return figures


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, tuple[float, float]]:
    """Read what a proxy has counted."""
    async with session.get(f"{url}/metrics") as answer:
        return sums(await answer.read())


async def measure(
    session: aiohttp.ClientSession, way: tuple[str, str], url: str, case: Case
) -> Result:
    """Measure one way in one row."""
    chance = random.Random(f"{way}{case}")
    before, began = await metrics(session, url), time.perf_counter()
    figures = await ask(session, url, case, chance)
    wall, after = time.perf_counter() - began, await metrics(session, url)
    return Result(
        *way,
        case,
        figures.failed,
        mean(before[_OVERLAP], after[_OVERLAP]),
        mean(before[_KV], after[_KV]),
        round(1000 * sum(figures.first) / len(figures.first), 3) if figures.first else None,
        percentile(figures.first, 0.5),
        percentile(figures.first, 0.99),
        round(len(figures.whole) / wall, 2),
    )


async def run(
    urls: Mapping[tuple[str, str], str], cases: Sequence[Case], limit: float
) -> list[Result]:
    """Measure all rows, at most for `limit` seconds.

    Raises:
        TimeoutError: they take longer.
    """
    found = []
    async with (
        asyncio.timeout(limit),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        for way, url in urls.items():
            await ask(session, url, Case(cases[0].tokens, 1, WARMUP), random.Random(f"{way}"))
        for case in cases:
            for way, url in urls.items():
                found.append(await measure(session, way, url, case))
                print(f"{case}, {way}: {found[-1].first_mean_ms} ms", file=sys.stderr, flush=True)
    return found


def table(found: Sequence[Result]) -> str:
    """Return the results as a table in Markdown."""
    base = {
        each.case: each.first_mean_ms for each in found if (each.connector, each.order) == REFERENCE
    }
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join(["---"] * len(COLUMNS)) + " |"]
    for result in found:
        reference = base.get(result.case)
        cells = [
            str(result.case.tokens),
            str(result.case.clients),
            result.connector,
            result.order,
            _shown(result.overlap_s, "{:.3f}"),
            _shown(None if result.kv_s is None else 1000 * result.kv_s, "{:.1f}"),
            _shown(result.first_mean_ms, "{:.1f}"),
            _shown(result.first_p50_ms, "{:.1f}"),
            _shown(result.first_p99_ms, "{:.1f}"),
            _shown(
                result.first_mean_ms / reference if result.first_mean_ms and reference else None,
                "{:.3f}",
            ),
            f"{result.per_s:.2f}",
            str(result.failed),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float | None, shape: str) -> str:
    return "" if value is None else shape.format(value)


def flags(speed: float) -> list[str]:
    """Return the flags of the engines."""
    given = {**HARDWARE, **MEMORY, "speed": speed}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def scaled(cases: Sequence[Case], scale: float) -> Iterator[Case]:
    """Return the rows with fewer or more requests, one per client at least."""
    for case in cases:
        yield Case(case.tokens, case.clients, max(case.clients, round(case.requests * scale)))


def main() -> int:
    """Measure; return 0 if no request failed, 1 if one did or the time was too short."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="times the usual number of requests"
    )
    parser.add_argument(
        "--speed", type=float, default=1.0, help="of the engines, as in `pdproxy sim`"
    )
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for all requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    given = parser.parse_args()
    with ExitStack() as stack:
        urls = {
            (connector, order): url
            for connector in dict.fromkeys(connector for connector, _ in WAYS)
            for order, url in stack.enter_context(
                pair(
                    connector,
                    [order for name, order in WAYS if name == connector],
                    flags(given.speed),
                )
            ).items()
        }
        try:
            found = asyncio.run(run(urls, list(scaled(CASES, given.scale)), given.limit))
        except TimeoutError:
            print(f"orders.py: not all was measured in {given.limit:g} s", file=sys.stderr)
            return 1
    print(table(found))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return int(any(each.failed for each in found))


if __name__ == "__main__":
    sys.exit(main())
