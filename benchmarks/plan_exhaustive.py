"""How near `pdproxy plan` comes to the best arrangement, which `--exhaustive` finds, what each of
them takes, and how much of the plan's time `auto` takes: its simulations, and those of the best
static arrangement with other seeds.

Usage: plan_exhaustive.py [--gpus 8] [--seeds 3] [--requests N] [--trace FILE [--max-tokens 16000]]
[--loads NAME ...] [--plan-only]

Loads: prompts of 4,000 tokens with answers of 128, prompts of 1,000 with answers of 500, and with
--trace the trace, its times spread. SLOs:
A is TTFT 500 ms and TPOT 15 ms, B is TPOT 8 ms instead, both for 90 % of the requests; G is no gap
over 50 ms, for 95 %. The exit code is 1 if a plan's arrangement serves over 5 % less than the best
one. With --plan-only the plan alone is searched.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import msgspec

from pdproxy.engine_model.profile import load
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.bench.trace import read_trace, spread
from pdproxy_lab.bench.workload import Lengths
from pdproxy_lab.plan.answer import ratio
from pdproxy_lab.plan.arrangement import CHUNKS, Arrangement
from pdproxy_lab.plan.capacity import CapacitySearch, Level
from pdproxy_lab.plan.question import Demand, Drawn, Question, Traced, steady
from pdproxy_lab.plan.search import Result, exhaustive, search
from pdproxy_lab.simulate.shape import Shape

WITHIN = 0.95
SLOS = {
    "A": ("ttft=500ms,tpot=15ms", 0.9),
    "B": ("ttft=500ms,tpot=8ms", 0.9),
    "G": ("gap=50ms", 0.95),
}
LENGTHS = {"4000/128": (4000, 128), "1000/500": (1000, 500)}


def main() -> int:
    """Print a line per load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--max-tokens", type=int, default=16_000)
    parser.add_argument(
        "--loads",
        nargs="*",
        default=["4000/128 A", "4000/128 B", "4000/128 G", "1000/500 A", "1000/500 B"],
    )
    parser.add_argument("--plan-only", action="store_true", help="without --exhaustive")
    arguments = parser.parse_args()
    loads = list(arguments.loads) + (["trace A", "trace B"] if arguments.trace else [])
    print(f"{arguments.gpus} GPUs; CPU seconds of one core; req/s per GPU")
    print(
        "  load          plan                                  of it auto  auto/static, other seeds"
        "  all arrangements                      plan/best"
    )
    bad = 0
    for name in loads:
        demand_name, _, slo = name.partition(" ")
        asked = question(demand_of(demand_name, arguments), slo)
        if name.startswith("trace"):
            asked = msgspec.structs.replace(asked, policies=("least_load", "prefix"))
        options = {"requests": arguments.requests, "seeds": arguments.seeds}
        with watched() as spent:
            smart, smart_s = timed(lambda: search(asked, arguments.gpus, **options))  # noqa: B023 - called at once
        line = f"  {name:12}  {shown(smart, smart_s)} {spent[0]:8.0f} s  {gains(smart):24}"
        if arguments.plan_only:
            print(line.rstrip(), flush=True)
            continue
        best, best_s = timed(lambda: exhaustive(asked, arguments.gpus, **options))  # noqa: B023 - called at once
        part = rate(smart) / rate(best)
        bad += part < WITHIN
        print(f"{line}  {shown(best, best_s)}  {100 * part:6.1f} %", flush=True)
    return 1 if bad else 0


def demand_of(name: str, arguments: argparse.Namespace) -> Demand:
    """Return a load by its name."""
    if name == "trace":
        longest = arguments.max_tokens
        entries = [
            one
            for one in spread(read_trace(arguments.trace))
            if one.input_tokens + one.output_tokens <= longest
        ]
        return Traced(entries=entries)
    inputs, outputs = LENGTHS[name]
    return Drawn(inputs=Lengths(inputs, inputs), outputs=Lengths(outputs, outputs))


def question(demand: Demand, slo: str) -> Question:
    """Return the question of a load with an SLO by its name."""
    profile = load("h200-8b")
    limits, share = SLOS[slo]
    asked = Question(
        demand=demand,
        slo=parse_slo(limits),
        share=share,
        hardware=profile.hardware,
        shape=Shape(
            kv_tokens=profile.engine.num_gpu_blocks * profile.engine.block_size,
            max_num_seqs=profile.engine.max_num_seqs,
            block_size=profile.engine.block_size,
        ),
        chunks=CHUNKS,
        policies=("least_load",),
    )
    return steady(asked)


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return what `work` returns, and its CPU time in seconds."""
    began = time.process_time()
    return work(), time.process_time() - began


@contextmanager
def watched() -> Iterator[list[float]]:
    """Yield a list of the CPU seconds in the simulations that are only there for `auto`."""
    spent, passes = [0.0], CapacitySearch.passes

    def timed_one(self: CapacitySearch, one: Arrangement, level: Level, place: int) -> bool:
        began = time.process_time()
        found = passes(self, one, level, place)
        if one.kind == "auto" or level.first:
            spent[0] += time.process_time() - began
        return found

    with patch.object(CapacitySearch, "passes", timed_one):
        yield spent


def gains(result: Result) -> str:
    """Return what `auto` serves beside the best static arrangement."""
    others = result.other_seeds
    first = ratio(result.auto, result.static)
    again = None if others is None else ratio(others.auto, others.static)
    return ", ".join("-" if one is None else f"{one:.2f}" for one in (first, again))


def rate(result: Result) -> float:
    """Return the capacity of the best arrangement, in requests per second."""
    if result.best is None:
        sys.exit("nothing keeps the SLO")
    return result.best.rate


def shown(result: Result, seconds: float) -> str:
    """Return what was found, and what it took."""
    assert result.best is not None
    one = result.best.arrangement
    found = f"{one.name}, {one.chunks}"
    return f"{found:22} {rate(result) / result.gpus:5.2f} {seconds:5.0f} s"


if __name__ == "__main__":
    sys.exit(main())
