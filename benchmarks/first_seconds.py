"""How soon `auto` serves as well as later: behind a start, and behind steps of the load. Simulated.

Usage: first_seconds.py [--seeds 12]

Prompts of 4,000 tokens with answers of 128, and of 1,000 with 500, come by chance; good are
requests that keep an SLO (A: TTFT 500 ms and TPOT 15 ms, B: TPOT 8 ms). Each row has the share of
good requests among those that came in some seconds, the mean of all seeds, and what these are of
the last of them.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdproxy.engine_model.profile import load
from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.slo import BenchSlo, parse_slo
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.placements import auto, bounds_of
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import kept

PROFILE = load("h200-8b")
A, B = parse_slo("ttft=500ms,tpot=15ms"), parse_slo("ttft=500ms,tpot=8ms")


class Phase(NamedTuple):
    """Some seconds with so many requests per second, on average."""

    rate: float
    seconds: float


class Load(NamedTuple):
    """What comes to how many engines with which chunk size. `prompt`, `output`: tokens."""

    engines: int
    chunk: int
    slo: BenchSlo
    phases: tuple[Phase, ...]
    prompt: int = 4000
    output: int = 128

    def calls(self, seed: int) -> Iterator[Call]:
        """Return the requests of a seed."""
        chance, begin, number = random.Random(f"{seed}:first"), 0.0, 0
        for phase in self.phases:
            now, end = begin, begin + phase.seconds
            while (now := now + chance.expovariate(phase.rate)) < end:
                yield Call(number, now, self.prompt, self.output)
                number += 1
            begin = end

    def good(self, seed: int, times: Sequence[tuple[float, float]]) -> list[float]:
        """Return the share of good requests among those that come in some times."""
        engine = PROFILE.engine
        shape = Shape(
            kv_tokens=engine.num_gpu_blocks * engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            block_size=engine.block_size,
            max_num_batched_tokens=self.chunk,
        )
        shapes = dict.fromkeys(Role, shape)
        placement = auto(bounds_of(self.slo))
        cluster = Cluster(Fleet(any=self.engines), PROFILE.hardware, shapes, {}, placement)
        cluster.run(self.calls(seed))
        records, found = cluster.records, []
        for begin, end in times:
            came = [n for n in range(len(records)) if begin <= records.due[n] < end]
            ended = [n for n in came if not math.isnan(records.last[n])]
            found.append(sum(kept(self.slo, records, n) for n in ended) / max(len(came), 1))
        return found


def mean_good(
    asked: Load, times: Sequence[tuple[float, float]], seeds: int, first: int = 0
) -> list[float]:
    """Return the mean shares of some seeds, from `first` on."""
    runs = [asked.good(seed, times) for seed in range(first, first + seeds)]
    return [sum(shares) / seeds for shares in zip(*runs, strict=True)]


START = ((0.0, 3.0), (3.0, 6.0), (6.0, 15.0), (0.0, 15.0), (15.0, 60.0))
STEP = ((20.0, 23.0), (23.0, 26.0), (26.0, 35.0), (20.0, 35.0), (35.0, 60.0))


def _starts(
    engines: int, chunk: int, slo: BenchSlo, rate: float, *, prompt: int = 4000, output: int = 128
) -> tuple[Load, Sequence[tuple[float, float]]]:
    return Load(engines, chunk, slo, (Phase(rate, 60.0),), prompt, output), START


def _steps(
    engines: int, chunk: int, slo: BenchSlo, low: float, high: float
) -> tuple[Load, Sequence[tuple[float, float]]]:
    phases = (Phase(low, 20.0), Phase(high, 40.0), Phase(low, 20.0))
    return Load(engines, chunk, slo, phases), STEP


LOADS = {
    "start, 2 engines, B, 8 req/s": _starts(2, 4096, B, 8.0),
    "start, 2 engines, B, 4 req/s": _starts(2, 4096, B, 4.0),
    "start, 4 engines, B, 16 req/s": _starts(4, 4096, B, 16.0),
    "start, 4 engines, B, 12 req/s": _starts(4, 4096, B, 12.0),
    "start, 8 engines, B, 32 req/s": _starts(8, 4096, B, 32.0),
    "start, 2 engines, A, 12 req/s": _starts(2, 512, A, 12.0),
    "start, 4 engines, A, 24 req/s": _starts(4, 512, A, 24.0),
    "start, 2 engines, B, 16 req/s of 1000/500": _starts(2, 1024, B, 16.0, prompt=1000, output=500),
    "step, 2 engines, B, 1 to 8 req/s": _steps(2, 4096, B, 1.0, 8.0),
    "step, 4 engines, B, 4 to 16 req/s": _steps(4, 4096, B, 4.0, 16.0),
    "step, 8 engines, B, 8 to 30 req/s": _steps(8, 4096, B, 8.0, 30.0),
    "step, 4 engines, A, 4 to 24 req/s": _steps(4, 512, A, 4.0, 24.0),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{'':42} {'first 3 s':>9} {'3 to 6 s':>9} {'6 to 15 s':>9} {'first 15 s':>10} later")
    for name, (asked, times) in LOADS.items():
        shares = mean_good(asked, times, given.seeds, given.first_seed)
        later = shares[-1] or math.nan
        parts = " ".join(f"{share / later:9.3f}" for share in shares[:-1])
        print(f"{name:42} {parts}  {100 * later:5.1f} %", flush=True)


if __name__ == "__main__":
    main()
