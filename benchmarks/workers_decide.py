"""How well several workers choose engines with the placement `auto`, beside one process: simulated,
a table.

Usage: workers_decide.py [--cases plain B ...] [--workers 1 2 4 8] [--engines 16] [--seconds 60]
[--seeds 3] [--alone]

Engines of role any (profile h200-8b, chunks of 2048). `plain`: prompts of 500 to 3500 tokens with
answers of 32 to 480, half of what engines can serve, SLO C (TTFT 2 s, TPOT 30 ms). `B`: prompts of
4000 with answers of 128, near capacity, SLO B (TTFT 500 ms, TPOT 8 ms), so that most are split. 64
connections are spread over the workers, and requests over the connections by chance. `one process`
is `Auto` in a `Ledger`; --alone: also workers that share nothing but the number of requests of each
engine. Imbalance: the largest number of requests of an engine divided by the mean one, each quarter
of a second, on average.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from statistics import fmean, median

from pdproxy.engine_model.profile import load
from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.simulate import placements, workers
from pdproxy_lab.simulate.cluster import Call
from pdproxy_lab.simulate.placements import MakePlacement
from pdproxy_lab.simulate.replicas import Replicas, ReplicatedCluster
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import summarise
from pdproxy_lab.simulate.workers import WorkersCluster

CASES = {
    "plain": ("ttft=2s,tpot=30ms", 5.0, (500, 3500), (32, 480)),
    "B": ("ttft=500ms,tpot=8ms", 3.2, (4000, 4001), (128, 129)),
}
"""SLO, requests per second and engine, tokens of prompts and of answers."""


def requests(seed: int, case: str, engines: int, seconds: float) -> Iterator[Call]:
    """Return the requests of a run. Poisson."""
    _, rate, prompts, answers = CASES[case]
    chance = random.Random(f"{seed}:{case}")
    now, number = 0.0, 0
    while (now := now + chance.expovariate(rate * engines)) < seconds:
        yield Call(number, now, chance.randrange(*prompts), chance.randrange(*answers))
        number += 1


def one(
    case: str, count: int, how: str, seed: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return what one run amounts to. `how`: `one`, `shared` or `alone`."""
    slo = parse_slo(CASES[case][0])
    bounds = placements.bounds_of(slo)
    profile = load("h200-8b")
    shape = Shape(
        max_num_batched_tokens=2048,
        kv_tokens=profile.engine.num_gpu_blocks * profile.engine.block_size,
        max_num_seqs=profile.engine.max_num_seqs,
        block_size=profile.engine.block_size,
    )
    fleet, shapes = Fleet(any=arguments.engines), dict.fromkeys(Role, shape)
    cluster: WorkersCluster | ReplicatedCluster
    if how == "one":
        make: MakePlacement = placements.auto(bounds)
        cluster = ReplicatedCluster(
            fleet, profile.hardware, shapes, {}, make, replicas=Replicas(), seed=seed
        )
    else:
        make = workers.auto(bounds, count) if how == "shared" else placements.auto(bounds)
        cluster = WorkersCluster(
            fleet, profile.hardware, shapes, {}, make, workers=count, seed=seed
        )
    cluster.run(requests(seed, case, arguments.engines, arguments.seconds))
    summary = summarise(cluster, (slo,))
    samples = cluster.samples[len(cluster.samples) // 4 :]
    assert summary.ttft is not None
    assert summary.tpot is not None
    ttft, tpot = summary.ttft, summary.tpot
    return {
        "imbalance": fmean(most / mean for most, mean in samples if mean),
        "ttft_mean_ms": ttft.mean * 1e3,
        "ttft_p99_ms": (ttft.percentiles[99] or 0.0) * 1e3,
        "tpot_p99_ms": (tpot.percentiles[99] or 0.0) * 1e3,
        "good_percent": 100 * summary.good[slo.name] / summary.requests,
    }


def main() -> None:
    """Print a table, a line for each number of workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--alone", action="store_true")
    arguments = parser.parse_args()
    for case in arguments.cases:
        print(
            f"\n{case}, {arguments.engines} engines\n                        imbalance  TTFT ms "
            f"mean   p99  TPOT ms p99  good, %"
        )
        rows = [
            ("one process", 1, "one"),
            *((f"{count} workers", count, "shared") for count in arguments.workers),
        ]
        if arguments.alone:
            rows += [
                (f"{count} workers, alone", count, "alone")
                for count in arguments.workers
                if count > 1
            ]
        for name, count, how in rows:
            runs = [one(case, count, how, seed, arguments) for seed in range(arguments.seeds)]
            found = {key: median(run[key] for run in runs) for key in runs[0]}
            print(
                f"  {name:20}  {found['imbalance']:9.3f}  {found['ttft_mean_ms']:12.1f} "
                f"{found['ttft_p99_ms']:5.0f}"
                f"  {found['tpot_p99_ms']:11.2f}  {found['good_percent']:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
