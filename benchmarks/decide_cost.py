"""CPU time of a request's decision: the placement `auto` beside `least_load`, in the ledger,
without engines.

Usage: decide_cost.py [--engines 16 200] [--requests 20000] [--repeat 5] [--replicas 1]
[--revisions 1] [--bytecodes]

Each request is placed, begins its answer and ends; four are open per engine. Microseconds of CPU
per request, the least of some runs, and how much `auto` adds: with an SLO by which requests are
served whole, and with one by which most are split. Prompts share prefixes with none, one or all of
the engines. --replicas: as one of so many proxies. --revisions: the engines are of so many. What
workers add, which ask one process for engines: by_message.py.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from msgspec import structs

from pdproxy.engine_model.profile import load
from pdproxy.scheduling.auto.auto import Auto, AutoOptions
from pdproxy.scheduling.auto.replica import ReplicaAuto
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import REVISION, EngineSpec, Evidence, Role
from pdproxy.scheduling.placement import NotYetError, Placement
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy.scheduling.slo import Slo

MakeAuto = Callable[[AutoOptions], Auto]
OPEN = 4
"""Open requests per engine."""
GAP_S = 0.25
"""Seconds between two requests, times the number of engines."""


class Known:
    """A prefix index that has found something before."""

    def __init__(self, found: dict[str, int]) -> None:
        self._found = found

    def cached(self, ask: Ask) -> dict[str, int]:
        """Return the same for each request."""
        return self._found


def ledger_of(
    roles: list[Role], placement: Placement | None, replicas: int = 1, revisions: int = 1
) -> Ledger:
    """Return a ledger with engines of these roles, all up, in turn of these revisions."""
    make: Callable[[Sequence[EngineSpec], LedgerOptions], Ledger] = Ledger
    if replicas > 1:
        make = partial(ReplicaLedger, replicas=replicas, max_age=lambda: 15.0)
    specs = [
        EngineSpec(
            f"http://10.0.{n // 250}.{n % 250}:8000",
            role,
            within=((REVISION, f"v{n // 2 % revisions}"),),
        )
        for n, role in enumerate(roles)
    ]
    ledger = make(
        specs, LedgerOptions(breaker_failures=3, breaker_cooldown=10.0, placement=placement)
    )
    for spec in specs:
        ledger.mark_up(spec.url, Evidence(frozenset({"m"}), "", 16, (), 0, 1.0))
    return ledger


def seconds(ledger: Ledger, engines: int, requests: int, roles: tuple[Role, ...]) -> float:
    """Return the CPU time per request. `roles`: of the leases of a request, where there is no
    placement.
    """
    waiting: deque[tuple[Lease, ...]] = deque()
    decoding: deque[Lease] = deque()
    began = time.process_time()
    for number in range(requests):
        now = number * GAP_S / engines
        ask = Ask("m", 16_000, now, tokens=4000)
        try:
            assignment = ledger.assign(roles, ask) if roles else ledger.place(ask, split=True)
        except NotYetError:  # it waits, and begins at the next look
            assignment = ledger.place(structs.replace(ask, waited=60.0), split=True)
        assert assignment is not None
        waiting.append(assignment.leases)
        if len(waiting) > engines:
            leases = waiting.popleft()
            if len(leases) > 1:
                ledger.close(leases[0], Verdict.GOOD, now)
            ledger.began(leases[-1], now)
            decoding.append(leases[-1])
        if len(decoding) > (OPEN - 1) * engines:
            ledger.close(decoding.popleft(), Verdict.GOOD, now, 128)
    return (time.process_time() - began) / requests


def bytecodes(ledger: Ledger, engines: int, requests: int, roles: tuple[Role, ...]) -> float:
    """Return the Python bytecodes per request. The arguments: those of `seconds`."""
    count = 0

    def each(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return each

    def call(frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    sys.settrace(call)
    try:
        seconds(ledger, engines, requests, roles)
    finally:
        sys.settrace(None)
    return count / requests


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="*", default=[16, 200])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--revisions", type=int, default=1)
    parser.add_argument(
        "--bytecodes", action="store_true", help="count Python bytecodes in place of CPU time"
    )
    arguments = parser.parse_args()
    profile, replicas, revisions = load("h200-8b"), arguments.replicas, arguments.revisions
    make: MakeAuto = Auto
    if replicas > 1:
        make = partial(ReplicaAuto, replicas=replicas, chance=random.random)
    cost, scale, unit = (
        (bytecodes, 1.0, "bytecodes") if arguments.bytecodes else (seconds, 1e6, "us of CPU")
    )
    print(f"engines  prefixes  requests  least_load    auto   added  ({unit} per request)")
    for engines in arguments.engines:
        plain, split = [Role.AGGREGATED] * engines, [Role.PREFILL, Role.DECODE] * (engines // 2)
        urls = [engine.url for engine in ledger_of(plain, None).engines]
        for name, found in (
            ("none", {}),
            ("one", {urls[1]: 2048}),
            ("all", dict.fromkeys(urls, 512)),
        ):
            for kind, slo in (
                ("whole", Slo(ttft=2.0, tpot=0.03)),
                ("split", Slo(ttft=0.5, tpot=0.008)),
            ):
                whole = kind == "whole"
                fixed = (Role.AGGREGATED,) if whole else (Role.PREFILL, Role.DECODE)
                least, ours = math.inf, math.inf
                for _ in range(arguments.repeat):
                    plainly = ledger_of(plain if whole else split, None, replicas, revisions)
                    placement = make(
                        AutoOptions(
                            times_of=lambda _: (profile.hardware, 2048),
                            slo=slo,
                            cached=Known(found).cached,
                        )
                    )
                    ledger = ledger_of([Role.ANY] * engines, placement, replicas, revisions)
                    least = min(least, cost(plainly, engines, arguments.requests, fixed))
                    ours = min(ours, cost(ledger, engines, arguments.requests, ()))
                    # the load of several replicas may be too much for splitting
                    if replicas == 1:
                        part = placement.splits / arguments.requests
                        assert part < 1 / 10 if whole else part > 1 / 4
                print(
                    f"{engines:7}  {name:8}  {kind:8} {least * scale:11.1f} {ours * scale:7.1f} "
                    f"{(ours - least) * scale:7.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
