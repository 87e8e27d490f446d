"""CPU time of a request's decision: the placement `auto` beside `least_load`, in the ledger, without engines.

Usage: decide_cost.py [--engines 16 200] [--requests 20000] [--repeat 5]

Each request is placed, begins its answer and ends; four are open per engine. Microseconds of CPU per request, the least of
some runs, and how much `auto` adds. Prompts share prefixes with none, one or all of the engines.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

from pdproxy.engine_model.profile import load
from pdproxy.scheduling.auto.auto import Auto
from pdproxy.scheduling.auto.goal import Goal
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Evidence, NodeSpec, Role
from pdproxy.scheduling.placement import Placement
from pdproxy.scheduling.policy import Ask

OPEN = 4
"""Open requests per engine."""
GAP_S = 0.25
"""Seconds between two requests, times the number of engines."""


class Known:
    """A prefix index that has found something before."""

    def __init__(self, found: dict[str, int]) -> None:
        self._found = found

    def cached(self, ask: Ask) -> dict[str, int]:
        """See `auto.Prefixes`."""
        return self._found


def ledger_of(engines: int, role: Role, placement: Placement | None) -> Ledger:
    """Return a ledger with so many engines, all up."""
    specs = [NodeSpec(f"http://10.0.{n // 250}.{n % 250}:8000", role) for n in range(engines)]
    ledger = Ledger(specs, breaker_failures=3, breaker_cooldown=10.0, placement=placement)
    for spec in specs:
        ledger.mark_up(spec.url, Evidence(frozenset({"m"}), "", 16, (), 0, 1.0))
    return ledger


def seconds(ledger: Ledger, engines: int, requests: int, *, placed: bool) -> float:
    """Return the CPU time per request."""
    waiting: deque = deque()
    decoding: deque = deque()
    began = time.process_time()
    for number in range(requests):
        now = number * GAP_S / engines
        ask = Ask("m", 16_000, now, tokens=4000)
        if placed:
            assignment = ledger.place(ask, split=True)
            assert assignment is not None
            leases = assignment.leases
        else:
            lease = ledger.assign_alone(ask)
            assert lease is not None
            leases = (lease,)
        waiting.append(leases)
        if len(waiting) > engines:
            leases = waiting.popleft()
            if len(leases) > 1:
                ledger.close(leases[0], Verdict.GOOD, now)
            ledger.began(leases[-1], now)
            decoding.append(leases[-1])
        if len(decoding) > (OPEN - 1) * engines:
            ledger.close(decoding.popleft(), Verdict.GOOD, now, 128)
    return (time.process_time() - began) / requests


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="*", default=[16, 200])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    profile = load("h200-8b")
    print("engines  prefixes  SLO   least_load    auto   added  (us of CPU per request)")
    for engines in arguments.engines:
        urls = [node.url for node in ledger_of(engines, Role.ANY, None).nodes]
        for name, found in (("none", {}), ("one", {urls[1]: 2048}), ("all", dict.fromkeys(urls, 512))):
            for goal in (Goal(ttft=0.5, tpot=0.008), Goal()):
                least = min(
                    seconds(ledger_of(engines, Role.AGGREGATED, None), engines, arguments.requests, placed=False)
                    for _ in range(arguments.repeat)
                )
                ours = min(
                    seconds(
                        ledger_of(
                            engines,
                            Role.ANY,
                            Auto(lambda _: (profile.hardware, 2048), goal, prefixes=Known(found)),
                        ),
                        engines,
                        arguments.requests,
                        placed=True,
                    )
                    for _ in range(arguments.repeat)
                )
                slo = "yes" if goal.any else "no"
                print(
                    f"{engines:7}  {name:8}  {slo:4} {least * 1e6:11.1f} {ours * 1e6:7.1f} {(ours - least) * 1e6:7.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
