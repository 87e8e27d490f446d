"""Many times more requests than the engines can do: goodput, whose requests are served, how late the event loop is.

Usage: overload.py [--seconds 60] [--times 10] [--batch 16] [--tokens 64] [--windows] [--url URL --keys A,B] [--out FILE]

Without `--url`: a simulated prefill and a decode engine that runs `--batch` requests at once, and a proxy with as many places,
whose keys a and b have the weights 3 and 1. With it: a proxy that is there; `--batch` is then what its engines run at once.

First some requests are sent one by one: their median time is that without load. Goodput is the number of answers per second that
came whole within twice that time, which clients ask for by `X-Request-Timeout`. Its peak is looked for by loads up to twice of
what the engines can do. Then `--times` as much comes for `--seconds`, half of it with each key. Clients send when requests are
due, whatever became of those before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import simulated
from stage import free_ports, machine, raise_files

RAMP = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Parts of what the engines can do at which goodput is measured, each for a sixth of `--seconds`."""
ALONE = 15
"""Requests that are sent one by one."""
WITHIN = 2.0
"""Times the time of an unloaded answer within which an answer is good."""
WEIGHTS = (3, 1)
KEPT = 3.0
"""Seconds for which an idle connection is used again."""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
LATENESS = re.compile(r'^pdproxy_loop_lateness_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


@dataclass
class Tally:
    """What became of the requests of one load. Times in seconds."""

    good: Counter[str] = field(default_factory=Counter)
    late: int = 0
    """Whole answers that came after their deadline."""
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    refusal_times: list[float] = field(default_factory=list)


class Connections:
    """Kept connections to one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._at = parts.hostname or "127.0.0.1", parts.port or 80
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []
        """With the time of their last answer: a server closes those that nobody uses for 5 s."""

    async def post(self, body: bytes, headers: str) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        reader, writer = self._kept() or await asyncio.open_connection(*self._at)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        try:
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(answer.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            whole = await reader.readexactly(length)
        except BaseException:
            writer.close()
            raise
        if b"connection: close" in answer:
            writer.close()
        else:
            self._idle.append((time.perf_counter(), reader, writer))
        return int(answer.split(b" ", 2)[1]), whole

    def _kept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.perf_counter() - since < KEPT:
                return reader, writer
            writer.close()
        return None

    def close(self) -> None:
        """Close all that are idle."""
        for _, _, writer in self._idle:
            writer.close()


class Load:
    """Sends requests, and counts what becomes of them."""

    def __init__(self, url: str, keys: tuple[str, str], model: str, tokens: int) -> None:
        self.connections = Connections(url)
        self._keys = keys
        self._model, self._tokens = model, tokens
        self._chance = random.Random(1)

    async def alone(self) -> float:
        """Return the median time of an answer without load."""
        times = []
        for number in range(ALONE):
            began = time.perf_counter()
            status, body = await self._ask(number, self._keys[number % 2], 600.0)
            if status != 200:
                raise SystemExit(f"a request without load got {status}: {body[:300]!r}")
            times.append(time.perf_counter() - began)
        return median(times[3:])

    async def run(self, rate: float, seconds: float, limit: float) -> Tally:
        """Send `rate` requests per second, each with `limit` seconds for its answer."""
        tally, tasks = Tally(), set[asyncio.Task[None]]()
        due, end = time.perf_counter(), time.perf_counter() + seconds
        number = 0
        while due < end:
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            task = asyncio.create_task(self._one(number, "ab"[number % 2], due, limit, tally))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
            due += self._chance.expovariate(rate)
        if tasks:
            await asyncio.wait(tasks, timeout=limit + 30)
        return tally

    async def _one(self, number: int, tenant: str, due: float, limit: float, tally: Tally) -> None:
        try:
            status, body = await self._ask(number, self._keys["ab".index(tenant)], limit)
        except (OSError, EOFError, ValueError) as error:
            tally.failed[type(error).__name__] += 1
            return
        took = time.perf_counter() - due
        if status == 200:
            if took <= limit:
                tally.good[tenant] += 1
            else:
                tally.late += 1
            return
        reason = json.loads(body)["error"].get("reason", status)
        tally.refused[str(reason)] += 1
        tally.refusal_times.append(took)

    async def _ask(self, number: int, key: str, limit: float) -> tuple[int, bytes]:
        fields = {"model": self._model, "prompt": f"{number} {PROMPT}", "max_tokens": self._tokens, "ignore_eos": True}
        headers = f"content-type: application/json\r\nx-request-timeout: {limit:.3f}\r\n"
        return await self.connections.post(
            json.dumps(fields).encode(), headers + (f"authorization: Bearer {key}\r\n" if key else "")
        )


@contextmanager
def fleet(batch: int, *, windows: bool) -> Iterator[str]:
    """Run a prefill and a decode engine with a proxy in front; yield its URL. `windows`: the number of places is learned."""
    prefill, decode, proxy = free_ports(3)
    engines = ["--eos-every", "0", "--model", "sim", "--profile", "h200-8b", "--no-enable-prefix-caching"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        keys, file = folder / "keys", folder / "pdproxy.yaml"
        file.write_text("limits: {engine_requests: auto}\n")
        keys.write_text(
            "".join(f"{name}:sk-{name} weight={weight}\n" for name, weight in zip("ab", WEIGHTS, strict=True))
        )
        started = [
            ("sim", "--role", "prefill", "--port", str(prefill), *engines),
            ("sim", "--role", "decode", "--port", str(decode), "--max-num-seqs", str(batch), *engines),
            ("serve", "--port", str(proxy), "--log-level", "error", "--api-keys-file", str(keys)),
        ]
        places = ("--config", str(file)) if windows else ("--max-inflight", str(batch))
        urls = ("--prefill", f"127.0.0.1:{prefill}", "--decode", f"127.0.0.1:{decode}", *places)
        processes = [stack.enter_context(simulated.running(*arguments)) for arguments in started[:2]]
        processes.append(stack.enter_context(simulated.running(*started[2], *urls)))
        url = f"http://127.0.0.1:{proxy}"
        simulated.wait([f"{url}/ready"], processes)
        yield url


def lateness(url: str) -> dict[float, float]:
    """Return the counts of the event loop's delays so far, by the upper bounds of their buckets."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return {float(bound.replace("+Inf", "inf")): float(count) for bound, count in LATENESS.findall(page)}


def percentile(before: dict[float, float], after: dict[float, float], part: float) -> float:
    """Return the upper bound of the bucket that holds a percentile of the delays in between, in seconds."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    most = max(counts.values(), default=0.0)
    return next((bound for bound, count in sorted(counts.items()) if count >= part * most), 0.0)


async def measured(options: argparse.Namespace, url: str, keys: tuple[str, str]) -> dict[str, Any]:
    """Return the results."""
    load = Load(url, keys, options.model, options.tokens)
    unloaded = await load.alone()
    limit, capacity = WITHIN * unloaded, options.batch / unloaded
    ramp = {}
    for part in RAMP:
        seconds = options.seconds / len(RAMP)
        tally = await load.run(part * capacity, seconds, limit)
        ramp[part] = tally.good.total() / seconds
        print(f"{part:g} x: goodput {ramp[part]:.1f}/s, {tally.late} late, refused {dict(tally.refused)}", flush=True)
    before = lateness(url)
    tally = await load.run(options.times * capacity, options.seconds, limit)
    after = lateness(url)
    load.connections.close()
    goodput, peak = tally.good.total() / options.seconds, max(ramp.values())
    return {
        "unloaded_s": unloaded,
        "rate_per_s": options.times * capacity,
        "goodput_per_s": goodput,
        "peak_per_s": peak,
        "part_of_peak": goodput / peak if peak else 0.0,
        "late": tally.late,
        "shares": tally.good["a"] / max(tally.good["b"], 1),
        "refused": dict(tally.refused),
        "failed": dict(tally.failed),
        "refusal_p50_s": median(tally.refusal_times) if tally.refusal_times else None,
        "lateness_p99_s": percentile(before, after, 0.99),
        "ramp": ramp,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default="sim")
    parser.add_argument("--url", help="a proxy that is there; otherwise one is started in front of simulated engines")
    parser.add_argument("--keys", default="sk-a,sk-b", help="two keys of it, with the weights 3 and 1")
    parser.add_argument(
        "--windows", action="store_true", help="limits.engine_requests: auto, in place of `--batch` places"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    raise_files()
    first, _, second = options.keys.partition(",")
    with ExitStack() as stack:
        url = options.url or stack.enter_context(fleet(options.batch, windows=options.windows))
        found = {"machine": machine(), **asyncio.run(measured(options, url, (first, second)))}
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
