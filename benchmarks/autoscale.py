"""Autoscaling in virtual time: how many requests of a day are served within the SLO, and for how
many GPU hours, beside an oracle that knows the day.

Usage: autoscale.py [--trace FILE] [--fleet split any] [--hours 24] [--rate 3] [--seed 0]

The load: prompts and answers as long as those of a trace of conversations (without a file: made
up), in its order, again and again. Their rate follows a day of public traces of LLM services: low
at night, a peak before and one after noon, less in the evening (`DAY`), and `BURSTS` that come
without warning. `--rate`: requests per second at the peak. With fewer `--hours` the same day is
shorter.

The engines: the model of `pdproxy simulate`, profile h200-8b at a fourth of its speed, as a model
of some 30B parameters has. One is ready `load_s` after it was asked for. One that is to end gets no
more requests, and ends once it has none. Both take GPU time.

The operator: each 15 s `pdproxy_operator.scaling.decide` with the demand that pdproxy's ledger
measures (`scheduling.wanted_engines`), as the proxies' pages have it.

The oracle: it knows the demand of each 5 minutes, as it is where no request waits, and starts
engines ahead, so that they are ready when these begin. It keeps those that it would start again
before they have ended. For each role it has engines for a part of the demand: the smallest parts,
in steps of a tenth, with which the simulated day has 95 percent of its requests within the SLO.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from pdproxy.engine_model.hardware import Hardware
from pdproxy.engine_model.profile import load
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.ledger import LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Role
from pdproxy.scheduling.slo import Slo
from pdproxy.scheduling.wanted_engines import MEMORY_S, EngineSize, WantedEngines
from pdproxy_lab.bench.slo import BenchSlo
from pdproxy_lab.bench.trace import read_trace
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.placements import auto
from pdproxy_lab.simulate.records import RequestTimes
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import kept
from pdproxy_operator.resources import Autoscaling, ScalingState
from pdproxy_operator.scaling import Scaled, decide

DAY: tuple[float, ...] = (0.5, 0.42, 0.36, 0.33, 0.33, 0.36, 0.45, 0.6, 0.8, 0.95, 1.0, 0.97)
DAY += (0.88, 0.9, 0.97, 1.0, 0.96, 0.88, 0.78, 0.72, 0.7, 0.68, 0.63, 0.57)
"""The rate at each hour, by the peak's."""
BURSTS = ((2.3, 8, 1.5), (9.2, 6, 1.25), (13.6, 5, 1.3), (16.4, 8, 1.2), (20.7, 6, 1.3))
"""Hour, minutes, times the rate."""
LOOK_S = 15.0
SHARE = 0.95
PLENTY = 5
"""Times the engines of the start: so many wait for nothing."""
STEP = 0.1
"""Between the parts of the demand that the oracle tries."""
SPLIT = BenchSlo(name="split", ttft=20.0, tpot=0.100)
ANY = BenchSlo(name="any", ttft=20.0, tpot=0.200)
"""Prompts that are prefilled in the same steps make streams slower, however many engines there
are.
"""
Lengths = Sequence[tuple[int, int]]
Counts = dict[Role, int]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is served, by what."""

    lengths: Lengths
    hours: float = 24.0
    rate: float = 3.0
    seed: int = 0
    hardware: Hardware
    shape: Shape
    slo: BenchSlo = SPLIT
    load_s: float = 240.0
    """From when an engine is asked for until it serves."""
    window_s: float = 300.0
    """Of the oracle's windows."""
    bursts: tuple[tuple[float, float, float], ...] = BURSTS
    roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return 3600.0 * self.hours

    def rate_at(self, now: float) -> float:
        """Return the rate in requests per second."""
        hour = 24.0 * now / self.seconds
        place = int(hour)
        part = hour - place
        level = DAY[place % 24] * (1 - part) + DAY[(place + 1) % 24] * part
        for begins, minutes, times in self.bursts:
            if 0 <= hour - begins < minutes / 60:
                level *= times
        return self.rate * level

    def calls(self) -> Iterator[Call]:
        """Return the requests of the day, in the order in which they are due."""
        chance, now, number = random.Random(f"{self.seed}:day"), 0.0, 0
        most = 2.0 * self.rate
        while (now := now + chance.expovariate(most)) < self.seconds:
            if chance.random() * most < self.rate_at(now):
                prompt, output = self.lengths[number % len(self.lengths)]
                yield Call(number, now, prompt, output)
                number += 1


# -- engines that come and go


class ScaledCluster(Cluster):
    """A `Cluster` whose engines come and go. Run once.

    `wanted`: by role, given the time; asked each `LOOK_S`, for as long as requests come.
    """

    def __init__(
        self, scene: Scene, start: Counts, choose: Callable[[ScaledCluster, float], Counts]
    ) -> None:
        self.scene = scene
        self.slo = Slo(scene.slo.ttft, scene.slo.tpot)
        size = EngineSize(
            times=WorkTimes(scene.hardware, scene.shape.max_num_batched_tokens),
            max_num_seqs=scene.shape.max_num_seqs,
            kv_tokens=scene.shape.kv_tokens,
        )
        self.demand = WantedEngines(lambda _: size, self.slo)
        super().__init__(
            Fleet(**{role.value: count for role, count in start.items()}),
            scene.hardware,
            dict.fromkeys(Role, scene.shape),
            dict.fromkeys(scene.roles, "least_load"),
            auto(self.slo) if Role.ANY in scene.roles else None,
        )
        self._choose = choose
        self.since = {spec.url: 0.0 for spec in self.specs}
        self.ready = {spec.url: spec.role for spec in self.specs}
        self.starting: dict[str, Role] = {}
        self.ending: dict[str, Role] = {}
        self.gpu_s = 0.0
        self.changes = 0
        self.most = sum(start.values())
        self.course: list[tuple[float, Counts]] = []
        self._at(LOOK_S, self._look, None)

    def ledger_options(self, **more: object) -> LedgerOptions:
        """See `Cluster`."""
        return replace(super().ledger_options(**more), wanted=self.demand)  # type: ignore[arg-type]

    def there(self, which: Mapping[str, Role], role: Role) -> list[str]:
        """Return the engines of a role that are ready, that start, or that end."""
        return [url for url, one in which.items() if one is role]

    def _look(self, _: None, now: float) -> None:
        if now >= self.scene.seconds:
            for url in (*self.ready, *self.starting, *self.ending):
                self.gpu_s += now - self.since[url]
            return
        for url in [one for one in self.ending if not self._requests(one)]:
            del self.ending[url]
            self.ledger.remove(url)
            self.gpu_s += now - self.since[url]
        for role, count in self._choose(self, now).items():
            self._scale(role, count, now)
        counts = {role: len(self.there(self.ready, role)) for role in self.scene.roles}
        self.course.append((now, counts))
        self._at(now + LOOK_S, self._look, None)

    def _requests(self, url: str) -> int:
        """Return the requests of an engine, as the ledger or the engine counts them."""
        known = self.ledger.get(url)
        return max(0 if known is None else known.requests, self.engines[url].requests)

    def _scale(self, role: Role, count: int, now: float) -> None:
        ready, starting = self.there(self.ready, role), self.there(self.starting, role)
        self.changes += count != len(ready) + len(starting)
        for _ in range(count - len(ready) - len(starting)):
            url = f"{role.value}-{len(self.since)}"
            self.since[url], self.starting[url] = now, role
            self._at(now + self.scene.load_s, self._joins, url)
        for _ in range(len(ready) + len(starting) - count):
            if starting:
                url = starting.pop()
                del self.starting[url]
                self.gpu_s += now - self.since[url]
                continue
            url = min(ready, key=self._requests)
            ready.remove(url)
            self.ending[url] = self.ready.pop(url)
            self.ledger.mark_draining(url, "it is to end")

    def _joins(self, url: str, now: float) -> None:
        role = self.starting.pop(url, None)
        if role is not None:
            self.ready[url] = role
            self.join(EngineSpec(url, role))


def attained(scene: Scene, records: RequestTimes, since: float = 0.0) -> tuple[int, int]:
    """Return how many requests that were due from `since` on were served within the SLO, and how
    many there were.
    """
    numbers = [number for number in range(len(records)) if records.due[number] >= since]
    good = sum(
        not math.isnan(records.last[number]) and kept(scene.slo, records, number)
        for number in numbers
    )
    return good, len(numbers)


# -- the operator


@dataclass
class Operator:
    """Decides as the operator does."""

    scene: Scene
    gpus: int | None = None
    down_s: int = 600
    replicas: Counts = field(default_factory=dict)
    states: dict[Role, ScalingState | None] = field(default_factory=dict)

    def __call__(self, cluster: ScaledCluster, now: float) -> Counts:
        """Return the engines that each role should have."""
        needed = cluster.demand.needed(now)
        scaled = []
        for role in self.scene.roles:
            ready = len(cluster.there(cluster.ready, role))
            pods = ready + len(cluster.there(cluster.starting, role))
            wanted = needed.get(role)
            scaled.append(
                Scaled(
                    runtime=role.value,
                    pool="pool",
                    role=role.value,  # type: ignore[arg-type]
                    autoscaling=Autoscaling(64, 1, self.down_s),
                    replicas=pods,
                    pods=pods,
                    ready=ready,
                    pending=0,
                    pending_s=0.0,
                    ending=len(cluster.there(cluster.ending, role)),
                    gpus=1,
                    demand=None if wanted is None else wanted.engines,
                    complete=True,
                    state=self.states.get(role),
                )
            )
        decided = decide(scaled, self.gpus, 1_800_000_000.0 + now)
        for role in self.scene.roles:
            self.states[role] = decided[role.value].state
        return {role: decided[role.value].replicas for role in self.scene.roles}


# -- the oracle

Schedule = dict[Role, list[int]]
"""Engines that are to be ready in each window."""


def demand_of(scene: Scene, start: Counts) -> dict[Role, list[float]]:
    """Return the engines that each window needs, as they are known where no request waits."""
    plenty = {role: PLENTY * count for role, count in start.items()}
    seen: dict[Role, dict[int, list[float]]] = {role: {} for role in scene.roles}

    def look(cluster: ScaledCluster, now: float) -> Counts:
        for role, wanted in cluster.demand.needed(now).items():
            # what is needed now has come within the last minute, on average
            window = int((now - MEMORY_S) // scene.window_s)
            seen[role].setdefault(window, []).append(wanted.engines)
        return plenty

    measured(scene, plenty, look)
    windows = range(math.ceil(scene.seconds / scene.window_s))
    return {
        role: [mean(there.get(window) or there[min(there)]) for window in windows]
        for role, there in seen.items()
    }


def scheduled(demand: Mapping[Role, Sequence[float]], parts: Mapping[Role, float]) -> Schedule:
    """Return engines for parts of the demand."""
    return {
        role: filled([max(math.ceil(parts[role] * one), 1) for one in needed])
        for role, needed in demand.items()
    }


def followed(scene: Scene, schedule: Schedule) -> tuple[ScaledCluster, float]:
    """Return what `measured` does for a schedule."""
    first = {role: counts[0] for role, counts in schedule.items()}
    return measured(scene, first, ahead(scene, schedule))


def oracle(scene: Scene, start: Counts) -> tuple[Schedule, dict[Role, float]]:
    """Return the schedule with the fewest GPU hours that serves the day, and its parts of the
    demand: see above.
    """
    demand = demand_of(scene, start)

    def serves(parts: Mapping[Role, float]) -> bool:
        return followed(scene, scheduled(demand, parts))[1] >= SHARE

    parts = dict.fromkeys(scene.roles, 0.8)
    while not serves(parts):
        parts = {role: part + STEP for role, part in parts.items()}
    for role in scene.roles:
        while serves(fewer := parts | {role: parts[role] - STEP}):
            parts = fewer
    return scheduled(demand, parts), parts


def filled(counts: Sequence[int]) -> list[int]:
    """Return engines with those that would be started again before they have ended."""
    return [
        max(count, min(counts[place - 1], counts[place + 1]))
        if 0 < place < len(counts) - 1
        else count
        for place, count in enumerate(counts)
    ]


def ahead(scene: Scene, schedule: Schedule) -> Callable[[ScaledCluster, float], Counts]:
    """Return what follows a schedule, and starts engines before they are needed."""

    def choose(_: ScaledCluster, now: float) -> Counts:
        counts = {}
        for role, windows in schedule.items():
            soon = [int(at // scene.window_s) for at in (now, now + scene.load_s + LOOK_S)]
            counts[role] = max(windows[min(place, len(windows) - 1)] for place in soon)
        return counts

    return choose


# -- the report


def measured(
    scene: Scene, start: Counts, choose: Callable[[ScaledCluster, float], Counts]
) -> tuple[ScaledCluster, float]:
    """Return the cluster after a day, and the part of the requests within the SLO."""
    cluster = ScaledCluster(scene, start, choose)
    good, count = attained(scene, cluster.run(scene.calls()))
    return cluster, good / count


def made_up(count: int = 12_000) -> Lengths:
    """Return lengths that are spread as those of conversations are."""
    chance = random.Random(0)
    return [
        (
            min(int(chance.lognormvariate(8.7, 1.1)) + 1, 120_000),
            min(int(chance.expovariate(1 / 340)) + 1, 2000),
        )
        for _ in range(count)
    ]


def from_trace(path: Path) -> Lengths:
    """Return the lengths of a trace's requests."""
    return [(entry.input_tokens, entry.output_tokens) for entry in read_trace(path)]


def scene_of(roles: tuple[Role, ...], lengths: Lengths, **more: Any) -> Scene:
    """Return what is served by engines of some roles."""
    profile = load("h200-8b")
    return Scene(
        lengths=lengths,
        hardware=msgspec.structs.replace(profile.hardware, speed=0.25),
        shape=Shape(kv_tokens=profile.engine.num_gpu_blocks * profile.engine.block_size),
        roles=roles,
        slo=ANY if Role.ANY in roles else SPLIT,
        **more,
    )


def shown(name: str, cluster: ScaledCluster, share: float) -> str:
    """Return a line of the report."""
    most = {role: max(counts[role] for _, counts in cluster.course) for role in cluster.scene.roles}
    least = {
        role: min(counts[role] for _, counts in cluster.course) for role in cluster.scene.roles
    }
    engines = ", ".join(
        f"{role.value} {least[role]} to {most[role]}" for role in cluster.scene.roles
    )
    return (
        f"  {name:10}  {100 * share:6.2f} %  {cluster.gpu_s / 3600:8.1f}  "
        f"{cluster.changes:8d}  {engines}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table per fleet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--fleet", nargs="+", choices=("split", "any"), default=("split", "any"))
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-oracle", action="store_true")
    given = parser.parse_args(arguments)
    lengths = from_trace(given.trace) if given.trace else made_up()
    for fleet in given.fleet:
        roles = (Role.ANY,) if fleet == "any" else (Role.PREFILL, Role.DECODE)
        scene = scene_of(roles, lengths, hours=given.hours, rate=given.rate, seed=given.seed)
        start = dict.fromkeys(roles, 4)
        began = time.process_time()
        print(f"{fleet}: {given.hours:g} hours, {given.rate:g} requests per second at the peak")
        print("              in SLO  GPU hours   changes  ready engines")
        operator, share = measured(scene, start, Operator(scene))
        print(shown("operator", operator, share), flush=True)
        if given.no_oracle:
            continue
        schedule, parts = oracle(scene, start)
        best, share = followed(scene, schedule)
        print(shown("oracle", best, share))
        of_demand = ", ".join(f"{role.value} {part:.1f}" for role, part in parts.items())
        print(f"  the oracle has engines for these parts of the demand: {of_demand}")
        print(f"  GPU hours by the oracle's: {operator.gpu_s / best.gpu_s:.3f}")
        print(f"  CPU seconds: {time.process_time() - began:.0f}", flush=True)


if __name__ == "__main__":
    main()
