"""Which part of the requests `auto` serves within an SLO at fixed rates, beside the best static
arrangement at each of them: of short and of long prompts, and in the first seconds. Simulated.

Usage: shares.py [--trace FILE] [--seeds 6] [--first-seed 300] [--loads mix ...] [--long-weight 2]

Loads and SLOs are those of decide.py. `mix`: half chats with prompts of 300 to 700 tokens, half
documents of 10,000 to 16,000, answers of 200. `steps`: 4,000/128 at half and at one and a half
times the rate in turn, for as many seconds each.

Static are: plain engines with each chunk size, and prefill and decode engines in each ratio. The
best one is that with most good requests at that very rate with these very seeds. `weight` is `auto`
with `slo.long_weight`. A row has the part of good requests: of all, of prompts up to and from 2,000
tokens on; the part of the long ones with a late first token; and what is good among the requests of
the first 15 s, as a part of what is later.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from decide import LONGEST, STEP_REQUESTS, STEPS, Alternating, Mix
from pdproxy.engine_model.profile import load
from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.slo import BenchSlo, parse_slo
from pdproxy_lab.bench.trace import read_trace, spread
from pdproxy_lab.plan.question import Traced
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.placements import auto, bounds_of
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import kept

PROFILE = load("h200-8b")
A, B = parse_slo("ttft=500ms,tpot=15ms"), parse_slo("ttft=500ms,tpot=8ms")
D, E = parse_slo("ttft=1s,tpot=15ms"), parse_slo("ttft=1s,tpot=8ms")
CHUNKS = (512, 1024, 2048, 4096, 8192)
LONG, DOCUMENT = 2000, 8000
"""Tokens of a prompt: those of a row's long ones, and `slo.long_prompt`."""
FIRST_S = 15.0
SECONDS = 90.0
Calls = Callable[[float, int], Iterator[Call]]
"""The requests of a rate and a seed."""


def drawn(demand: Mix | Alternating) -> Calls:
    """Return the requests of some seconds."""
    return lambda rate, seed: demand.calls(rate, round(rate * SECONDS), seed)


def trace_of(path: Path) -> Calls:
    """Return the requests of a trace."""
    entries = [
        one for one in spread(read_trace(path)) if one.input_tokens + one.output_tokens <= LONGEST
    ]
    demand = Traced(entries=entries)
    return lambda rate, seed: demand.calls(rate, round(rate * SECONDS), seed)


class Cell(NamedTuple):
    """A load at some rates (of all engines, per second), an SLO, and the chunk size of `auto`."""

    name: str
    engines: int
    slo: BenchSlo
    chunk: int
    rates: tuple[float, ...]


CELLS = {
    "mix": (
        Cell("2 mix E", 2, E, 2048, (2.0, 2.5, 3.0, 4.0)),
        Cell("4 mix E", 4, E, 2048, (6.0, 7.0, 8.0)),
        Cell("2 mix D", 2, D, 2048, (3.0, 4.0, 4.75)),
        Cell("4 mix D", 4, D, 2048, (9.0, 10.0)),
    ),
    "steps": (
        Cell("4 steps B", 4, B, 4096, (8.0, 12.0)),
        Cell("4 steps A", 4, A, 512, (14.0, 18.0)),
    ),
    "trace": (
        Cell("4 trace B", 4, B, 1024, (4.0, 6.0, 7.0, 8.0)),
        Cell("4 trace A", 4, A, 4096, (8.0, 10.0, 12.0, 14.0)),
    ),
}


class Good(NamedTuple):
    """Parts of the requests: good ones of all, short and long ones, late ones of the long ones; and
    good ones of the first seconds, as a part of those that came later.
    """

    all: float
    short: float
    long: float
    late: float
    first: float


def share(part: int, of: int) -> float:
    """Return a part, nan of nothing."""
    return part / of if of else math.nan


def good(
    fleet: Fleet,
    chunks: tuple[int, int],
    cell: Cell,
    calls: Sequence[Sequence[Call]],
    weight: float,
) -> Good:
    """Return what a fleet serves. `chunks`: of prefill engines, and of others; `weight`: of long
    prompts.
    """
    engine = PROFILE.engine
    shape = Shape(
        kv_tokens=engine.num_gpu_blocks * engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        block_size=engine.block_size,
        max_num_batched_tokens=chunks[1],
    )
    shapes = dict.fromkeys(Role, shape)
    shapes[Role.PREFILL] = structs.replace(shape, max_num_batched_tokens=chunks[0])
    slo = bounds_of(cell.slo)
    if weight != 1.0:
        slo = structs.replace(slo, long_prompt=DOCUMENT, long_weight=weight)
    counts = dict.fromkeys(("short", "long", "first", "later"), (0, 0))
    late = 0
    for requests in calls:
        cluster = Cluster(fleet, PROFILE.hardware, shapes, {}, auto(slo) if fleet.any else None)
        cluster.run(
            [Call(one.number, one.due, one.prompt, one.output, one.keys) for one in requests]
        )
        records = cluster.records
        for number in range(len(records)):
            ok = not math.isnan(records.last[number]) and kept(cell.slo, records, number)
            long = records.prompt[number] >= LONG
            for name in (
                "long" if long else "short",
                "first" if records.due[number] < FIRST_S else "later",
            ):
                whole, served = counts[name]
                counts[name] = whole + 1, served + ok
            took = records.first[number] - records.due[number]
            late += long and cell.slo.ttft is not None and not took <= cell.slo.ttft
    parts = {name: share(served, whole) for name, (whole, served) in counts.items()}
    (short, short_good), (long_, long_good) = counts["short"], counts["long"]
    return Good(
        share(short_good + long_good, short + long_),
        parts["short"],
        parts["long"],
        share(late, long_),
        parts["first"] / parts["later"] if parts["later"] else math.nan,
    )


def statics(engines: int, chunk: int) -> Iterator[tuple[str, Fleet, tuple[int, int]]]:
    """Yield the static arrangements of so many engines: their names, roles and chunk sizes.
    `chunk`: of prefill engines.
    """
    for one in CHUNKS:
        yield f"plain {one}", Fleet(aggregated=engines), (one, one)
    for prefill in range(1, engines):
        decode = engines - prefill
        yield f"{prefill}P{decode}D", Fleet(prefill=prefill, decode=decode), (chunk, 8192)


def row(name: str, found: Good) -> str:
    """Return a line of the table."""
    parts = " ".join(f"{100 * one:6.1f}" if one == one else "     -" for one in found[:4])
    return f"{name:34} {parts} {found.first:7.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first-seed", type=int, default=300)
    parser.add_argument("--loads", nargs="*", choices=sorted(CELLS), default=list(CELLS))
    parser.add_argument("--long-weight", type=float, nargs="*", default=[], metavar="WEIGHT")
    given = parser.parse_args()
    print(f"{'':34} {'good':>6} {'short':>6} {'long':>6} {'late':>6} {'first':>7}  % but the last")
    ratios: list[float] = []
    firsts: list[float] = []
    for what in given.loads:
        if what == "trace" and given.trace is None:
            continue
        for cell in CELLS[what]:
            made = (
                trace_of(given.trace)
                if what == "trace"
                else drawn(
                    Mix()
                    if what == "mix"
                    else Alternating(engines=cell.engines, phases=STEPS, counts=STEP_REQUESTS)
                )
            )
            for rate in cell.rates:
                calls = [
                    list(made(rate, seed))
                    for seed in range(given.first_seed, given.first_seed + given.seeds)
                ]
                best, name = max(
                    (good(fleet, chunks, cell, calls, 1.0), name)
                    for name, fleet, chunks in statics(cell.engines, cell.chunk)
                )
                fleet, chunks = Fleet(any=cell.engines), (cell.chunk, cell.chunk)
                ours = good(fleet, chunks, cell, calls, 1.0)
                title = f"{cell.name}, {rate:g} req/s"
                print(row(f"{title}: {name}", best))
                ratio = ours.all / best.all if best.all else math.nan
                print(f"{row('  auto', ours)}  auto/best {ratio:.3f}", flush=True)
                for weight in given.long_weight if what == "mix" else ():
                    weighed = good(fleet, chunks, cell, calls, weight)
                    print(row(f"  auto, long_weight {weight:g}", weighed), flush=True)
                ratios.append(ratio)
                firsts.append(ours.first)
    print(
        f"\nauto/best: mean {sum(ratios) / len(ratios):.3f}, least {min(ratios):.3f}; "
        f"first 15 s: least {min(firsts):.3f}"
    )


if __name__ == "__main__":
    main()
