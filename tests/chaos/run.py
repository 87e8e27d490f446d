"""Runs seeds, each in a process of its own, and finds the shortest schedule of one that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.chaos.child import TRACE
from tests.chaos.course import Result
from tests.chaos.finding import Finding
from tests.chaos.options import Options
from tests.chaos.schedule import Item, schedule
from tests.chaos.shrink import shrink

ROOT = Path(__file__).parents[2]
"""Where `tests` is."""
SHRINK_RUNS = 100
"""Runs at most to find the shortest schedule."""
_WALL = 1800.0
"""Seconds of a run by the wall clock. Its CPU seconds are limited as well; it waits for nothing."""
_TAIL = 500


class Shortest(msgspec.Struct, frozen=True):
    """The shortest schedule that fails as the whole one did."""

    items: list[Item]
    findings: list[Finding]
    runs: int


def run_one(options: Options, trace: str | None = None) -> Result:
    """Run one seed in a child process. `trace`: a file for its trace. A process that dies is a
    finding.
    """
    environment = {**os.environ, "PYTHONHASHSEED": "0"} | (
        {TRACE: os.path.abspath(trace)} if trace else {}
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.chaos.child"],
            input=msgspec.json.encode(options),
            capture_output=True,
            env=environment,
            cwd=ROOT,  # -m looks there first
            timeout=_WALL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result([Finding("the run ends", f"not within {_WALL:g} s")])
    try:
        return msgspec.json.decode(done.stdout, type=Result)
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace")[-_TAIL:]
        return Result([Finding("the run ends", f"exit code {done.returncode}: {said}")])


def run_all(options: Options, seeds: Sequence[int], jobs: int) -> Iterator[tuple[Options, Result]]:
    """Run seeds, so many at once, and yield each with its result, in their order."""
    yield from run_each([msgspec.structs.replace(options, seed=seed) for seed in seeds], jobs)


def run_each(runs: Sequence[Options], jobs: int) -> Iterator[tuple[Options, Result]]:
    """Run all of them, so many at once, and yield each with its result, in their order."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(runs, pool.map(run_one, runs), strict=True)


def shortest(options: Options, first: Result, say: Callable[[str], None]) -> Shortest | None:
    """Return the shortest schedule that breaks a rule that `first` broke; None if all of it, run
    again, breaks none of them.
    """
    rules = {finding.rule for finding in first.findings}
    runs = 0

    def fails(only: frozenset[int]) -> bool:
        nonlocal runs
        runs += 1
        result = run_one(msgspec.structs.replace(options, only=only))
        broken = any(finding.rule in rules for finding in result.findings)
        say(f"  run {runs}: {len(only)} items: {'fails' if broken else 'passes'}")
        return broken

    numbers = [item.number for item in schedule(options)]
    if not fails(frozenset(numbers)):
        return None
    left, _ = shrink(numbers, fails, SHRINK_RUNS)
    only = frozenset(left)
    last = run_one(msgspec.structs.replace(options, only=only))
    return Shortest(schedule(msgspec.structs.replace(options, only=only)), last.findings, runs)
