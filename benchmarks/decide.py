"""What the placement `auto` serves within an SLO, beside the best static arrangement of each load:
simulated, a table and JSON.

Usage: decide.py [--results FILE] [--trace FILE] [--cells "4 4000/128 A" ...] [--seeds 3] [--chunks]
[--held-out 100]
                 [--plot FILE]

A cell is a number of engines (4, 16), a load and an SLO. Loads: prompts of 4,000 tokens with
answers of 128, prompts of 1,000 with answers of 500, both in turn (`alternate`), the former with
steps of the rate (`steps`), half chats and half documents (`mix`), and with --trace the trace's
requests of at most 16,000 tokens. SLOs: A is TTFT 500 ms and TPOT 15 ms, B is TPOT 8 ms instead, C
is TTFT 2 s and TPOT 30 ms, for 90 % of the requests each; G is TTFT 2 s and no gap over 50 ms, for
95 %. Of `mix` they are D and E: A and B with a TTFT of 1 s.

Static are: plain engines with each chunk size, prefill and decode engines in each ratio, and these
with a rule that serves prompts whole, if the prefill engines are busy or the prompt is short. They
are searched with one seed; the best ones and `auto` are run with all seeds. `auto` has engines of
role `any`, with the chunk size that `pdproxy plan` says for the cell (of a split: that of its
prefill engines); --chunks tries all. It knows what is in the engines' prefix caches, `least_load`
does not.

--held-out runs the best static arrangement and `auto` once more, with seeds from that one on, which
nobody has looked at before.

Cells that are in the results file are not run again, so it can be stopped and go on. At the end, or
with --show, the table is printed: rates per engine. --plot draws auto's part of the best static
arrangement as a heat map, which needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from decide_table import line, plot, table
from pdproxy.engine_model.profile import load
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.bench.trace import read_trace, spread
from pdproxy_lab.bench.workload import Lengths
from pdproxy_lab.plan.arrangement import CHUNKS, STATIC, Arrangement, plain
from pdproxy_lab.plan.bounds import bound, work_of
from pdproxy_lab.plan.capacity import CapacitySearch, Level, place_of, rate_at
from pdproxy_lab.plan.question import Drawn, Question, Traced
from pdproxy_lab.plan.search import Result, levels, search
from pdproxy_lab.simulate.cluster import Call
from pdproxy_lab.simulate.placements import Hybrid, MakePlacement
from pdproxy_lab.simulate.shape import Shape
from plan_exhaustive import LENGTHS

PROFILE = "h200-8b"
SIZES = (4, 16)
SLOS = {
    "A": ("ttft=500ms,tpot=15ms", 0.9),
    "B": ("ttft=500ms,tpot=8ms", 0.9),
    "C": ("ttft=2s,tpot=30ms", 0.9),
    "G": ("ttft=2s,gap=50ms", 0.95),
    "D": ("ttft=1s,tpot=15ms", 0.9),
    "E": ("ttft=1s,tpot=8ms", 0.9),
}
OF_MIX = ("D", "E")
"""The SLOs of `mix`: a document alone takes half a second."""
LOADS = ("4000/128", "1000/500", "alternate", "steps", "trace")
LONGEST = 16_000
PHASES = ((4000, 128, 1.0), (1000, 500, 0.5))
"""Of `alternate`: tokens of prompt and answer, and the relative time between two requests."""
PHASE_REQUESTS = (75, 150)
"""Per engine: phases of 10 to 20 s, whatever the number of engines."""
CYCLES = 2
STEPS = ((4000, 128, 3.0), (4000, 128, 1.0))
STEP_REQUESTS = (40, 120)
"""The same of `steps`: half and one and a half times the mean rate, for as many seconds each."""
CHATS, DOCUMENTS, MIX_OUTPUT = (300, 700), (10_000, 16_000), 200
"""Of `mix`: tokens of prompts, of the shortest and the longest, and of answers."""
BUSY = (1, 2, 4)
SHORT = (2000, 8000)
RATIOS = {4: (1, 2, 3), 16: (2, 4, 6, 7, 8, 9, 10, 12)}
STEP = 2
"""Steps of the grid of rates (1 %) between two that are tried."""
TRACE_REQUESTS = {4: 3000, 16: 6000}


class Alternating(msgspec.Struct, frozen=True, kw_only=True):
    """Two kinds of requests in turn: for some seconds the one, then for as many seconds the other.
    Poisson.
    """

    engines: int
    phases: Sequence[tuple[int, int, float]] = PHASES
    counts: Sequence[int] = PHASE_REQUESTS
    random = True

    def calls(self, rate: float, requests: int, seed: int) -> Iterator[Call]:
        """Return the requests of a seed, in the order in which they are due. `rate`: per second, on
        average.
        """
        chance = random.Random(f"{seed}:alternate")
        cycle = [
            kind
            for kind, count in zip(self.phases, self.counts, strict=True)
            for _ in range(count * self.engines)
        ]
        mean = sum(gap for _, _, gap in cycle) / len(cycle)
        now = 0.0
        for number, (prompt, output, gap) in zip(
            range(requests), itertools.cycle(cycle), strict=False
        ):
            now += chance.expovariate(1.0) * gap / mean / rate
            yield Call(number, now, prompt, output)


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """Half chats and half documents, by chance. Poisson."""

    random = True

    def calls(self, rate: float, requests: int, seed: int) -> Iterator[Call]:
        """Return the requests of a seed, in the order in which they are due. `rate`: per second."""
        chance, now = random.Random(f"{seed}:mix"), 0.0
        for number in range(requests):
            now += chance.expovariate(rate)
            prompt = chance.randint(*(DOCUMENTS if chance.random() < 0.5 else CHATS))
            yield Call(number, now, prompt, MIX_OUTPUT)


def main() -> None:
    """Run the cells that are not in the results yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("decide.json"))
    parser.add_argument("--trace", type=Path)
    parser.add_argument(
        "--cells", nargs="*", metavar='"N LOAD SLO"', help="such as '4 4000/128 A' (default: all)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chunks", action="store_true", help="auto with all chunk sizes")
    parser.add_argument(
        "--again", action="store_true", help="run auto again; the static arrangements are kept"
    )
    parser.add_argument(
        "--held-out", type=int, metavar="SEED", help="also with seeds from this one on"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a heat map: .png or .svg")
    parser.add_argument("--show", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    others = [slo for slo in SLOS if slo not in OF_MIX]
    names = arguments.cells or [
        f"{n} {one} {slo}"
        for n in SIZES
        for one in (*LOADS, "mix")
        for slo in (OF_MIX if one == "mix" else others)
    ]
    for name in () if arguments.show else names:
        _, what, _ = name.split()
        if what == "trace" and arguments.trace is None:
            continue
        cell = _Cell(name, arguments)
        found = results.setdefault(name, {})
        began = time.process_time()
        if "static" not in found:
            found |= cell.static()
            _write(arguments.results, results)
        if "auto" not in found or arguments.again or (arguments.chunks and len(found["auto"]) == 1):
            found |= cell.auto(found)
            _write(arguments.results, results)
            print(f"{line(name, found)}   {time.process_time() - began:5.0f} s", flush=True)
        if (
            arguments.held_out is not None
            and found.get("held_out", {}).get("seed") != arguments.held_out
        ):
            found["held_out"] = _Cell(name, arguments, arguments.held_out).held_out(found)
            _write(arguments.results, results)
            print(f"{name:18} held out: {found['held_out']['ratio']:6.3f}", flush=True)
    print(table(results))
    if arguments.plot is not None:
        plot(results, SIZES, LOADS, others, arguments.plot)


def _write(path: Path, results: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1))
    part.replace(path)


class _Cell:
    def __init__(self, name: str, arguments: argparse.Namespace, seed: int = 0) -> None:
        """Make a cell. `seed`: the first one."""
        size, what, slo = name.split()
        self.engines, self.slo, self.seed = int(size), slo, seed
        self.seeds, self.all_chunks = arguments.seeds, arguments.chunks
        limits, share = SLOS[slo]
        profile = load(PROFILE)
        limit = parse_slo(limits)
        self.question = Question(
            demand=_demand(what, self.engines, arguments),
            slo=limit,
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
        placements = {f"busy {legs}": _hybrid(legs=legs) for legs in BUSY}
        placements |= {f"short {tokens}": _hybrid(tokens=tokens) for tokens in SHORT}
        self.prober = CapacitySearch(self.question, work_of(self.question), placements)
        requests = {
            "trace": TRACE_REQUESTS[self.engines],
            "alternate": CYCLES * sum(PHASE_REQUESTS) * self.engines,
            "steps": CYCLES * sum(STEP_REQUESTS) * self.engines,
        }.get(what)
        _, long = levels(self.question, self.engines, requests, self.seeds)
        self.one = Level(long.requests, 1, STEP, seed)
        self.all = Level(long.requests, self.seeds, 1, seed)
        self.varies = what in ("trace", "alternate", "mix")

    def static(self) -> dict[str, Any]:
        """Search the static arrangements with one seed, run the best ones with all."""
        planned: Result = search(self.question, self.engines, requests=self.one.requests, seeds=1)
        assert planned.static is not None
        plan = planned.static.arrangement
        known = {
            one.arrangement: one.place
            for one in planned.found
            if one.exact and one.arrangement.kind in STATIC
        }
        guess = planned.static.place
        policy = self.question.policies[0]
        for chunk in CHUNKS:
            self._try(plain(self.engines, chunk, policy), known, guess)
        splits = [one.arrangement for one in planned.found if one.arrangement.prefill]
        best_split = splits[0]
        for prefill in RATIOS[self.engines]:
            self._try(
                msgspec.structs.replace(best_split, prefill=prefill, decode=self.engines - prefill),
                known,
                guess,
            )
        ratios = sorted(
            {best_split.prefill, *RATIOS[4]}
            if self.engines == 4
            else {max(best_split.prefill - less, 1) for less in (0, 1, 2, 4)}
        )
        rules = [f"busy {legs}" for legs in BUSY] + (
            [f"short {tokens}" for tokens in SHORT] if self.varies else []
        )
        for prefill, rule in itertools.product(ratios, rules):
            one = msgspec.structs.replace(
                best_split, prefill=prefill, decode=self.engines - prefill, policy=rule
            )
            self._try(one, known, guess)
        ranked = sorted(
            (one for one in known if known[one] is not None), key=lambda one: -(known[one] or 0)
        )
        sure: dict[Arrangement, int] = {}
        for one in ranked[:3]:
            if not sure or self.prober.passes(one, self.all, max(sure.values()) + 1):
                sure[one] = self.prober.capacity(one, self.all, known[one]) or 0
        best = max(sure, key=lambda one: sure[one])
        return {
            "static": {_key(one): _rate(known[one]) for one in known},
            "best": {
                "name": _key(best),
                "rate": _rate(sure[best]),
                "arrangement": msgspec.to_builtins(best),
            },
            "plan": {"name": plan.name, "chunk": plan.prefill_chunk or plan.chunk},
        }

    def _try(
        self, one: Arrangement, known: dict[Arrangement, int | None], guess: int | None
    ) -> None:
        if one not in known:
            high = place_of(bound(one, self.prober.work))
            near = None if guess is None else min(guess, high)
            known[one] = self.prober.capacity(one, self.one, near)

    def auto(self, found: dict[str, Any]) -> dict[str, Any]:
        """Run `auto` with all seeds."""
        planned = found["plan"]["chunk"]
        chunks = CHUNKS if self.all_chunks else (planned,)
        guess = place_of(found["best"]["rate"])
        rates = {}
        for chunk in chunks:
            one = Arrangement(any=self.engines, chunk=chunk, policy="auto")
            rates[str(chunk)] = _rate(self.prober.capacity(one, self.all, guess))
        return {"auto": rates, "ratio": rates[str(planned)] / found["best"]["rate"]}

    def held_out(self, found: dict[str, Any]) -> dict[str, Any]:
        """Run the best static arrangement and `auto`, with the chunk size of the plan."""
        best = msgspec.convert(found["best"]["arrangement"], Arrangement)
        ours = Arrangement(any=self.engines, chunk=found["plan"]["chunk"], policy="auto")
        guess = place_of(found["best"]["rate"])
        static, auto = (_rate(self.prober.capacity(one, self.all, guess)) for one in (best, ours))
        return {"seed": self.seed, "static": static, "auto": auto, "ratio": auto / static}


def _hybrid(*, legs: int | None = None, tokens: int = 0) -> MakePlacement:
    return lambda _: Hybrid(legs=legs, tokens=tokens)


def _demand(what: str, engines: int, arguments: argparse.Namespace) -> Drawn | Traced:
    if what == "alternate":
        return cast("Drawn", Alternating(engines=engines))  # it has what a demand needs
    if what == "steps":
        return cast("Drawn", Alternating(engines=engines, phases=STEPS, counts=STEP_REQUESTS))
    if what == "mix":
        return cast("Drawn", Mix())
    if what == "trace":
        entries = [
            one
            for one in spread(read_trace(arguments.trace))
            if one.input_tokens + one.output_tokens <= LONGEST
        ]
        return Traced(entries=entries)
    inputs, outputs = LENGTHS[what]
    return Drawn(inputs=Lengths(inputs, inputs), outputs=Lengths(outputs, outputs))


def _rate(place: int | None) -> float:
    return 0.0 if place is None else rate_at(place)


def _key(one: Arrangement) -> str:
    rule = "" if one.policy == "least_load" else f", {one.policy}"
    return f"{one.name} {one.chunks}{rule}"


if __name__ == "__main__":
    main()
