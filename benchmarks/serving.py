"""A latency report: time to the first token, per output token, between tokens, and of whole
answers, with percentiles.

Usage: serving.py --url URL [--url URL ...] [--requests 200] [--rate 4] [--input 1024] [--output
128]
       serving.py --simulated nixl [--requests 200] [--rate 4]

Streams of random prompts begin at random times, `--rate` per second on average, whatever is still
running (an open loop: a server that is late is not spared). Several `--url` are measured one after
the other with the same prompts. If `vllm` is installed, `vllm bench serve` measures in place of
this (`--own` prevents that): it makes prompts of exact lengths with the model's tokenizer. Here a
prompt has so many words, each of one token or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from load import percentile
from simulated import CONNECTORS, stage

PATH = "/v1/completions"
TIMEOUT = 600.0
"""Seconds allowed for one answer."""
RANKS = (0.5, 0.9, 0.99)
WORDS = ("the", "one", "two", "red", "day", "sun", "sea", "map", "car", "tea")


@dataclass
class Figures:
    """Times of all streams in seconds; `tokens` counts those that came."""

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0

    def report(self, seconds: float) -> dict[str, Any]:
        """Return the figures, times in milliseconds."""
        named = {"ttft": self.first, "tpot": self.per_token, "itl": self.between, "e2e": self.whole}
        times = {
            f"{name}_ms": {
                "mean": round(sum(values) / len(values) * 1000, 2) if values else None,
                **{f"p{round(rank * 100)}": percentile(values, rank) for rank in RANKS},
            }
            for name, values in named.items()
        }
        return {
            "requests": len(self.whole),
            "failed": self.failed,
            "seconds": round(seconds, 2),
            "tokens_per_s": round(self.tokens / seconds, 1),
            **times,
        }


async def one(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], figures: Figures
) -> None:
    """Ask for one stream and take its times."""
    begun = last = time.perf_counter()
    count = 0
    try:
        async with session.post(url + PATH, json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"{answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event)[:200])
                if not event.get("choices"):
                    continue
                now = time.perf_counter()
                if count:
                    figures.between.append(now - last)
                else:
                    figures.first.append(now - begun)
                count, last = count + 1, now
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        figures.failed += 1
        print(f"{url}: {error!r}"[:300], file=sys.stderr)
        return
    figures.tokens += count
    figures.whole.append(last - begun)
    if count > 1:
        figures.per_token.append((last - begun - figures.first[-1]) / (count - 1))


async def measure(url: str, requests: int, rate: float, words: int, output: int) -> dict[str, Any]:
    """Measure one server; return the figures."""
    chance, figures = random.Random(5), Figures()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        async with session.get(f"{url}/v1/models") as answer:
            answer.raise_for_status()
            model = (await answer.json())["data"][0]["id"]
        begun, running = time.perf_counter(), []
        for number in range(requests):
            text = f"{number} " + " ".join(chance.choices(WORDS, k=words))
            body = {
                "model": model,
                "prompt": text,
                "max_tokens": output,
                "ignore_eos": True,
                "temperature": 0,
            }
            running.append(
                asyncio.create_task(one(session, url, {**body, "stream": True}, figures))
            )
            await asyncio.sleep(chance.expovariate(rate))
        await asyncio.gather(*running)
        return {"url": url, "model": model, **figures.report(time.perf_counter() - begun)}


def table(found: list[dict[str, Any]]) -> str:
    """Return the figures of several servers as text."""
    names = [f"{name}_ms" for name in ("ttft", "tpot", "itl", "e2e")]
    lines = [
        f"{'':28}{'':>6}" + "".join(f"{column:>10}" for column in ("mean", "p50", "p90", "p99"))
    ]
    for figures in found:
        lines.append(
            f"{figures['url']}: {figures['requests']} requests, {figures['failed']} failed, "
            f"{figures['tokens_per_s']} tokens/s"
        )
        lines += [
            f"{'':28}{name.removesuffix('_ms').upper():>6}"
            + "".join(
                f"{'-' if value is None else format(value, '.1f'):>10}"
                for value in figures[name].values()
            )
            for name in names
        ]
    return "\n".join(lines)


def with_vllm(url: str, given: argparse.Namespace) -> int:
    """Have vLLM's serving benchmark measure a server; return its exit code."""
    parts = urlsplit(url)
    command = [
        "vllm",
        "bench",
        "serve",
        "--host",
        parts.hostname or "",
        "--port",
        str(parts.port or 80),
    ]
    command += [
        "--dataset-name",
        "random",
        "--random-input-len",
        str(given.input),
        "--random-output-len",
        str(given.output),
    ]
    command += [
        "--num-prompts",
        str(given.requests),
        "--request-rate",
        str(given.rate),
        "--ignore-eos",
    ]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"]
    if given.model is not None:
        command += ["--model", given.model]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    """Measure; return 0 if no request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", metavar="URL", action="append", default=[])
    parser.add_argument("--simulated", metavar="CONNECTOR", choices=CONNECTORS)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--model", help="for vLLM's benchmark, which needs the model's tokenizer")
    parser.add_argument("--own", action="store_true", help="do not use vLLM's benchmark")
    given = parser.parse_args()
    if not given.url and given.simulated is None:
        parser.error("give --url or --simulated")
    with ExitStack() as stack:
        urls = [url.rstrip("/") for url in given.url]
        if given.simulated is not None:
            made = stack.enter_context(stage(given.simulated))
            urls += [made.proxy, made.plain]
        elif shutil.which("vllm") and not given.own:
            return max(with_vllm(url, given) for url in urls)
        load = given.requests, given.rate, given.input, given.output
        found = [asyncio.run(measure(url, *load)) for url in urls]
    for figures in found:
        print(json.dumps(figures))
    print(table(found))
    return int(any(figures["failed"] for figures in found))


if __name__ == "__main__":
    sys.exit(main())
