"""Several proxies in front of one fleet, simulated: how evenly engines are loaded, how long
requests wait, what caches give.

Usage: replicas.py [--cases "least_load, plain" ...] [--replicas 1 2 4 8] [--engines 64] [--seconds
60] [--scrape 5]
                   [--seeds 3] [--json FILE]

Plain engines (profile h200-8b, chunks of 2048) get about half of what they can serve. A balancer
gives each request to a proxy by chance, or by a hash of its conversation. `alone`: proxies that
don't know of each other. `told`: proxies with `replicas.count`, which read the engines' reports
each `--scrape` seconds. One proxy is also shown with reports (`replicas.count` 2), which tell it of
what others send. Of some seeds, the medians are shown.

Cases are a policy and a load. `plain`: prompts of 500 to 3500 tokens with nothing in common,
answers of 32 to 480. `others`: the same, but a seventh of them comes to 8 of the engines past all
proxies. `turns`: conversations. `events`: proxies know exactly what is in caches; `routing`: only
what they have sent there themselves. `sticky`: the balancer hashes the conversation.

Imbalance: the largest number of requests of an engine divided by the mean one, each quarter of a
second, on average.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median

from pdproxy.engine_model.profile import load
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.slo import Slo
from pdproxy_lab.simulate.cluster import Call
from pdproxy_lab.simulate.placements import auto
from pdproxy_lab.simulate.replicas import Replicas, ReplicatedCluster
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import summarise

UNIT = 512
DIRECT = 8
"""Engines that others' clients use."""
SLO = Slo(ttft=2.0, tpot=0.03)
Loads = Callable[[int, float, float], Iterator[Call]]


def plain(seed: int, rate: float, seconds: float) -> Iterator[Call]:
    """Return requests that have nothing in common. `rate`: per second. Poisson."""
    chance = random.Random(f"{seed}:plain")
    now, number = 0.0, 0
    while (now := now + chance.expovariate(rate)) < seconds:
        yield Call(number, now, chance.randrange(500, 3500), chance.randrange(32, 480))
        number += 1


def turns(seed: int, rate: float, seconds: float) -> Iterator[Call]:
    """Return the turns of conversations, `rate` per second: 2 to 8, each with 300 to 1500 new
    tokens, 4.5 to 12.5 s apart.

    A third of them begins with one of 16 system prompts of 2048 tokens. They began a minute before
    the run.
    """
    chance = random.Random(f"{seed}:turns")
    found: list[tuple[float, int, int, list[int], str]] = []
    now, number, key = -60.0, 0, 1_000_000
    while (now := now + chance.expovariate(rate / 5)) < seconds:
        number += 1
        keys: list[int] = []
        tokens = 0
        if chance.random() < 1 / 3:
            system = chance.randrange(16)
            keys = [system * 100 + place for place in range(4)]
            tokens = 4 * UNIT
        at = now
        for _ in range(chance.randrange(2, 9)):
            tokens += chance.randrange(300, 1500)
            while len(keys) < tokens // UNIT:
                key += 1
                keys.append(key)
            answer = chance.randrange(32, 480)
            if 0 <= at < seconds:
                found.append((at, tokens, answer, list(keys), str(number)))
            tokens += answer
            at += chance.uniform(4.5, 12.5)
    found.sort(key=lambda one: one[0])
    for place, (at, prompt, answer, own, session) in enumerate(found):
        yield Call(place, at, prompt, answer, own, session)


LOADS: dict[str, tuple[Loads, float]] = {
    "plain": (plain, 5.0),
    "others": (plain, 4.0),
    "turns": (turns, 2.0),
}
"""With requests per second and engine."""
CASES = (
    *(
        "least_load, plain",
        "power_of_two, plain",
        "auto, plain",
        "least_load, others",
        "power_of_two, others",
    ),
    *(
        "session, turns",
        "session, turns, sticky",
        "prefix, turns, events",
        "prefix, turns, routing",
    ),
    "prefix, turns, routing, sticky",
)


def one(
    case: str, count: int, told: int, seed: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return what one run amounts to. `told`: as how many proxies each of the `count` chooses."""
    policy, what, *more = case.split(", ")
    profile = load("h200-8b")
    shape = Shape(
        max_num_batched_tokens=2048,
        kv_tokens=profile.engine.num_gpu_blocks * profile.engine.block_size,
        max_num_seqs=profile.engine.max_num_seqs,
        block_size=profile.engine.block_size,
    )
    decides = policy == "auto"
    cluster = ReplicatedCluster(
        Fleet(any=arguments.engines) if decides else Fleet(aggregated=arguments.engines),
        profile.hardware,
        dict.fromkeys(Role, shape),
        {} if decides else {Role.AGGREGATED: policy},
        auto(SLO, replicas=None if told == 1 else told) if decides else None,
        replicas=Replicas(
            count=count,
            told=told,
            scrape_s=arguments.scrape,
            by_session="sticky" in more,
            events="routing" not in more,
            direct=1 / 7 if what == "others" else 0.0,
            direct_to=DIRECT,
        ),
        seed=seed,
    )
    calls, rate = LOADS[what]
    cluster.run(calls(seed, rate * arguments.engines, arguments.seconds))
    summary = summarise(cluster, ())
    samples = cluster.samples[len(cluster.samples) // 4 :]
    use = summary.roles["any" if decides else "aggregated"]
    assert summary.ttft is not None
    assert summary.tpot is not None
    ttft, tpot = summary.ttft.percentiles, summary.tpot.percentiles
    return {
        "imbalance": fmean(most / mean for most, mean in samples if mean),
        "mean": fmean(mean for _, mean in samples),
        "ttft_p50_ms": (ttft[50] or 0.0) * 1e3,
        "ttft_p99_ms": (ttft[99] or 0.0) * 1e3,
        "tpot_p99_ms": (tpot[99] or 0.0) * 1e3,
        "cached_percent": 100 * use.cached_tokens / max(use.cached_tokens + use.prompt_tokens, 1),
    }


def main() -> None:
    """Print a table, a line for each number of proxies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--scrape", type=float, default=5.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for case in arguments.cases:
        print(
            f"\n{case}\n  proxies         imbalance  TTFT ms p50   p99  TPOT ms p99  prompt "
            f"tokens from the cache, %"
        )
        for count in arguments.replicas:
            for name, told in (("alone", 1), ("told", max(count, 2))):
                runs = [one(case, count, told, seed, arguments) for seed in range(arguments.seeds)]
                found = {key: median(run[key] for run in runs) for key in runs[0]}
                results.append({"case": case, "replicas": count, "told": told, "runs": runs})
                print(
                    f"  {count:7} {name:6}  {found['imbalance']:9.2f}  "
                    f"{found['ttft_p50_ms']:11.0f} {found['ttft_p99_ms']:5.0f}"
                    f"  {found['tpot_p99_ms']:11.1f}  {found['cached_percent']:31.1f}",
                    flush=True,
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
