"""What it costs to choose a pair of engines by message, beside by a call: CPU time, and how long an
answer takes.

Usage: by_message.py [--workers 1 2 8] [--flights 1 16] [--engines 4 200] [--seconds 3]
[--choices 20000] [--hold 0]

A scheduler process chooses for so many worker processes, each of which always has so many choices
in flight: it chooses a pair, gives both leases back, and asks again. `by a call` is the same
scheduler in one process. CPU: of the threads themselves, per choice. p99: from the question to its
answer, in a worker. --hold: seconds for which each choice keeps its leases, up to a half more or
less: then requests are in flight whose engines were chosen. More processes than cores wait for each
other: then p99 says little.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from statistics import median

import uvloop

from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.transfers import Transfers
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.outliers import Outliers
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.scheduler import Scheduler
from pdproxy.settings.health import OutlierSettings
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient
from pdproxy.workers import links
from pdproxy.workers.remote_scheduler import RemoteScheduler
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.worker_choices import PoolChoices, serve_choices

WARM = 0.3
"""Seconds before it is measured."""


def fleet(count: int) -> tuple[EngineRegistry, Ledger]:
    """Return so many engines, half of them for prefill, all up."""
    ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
    engines, clock, budget = EngineRegistry(ledger), Clock(), AnswerBudget()
    for number in range(count):
        url = f"http://10.0.0.{number // 200}:{8000 + number % 200}"
        role = Role.PREFILL if number % 2 else Role.DECODE
        client = EngineClient(url, connect_timeout=1, keepalive=1, clock=clock, budget=budget)
        engines.add(EngineSpec(url, role), client)
        ledger.mark_up(url, Evidence(frozenset({"m"}), "1", 16, (), 0, 1.0))
    return engines, ledger


def scheduler_of(engines: EngineRegistry, ledger: Ledger) -> LocalScheduler:
    """Return what chooses among these engines."""
    observers, clock = Observers([]), Clock()
    buffers = ReceiveBuffers(engines, 16, clock, observers, Deadlines())
    outliers, transfers = Outliers(OutlierSettings()), Transfers(ledger, observers, clock.now)
    return LocalScheduler(ledger, outliers, buffers, transfers, observers, clock.now, None, None)


async def choose(
    scheduler: Scheduler, flights: int, until: float, hold: float = 0.0
) -> tuple[int, list[float]]:
    """Return how many choices were made until then, and the seconds that each took. `hold`: seconds
    for which each keeps its leases.
    """
    took: list[float] = []

    async def one() -> None:
        if hold:  # not all of them at once
            await asyncio.sleep(hold * random.random())
        while (asked := time.perf_counter()) < until:
            ask = Ask("m", 4000, time.monotonic())
            found = await scheduler.choose("0" * 32, ask)
            took.append(time.perf_counter() - asked)
            if found is None:
                raise RuntimeError("there are no engines")
            if hold:
                await asyncio.sleep(hold * random.uniform(0.5, 1.5))
            for lease in found.leases:
                scheduler.close(lease, Verdict.GOOD, time.monotonic(), pace=0.01)

    await asyncio.gather(*[one() for _ in range(flights)])
    return len(took), took


def by_a_call(engines: int, choices: int) -> float:
    """Return the seconds of CPU time of a choice in one process."""

    async def run() -> float:
        scheduler = scheduler_of(*fleet(engines))
        begun, made = time.thread_time(), 0
        while made < choices:
            # a choice by a call lets no other one run: the clock is looked at seldom
            count, _ = await choose(scheduler, 1, time.perf_counter() + 0.1)
            made += count
        return (time.thread_time() - begun) / made

    return uvloop.run(run())


def work(
    end: socket.socket, engines: int, flights: int, seconds: float, hold: float, out: int
) -> None:
    """Be a worker: choose by message, and write what it cost."""

    async def run() -> dict[str, float]:
        registry, view = fleet(engines)
        link = SchedulerLink()
        link.connect(end)
        scheduler = RemoteScheduler(
            link, 0, registry, view, Observers([]), lambda _: True, time.monotonic
        )
        await choose(scheduler, flights, time.perf_counter() + WARM, hold)
        gc.freeze()
        begun = time.thread_time()
        made, took = await choose(scheduler, flights, time.perf_counter() + seconds, hold)
        cpu = time.thread_time() - begun
        took.sort()
        return {"made": made, "cpu": cpu, "p50": median(took), "p99": took[len(took) * 99 // 100]}

    os.write(out, json.dumps(uvloop.run(run())).encode())


def decide(ends: Sequence[socket.socket], engines: int, out: int) -> None:
    """Be the scheduler process until all workers have ended, and write its CPU time."""

    async def run() -> float:
        registry, ledger = fleet(engines)
        scheduler = scheduler_of(registry, ledger)
        buffers = ReceiveBuffers(registry, 16, Clock(), Observers([]), Deadlines())
        pool = PoolChoices(scheduler, ledger, buffers, lambda: None, time.monotonic)
        left = asyncio.Event()
        clients: set[SchedulerClient] = set()

        def lost(client: SchedulerClient) -> None:
            clients.discard(client)
            if not clients:
                left.set()

        for end in ends:
            client = SchedulerClient(end, lost, SchedulerClient.welcome)
            serve_choices(client, [pool])
            clients.add(client)
        gc.freeze()
        begun = time.thread_time()
        await left.wait()
        return time.thread_time() - begun

    os.write(out, json.dumps({"cpu": uvloop.run(run())}).encode())


def forked(run: Callable[[int], None]) -> tuple[int, int]:
    """Run a function in a child process, with what its result is written to. Return the child's id,
    and where its result is read.
    """
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            run(writes)
            code = 0
        finally:
            os._exit(code)
    os.close(writes)
    return pid, reads


def result(pid: int, reads: int) -> dict[str, float]:
    """Return what a child has written, once it has ended."""
    with os.fdopen(reads, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit("a process has failed")
    found: dict[str, float] = json.loads(text)
    return found


def by_message(
    engines: int, workers: int, flights: int, seconds: float, hold: float
) -> dict[str, float]:
    """Return what one run amounts to, per choice."""
    pairs = [links.pair() for _ in range(workers)]

    def deciding(out: int) -> None:
        for _, its in pairs:
            its.close()
        decide([mine for mine, _ in pairs], engines, out)

    scheduler = forked(deciding)
    children = []
    for number, (_, its) in enumerate(pairs):

        def one(out: int, at: int = number, end: socket.socket = its) -> None:
            for other, (mine, theirs) in enumerate(pairs):
                mine.close()
                if other != at:
                    theirs.close()
            work(end, engines, flights, seconds, hold, out)

        children.append(forked(one))
    for mine, its in pairs:
        mine.close()
        its.close()
    found = [result(*child) for child in children]
    decided = result(*scheduler)
    made = sum(one["made"] for one in found)
    return {
        "rate": made / seconds,
        "scheduler": decided["cpu"] / made * seconds / (seconds + WARM),
        "worker": sum(one["cpu"] for one in found) / made,
        "p50": median(one["p50"] for one in found),
        "p99": max(one["p99"] for one in found),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--flights", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--engines", type=int, nargs="+", default=[4, 200])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--choices", type=int, default=20000)
    arguments = parser.parse_args()
    print(
        "| engines | workers | in flight each | choices/s | scheduler CPU µs | worker CPU µs | "
        "p50 µs | p99 µs |"
    )
    print("| --- " * 8 + "|")
    for engines in arguments.engines:
        call = by_a_call(engines, arguments.choices)
        print(f"| {engines} | by a call | 1 | | {call * 1e6:.1f} | | | |")
        for workers in arguments.workers:
            for flights in arguments.flights:
                one = by_message(engines, workers, flights, arguments.seconds, arguments.hold)
                print(
                    f"| {engines} | {workers} | {flights} | {one['rate']:.0f} | "
                    f"{one['scheduler'] * 1e6:.1f} | {one['worker'] * 1e6:.1f} | "
                    f"{one['p50'] * 1e6:.0f} | {one['p99'] * 1e6:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
