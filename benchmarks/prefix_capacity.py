"""What knowing engines' prefix caches gains on a trace of conversations: SLO capacity, computed
tokens and TTFT, simulated.

Usage: prefix_capacity.py --trace FILE [--fleets 8 4P4D] [--slos A C] [--seeds 3] [--requests 4000]
[--chunk 2048] [--json FILE]

Fleets: so many plain engines, or prefill and decode engines. Choosers: `least_load`, `power_of_two`
and `prefix` for all legs; `auto`, which on plain engines chooses one and otherwise may also serve
whole on decode engines; and the rule `cache_aware` of vllm-router, as its documentation has it: the
least load if the engines' loads differ much, else the engine with the longest match in a tree of
what was sent to it, if that is more than a part of the prompt, else the one with the smallest tree.

Capacity is the highest rate at which 90 % of the requests keep the SLO, over all seeds, in steps of
1 %. The other columns are of one rate for all: the capacity of `least_load`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decide import LONGEST, PROFILE, SLOS
from pdproxy.engine_model.profile import load
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import Ask, Policy, PolicyFactory
from pdproxy_lab.bench.measures import spread_of
from pdproxy_lab.bench.slo import BenchSlo, parse_slo
from pdproxy_lab.bench.trace import read_trace, spread
from pdproxy_lab.plan.question import Traced
from pdproxy_lab.simulate.cluster import Cluster
from pdproxy_lab.simulate.placements import auto, bounds_of
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import kept

CHOOSERS = ("least_load", "power_of_two", "cache_aware", "prefix", "auto")
THRESHOLD, ABSOLUTE, RELATIVE = 0.3, 64, 1.5
"""Of `cache_aware`: the defaults of vllm-router's command line."""
TREE_CHARACTERS = 67_108_864
CHARACTERS_PER_TOKEN = 4
SHARE = 0.9
STEP = 1.01


class CacheAware(Policy):
    """The rule of vllm-router. Its tree of characters has the trace's blocks instead: a match ends
    at a block's end.
    """

    needs_details = True

    def __init__(self, unit: int) -> None:
        """Make one. `unit`: tokens of a key."""
        self._most = TREE_CHARACTERS // (unit * CHARACTERS_PER_TOKEN)
        self._trees: dict[str, OrderedDict[int, None]] = {}

    def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        """See `Policy`."""
        first = self._best(ask, engines)
        return [first, *(engine for engine in engines if engine is not first)]

    def _best(self, ask: Ask, engines: Sequence[LedgerEngine]) -> LedgerEngine:
        loads = [engine.requests for engine in engines]
        most, least = max(loads), min(loads)
        if most - least > ABSOLUTE and most > RELATIVE * least:
            return engines[loads.index(least)]
        matches = [
            self._match(self._trees.get(engine.url, OrderedDict()), ask.keys) for engine in engines
        ]
        longest = max(matches)
        if ask.keys and longest / len(ask.keys) > THRESHOLD:
            return engines[matches.index(longest)]
        sizes = [len(self._trees.get(engine.url, ())) for engine in engines]
        return engines[sizes.index(min(sizes))]

    @staticmethod
    def _match(tree: OrderedDict[int, None], keys: Sequence[int]) -> int:
        count = 0
        for key in keys:
            if key not in tree:
                break
            count += 1
        return count

    def opened(self, lease: Lease, ask: Ask) -> None:
        """See `Policy`."""
        tree = self._trees.setdefault(lease.engine.url, OrderedDict())
        for key in ask.keys:
            tree[key] = None
            tree.move_to_end(key)
        while len(tree) > self._most:
            tree.popitem(last=False)


class Comparison:
    """One fleet under one SLO."""

    def __init__(self, fleet: str, slo: BenchSlo, arguments: argparse.Namespace) -> None:
        self._slo, self._seeds, self._requests = slo, arguments.seeds, arguments.requests
        profile = load(PROFILE)
        self._hardware = profile.hardware
        shape = Shape(
            max_num_batched_tokens=arguments.chunk,
            kv_tokens=profile.engine.num_gpu_blocks * profile.engine.block_size,
            max_num_seqs=profile.engine.max_num_seqs,
            block_size=profile.engine.block_size,
        )
        self._shapes = dict.fromkeys(Role, shape)
        self.fleet = _fleet(fleet)
        entries = [
            one
            for one in spread(read_trace(arguments.trace))
            if one.input_tokens + one.output_tokens <= LONGEST
        ]
        self._demand = Traced(entries=entries)

    def cluster(self, chooser: str, rate: float, seed: int) -> Cluster:
        """Return a cluster that has served a seed's requests."""
        roles = (Role.PREFILL, Role.DECODE)
        placement = auto(bounds_of(self._slo)) if chooser == "auto" else None
        unit = self._shapes[Role.PREFILL].unit_tokens
        policy: str | PolicyFactory = (
            (lambda _: CacheAware(unit)) if chooser == "cache_aware" else chooser
        )
        policies = {} if placement else dict.fromkeys(roles, policy)
        made = Cluster(self.fleet, self._hardware, self._shapes, policies, placement)
        made.run(self._demand.calls(rate, self._requests, seed))
        return made

    def good(self, chooser: str, rate: float) -> float:
        """Return the share of good requests over all seeds."""
        good = total = 0
        for seed in range(self._seeds):
            records = self.cluster(chooser, rate, seed).records
            good += sum(kept(self._slo, records, number) for number in range(len(records)))
            total += len(records)
        return good / total

    def capacity(self, chooser: str, guess: float) -> float:
        """Return the highest rate with enough good requests; 0: none was found."""
        low, high, width = 0.0, 0.0, STEP**16
        rate = guess
        while not (low and high):
            if self.good(chooser, rate) >= SHARE:
                low, rate = rate, rate * width
            else:
                high, rate = rate, rate / width
                if rate < guess / 100:
                    return 0.0
        while high / low > STEP:
            rate = (low * high) ** 0.5
            if self.good(chooser, rate) >= SHARE:
                low = rate
            else:
                high = rate
        return low

    def at(self, chooser: str, rate: float) -> dict[str, Any]:
        """Return what a rate costs, of the first seed."""
        made = self.cluster(chooser, rate, 0)
        records = made.records
        ttft = spread_of([records.first[n] - records.due[n] for n in range(len(records))])
        assert ttft is not None
        computed = sum(engine.prefill_tokens for engine in made.engines.values())
        return {
            "computed": computed / sum(records.prompt),
            "ttft_p50": ttft.percentiles[50],
            "ttft_p95": ttft.percentiles[95],
        }


def _fleet(text: str) -> Fleet:
    if found := re.fullmatch(r"(\d+)P(\d+)D", text):
        return Fleet(prefill=int(found[1]), decode=int(found[2]))
    return Fleet(aggregated=int(text))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--fleets", nargs="*", default=["8", "4P4D"])
    parser.add_argument("--slos", nargs="*", default=["A", "C"], choices=SLOS)
    parser.add_argument("--choosers", nargs="*", default=CHOOSERS, choices=CHOOSERS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print("fleet  SLO  chooser       capacity  least_load's  computed  TTFT p50   p95 (s)")
    for fleet in arguments.fleets:
        for name in arguments.slos:
            compared = Comparison(fleet, parse_slo(SLOS[name][0]), arguments)
            base = compared.capacity("least_load", 2.0 * compared.fleet.engines)
            if not base:
                parser.error(f"{fleet} {name}: least_load keeps this SLO at no rate")
            for chooser in arguments.choosers:
                capacity = base if chooser == "least_load" else compared.capacity(chooser, base)
                row = {
                    "fleet": fleet,
                    "slo": name,
                    "chooser": chooser,
                    "capacity": capacity,
                    "ratio": capacity / base,
                }
                row |= compared.at(chooser, base)
                rows.append(row)
                print(
                    f"{fleet:6} {name:4} {chooser:13} {capacity:7.2f} {row['ratio']:12.3f} "
                    f"{row['computed']:10.1%}"
                    f" {row['ttft_p50']:9.3f} {row['ttft_p95']:7.3f}",
                    flush=True,
                )
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
