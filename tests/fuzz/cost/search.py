"""The search itself: hill climbing over recipes, path by path, and the judgement of what it finds.

    python -m tests.fuzz.run cost --minutes 60
    python -m tests.fuzz.run cost --replay tests/fuzz/findings/cost-....json

Inputs are tried at 64 KiB; those that cost more than others of their path are kept, and tried at 1
MiB and 4 MiB, where a cost that grows faster than its input shows. What is over a bound of `bounds`
is a finding. The search runs in a child process that is limited in memory, and that the operating
system ends if one input takes it too long: both are findings, too.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Any

from tests.fuzz.cost.bounds import KIB, MIB
from tests.fuzz.cost.measure import Cost, measured, speed
from tests.fuzz.cost.paths import PATHS, Path
from tests.fuzz.cost.recipes import Recipe, mutated

SIZES = (64 * KIB, MIB, 4 * MIB)
GROWTH = 3.0
"""Times that a byte may cost more in the largest input than in the smallest. Caches account for
two.
"""
TOO_SHORT = 0.005
"""Seconds. A turn that takes no longer is no proof of growth: what it is compared with is noise."""
KEPT = 12
"""Recipes of a path from which the search goes on."""
SUSPECT = 0.5
"""Part of a bound from which an input is tried at larger sizes."""
PATIENCE = 30
"""Seconds that one measurement may take before its process is ended."""
MEMORY = 4 << 30
MAX_DEATHS = 10


@dataclass(frozen=True)
class Finding:
    """An input that costs too much: what of it, how much, and how much it may."""

    path: str
    measure: str
    size: int
    value: float
    bound: float
    recipe: Recipe
    why: str = ""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.measure} {self.value:.4g}, bound {self.bound:.4g}, at "
            f"{self.size} bytes: {self.recipe}"
        )

    def save(self, folder: File) -> File:
        """Write it down, to be replayed."""
        key = f"{self.path} {self.measure} {self.recipe.shape}"
        name = (
            f"cost-{_slug(self.path)}-{_slug(self.measure)}-"
            f"{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"
        )
        found = {
            "path": self.path, "measure": self.measure, "size": self.size, "value": self.value,
            "bound": self.bound,
            "why": self.why, "recipe": self.recipe.as_json(),
        }  # fmt: skip
        (folder / name).write_text(json.dumps(found, indent=1) + "\n")
        return folder / name


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text)


def judged(path: Path, one: Recipe, costs: list[Cost], slower: float) -> list[Finding]:
    """Return what is over a bound. `slower`: the machine, against the nominal one."""
    bound, found = path.bound, []

    def check(cost: Cost, measure: str, value: float, most: float) -> None:
        if value > most:
            found.append(Finding(path.name, measure, cost.size, value, most, one, bound.why))

    for cost in costs:
        check(cost, "ns per byte", cost.ns, bound.ns * slower)
        check(cost, "ms per turn", 1000 * cost.longest, bound.ms * slower)
        check(cost, "memory per byte", (cost.peak - bound.free) / cost.size, bound.memory)
        check(cost, "bytes written", cost.made, bound.made)
    first, last = costs[0], costs[-1]
    if last.size > 4 * first.size and last.longest > TOO_SHORT:
        check(last, "growth of ns per byte", last.ns / max(first.ns, 0.1), GROWTH)
    return found


def score(path: Path, cost: Cost, slower: float) -> float:
    """Return the part of its bound that an input of the smallest size costs, of whatever is
    worst.
    """
    return max(
        cost.ns / path.bound.ns / slower,
        cost.bytes / path.bound.memory / 10,
        cost.made / path.bound.made,
    )


@dataclass
class Pool:
    """The worst recipes of a path so far, one of each shape."""

    best: dict[str, tuple[float, Recipe]] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)

    def takes(self, points: float, one: Recipe) -> bool:
        """Take a recipe if it is worse than the least bad one, or than the one of its shape."""
        known = self.best.get(one.shape)
        if known is not None:
            better = points > 1.1 * known[0]
        else:
            better = len(self.best) < KEPT or points > min(kept for kept, _ in self.best.values())
        if better:
            self.best[one.shape] = points, one
            if len(self.best) > KEPT:
                del self.best[min(self.best, key=lambda shape: self.best[shape][0])]
        return better


class Search:
    """One process's search. Writes down what it is about to do, in case it does not come back."""

    def __init__(
        self, paths: list[Path], folder: File, findings: File, chance: random.Random
    ) -> None:
        self.paths = paths
        self.folder = folder
        self.findings = findings
        self.chance = chance
        self.slower = speed()
        self.pools = {path.name: Pool() for path in paths}
        self.found: dict[tuple[str, str, str], Finding] = {}
        self.worst: dict[tuple[str, str], Finding] = {}
        """Of each path and measure, within its bound or not, as it was measured the last time at
        its size.
        """
        self.runs = 0

    def run(self, seconds: float) -> None:
        """Try what is known, then change it until the time is up."""
        end = time.monotonic() + seconds
        seeds = [(path, one) for path in self.paths for one in path.grammar.seeds]
        self.chance.shuffle(seeds)
        for path, one in seeds:
            if time.monotonic() < end:
                self.attempt(path, one)
        while time.monotonic() < end:
            path = self.chance.choice(self.paths)
            kept = [one for _, one in self.pools[path.name].best.values()]
            parent = self.chance.choice(
                kept if kept and self.chance.random() < 0.7 else path.grammar.seeds
            )
            self.attempt(path, mutated(parent, path.grammar, self.chance))

    def attempt(self, path: Path, one: Recipe) -> None:
        """Try a recipe, keep it if it is bad, look closer if it is very bad."""
        pool = self.pools[path.name]
        if str(one) in pool.tried:
            return
        pool.tried.add(str(one))
        cost = self.cost(path, one, SIZES[0], times=1)
        if cost is None:
            return
        points = score(path, cost, self.slower)
        if not pool.takes(points, one):
            return
        cost = self.cost(path, one, SIZES[0], times=3)
        # Everything that is kept is tried once at 1 MiB: what grows too fast may be cheap when it
        # is small.
        if cost is not None:
            self.scale(path, one, cost)

    def scale(self, path: Path, one: Recipe, first: Cost) -> None:
        """Try a recipe at larger sizes, as long as these can be expected to end, and judge it by
        the best of five runs.
        """
        costs = [first]
        for size in SIZES[1:]:
            size = min(size, path.most)
            worst = costs[-1].seconds * (size / costs[-1].size) ** 2
            suspicious = (
                size <= MIB
                or score(path, costs[-1], self.slower) > SUSPECT
                or bool(judged(path, one, costs, self.slower))
            )
            if size <= costs[-1].size * 1.5 or worst > PATIENCE / 3 or not suspicious:
                break
            # Tracing is slow, and memory that is within its bound at 1 MiB hardly leaves it above.
            cost = self.cost(path, one, size, times=1, memory=size <= MIB)
            if cost is None:
                return
            costs.append(cost)
        if not judged(path, one, costs, self.slower):
            return
        sure = []
        for size, cost in zip(SIZES, costs, strict=False):
            again = self.cost(
                path, one, size, times=4 if cost.seconds < 0.3 else 1, best=True, memory=False
            )
            if again is not None:
                best = replace(
                    cost,
                    seconds=min(cost.seconds, again.seconds),
                    longest=min(cost.longest, again.longest),
                )
                sure.append(best)
        self.note(judged(path, one, sure, self.slower))

    def cost(
        self,
        path: Path,
        one: Recipe,
        size: int,
        times: int,
        *,
        best: bool = False,
        memory: bool = True,
    ) -> Cost | None:
        """Measure; None if the path could not be walked to its end, which is a finding."""
        data = one.render(min(size, path.most))
        if not size / 8 < len(data) < 2 * size + KIB:
            return None
        doing = {"path": path.name, "size": len(data), "recipe": one.as_json()}
        (self.folder / "doing.json").write_text(json.dumps(doing))
        signal.setitimer(
            signal.ITIMER_REAL, PATIENCE
        )  # without a handler: C code that does not return can't hear one
        self.runs += 1
        try:
            cost = measured(path.run, data, times, best=best, memory=memory)
        except (Exception, RecursionError) as error:
            self.note(
                [
                    Finding(
                        path.name,
                        f"raised {type(error).__name__}",
                        len(data),
                        1,
                        0,
                        one,
                        str(error)[:200],
                    )
                ]
            )
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if times > 1 or size > SIZES[0]:
            self.compare(path, one, cost)
        return cost

    def compare(self, path: Path, one: Recipe, cost: Cost) -> None:
        """Keep what is worse than all before. One short run is no proof: on a busy machine it is
        slow now and then.
        """
        bound = path.bound
        for measure, value, most in (
            ("ns per byte", cost.ns, bound.ns * self.slower),
            ("ms per turn", 1000 * cost.longest, bound.ms * self.slower),
            ("memory per byte", max(0.0, cost.peak - bound.free) / cost.size, bound.memory),
        ):
            key = path.name, measure
            if key not in self.worst or value > self.worst[key].value:
                self.worst[key] = Finding(path.name, measure, cost.size, value, most, one)

    def table(self) -> str:
        """Return the worst of each path and measure."""
        rows = [
            f"| {one.path} | {one.measure} | {one.value:.3g} | {one.bound:.3g} | {one.size} | "
            f"{one.recipe.shape[:90]!r} |"
            for _, one in sorted(self.worst.items())
        ]
        return "\n".join(
            ["| path | measure | worst | bound | at bytes | what grows |", "|---" * 6 + "|", *rows]
        )

    def note(self, findings: list[Finding]) -> None:
        """Keep the worst finding of each path, measure and shape."""
        for one in findings:
            key = one.path, one.measure, one.recipe.shape
            if key not in self.found or one.value > 1.2 * self.found[key].value:
                if key not in self.found:
                    print(f"[{self.runs} runs] {one}", flush=True)
                self.found[key] = one
                one.save(self.findings)


def replay(files: list[File]) -> int:
    """Measure findings again, each at its size and the ones below; return how many are still over a
    bound.
    """
    slower, still = speed(), 0
    for file in files:
        saved = json.loads(file.read_text())
        path = next(path for path in PATHS if path.name == saved["path"])
        one = Recipe.of_json(saved["recipe"])
        sizes = sorted({min(size, saved["size"]) for size in SIZES})
        costs = [measured(path.run, one.render(size), 3, best=True) for size in sizes]
        for cost in costs:
            print(f"{path.name}, {cost.size} bytes: {cost.ns:.2f} ns and {cost.bytes:.2f} bytes "
                f"per byte, "
                  f"{1000 * cost.longest:.2f} ms per turn, {cost.made} bytes written")  # fmt: skip
        findings = judged(path, one, costs, slower)
        still += bool(findings)
        print("\n".join(f"  {one}" for one in findings) or "  within all bounds")
    return still


def check(data: bytes) -> None:
    """Assert that a saved finding, from tests/fuzz/corpus/cost, keeps the bounds that need no
    clock.
    """
    from tests.fuzz.cost.counts import over

    saved = json.loads(data)
    path = next(path for path in PATHS if path.name == saved["path"])
    assert over(path, Recipe.of_json(saved["recipe"])) is None


def _inside(given: argparse.Namespace, findings: File) -> int:
    """Be the child process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import logging

    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    search = Search(_chosen(given.paths), given.inside, findings, random.Random(given.seed))
    search.run(given.minutes * 60)
    print(search.table())
    print(
        f"{search.runs} runs, this machine {search.slower:.2f} times slower than the nominal one",
        flush=True,
    )
    return bool(search.found)


def _chosen(names: str | None) -> list[Path]:
    found = [
        path
        for path in PATHS
        if names is None or any(name in path.name for name in names.split(","))
    ]
    if not found:
        raise SystemExit(f"no such path; there are: {', '.join(path.name for path in PATHS)}")
    return found


def _died(folder: File, findings: File, code: int) -> None:
    doing: dict[str, Any] = json.loads((folder / "doing.json").read_text())
    words = f"took over {PATIENCE} s" if code == -signal.SIGALRM else f"ended its process ({code})"
    one = Finding(doing["path"], words, doing["size"], 1, 0, Recipe.of_json(doing["recipe"]))
    print(one, flush=True)
    one.save(findings)


def main(arguments: list[str], findings: File) -> int:
    """Search for so many minutes in child processes; return 1 if something was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run cost", description="Search for inputs that cost too much."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--paths",
        help=f"parts of names, with commas between: {', '.join(path.name for path in PATHS)}",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--replay", type=File, nargs="+", metavar="FILE", help="measure findings again"
    )
    parser.add_argument("--inside", type=File, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    findings.mkdir(exist_ok=True)
    if given.replay:
        return int(replay(given.replay) > 0)
    if given.inside is not None:
        return _inside(given, findings)
    _chosen(given.paths)
    end, seed, found, deaths = time.monotonic() + 60 * given.minutes, given.seed, False, 0
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        while (left := end - time.monotonic()) > 1 and deaths < MAX_DEATHS:
            command = [
                sys.executable,
                "-m",
                "tests.fuzz.run",
                "cost",
                "--inside",
                folder,
                "--minutes",
                f"{left / 60}",
            ]
            command += [
                "--seed",
                str(seed + deaths),
                *(["--paths", given.paths] if given.paths else []),
            ]
            code = subprocess.run(command, check=False).returncode
            if code in (0, 1):
                found = found or code == 1
                break
            deaths, found = deaths + 1, True
            if not (File(folder) / "doing.json").exists():
                return 2
            _died(File(folder), findings, code)
    print(
        f"found something: see {findings}"
        if found
        else f"cost: nothing found in {given.minutes:g} minutes"
    )
    return int(found)
