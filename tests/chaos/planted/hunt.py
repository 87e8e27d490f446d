"""Runs chaos on a copy of the package, seed by seed, until a rule is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tests.chaos.course import Result
from tests.chaos.finding import Finding
from tests.chaos.options import Options
from tests.chaos.planted.bug import Bug, copy_package
from tests.chaos.run import ROOT

_WALL = 600.0
"""Seconds of one seed by the wall clock, on a machine that does other things."""
_TAIL = 300


@dataclass(slots=True)
class Hunt:
    """What came of the seeds that were run with one bug, or with none. `caught`: the last seed
    broke a rule that the bug names.

    `others`: findings of other rules, with their seeds.
    """

    name: str
    what: str
    caught: bool = False
    seeds: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    others: list[tuple[int, Finding]] = field(default_factory=list)
    cpu: float = 0.0
    """CPU seconds of all seeds."""

    @property
    def good(self) -> bool:
        """Whether this is as it should be: the bug was caught; or there is none, and nothing was
        found.
        """
        return self.caught if self.what else not self.others

    def line(self) -> str:
        """Return a row of the table."""
        if not self.what:
            verdict = "a rule is broken" if self.others else "nothing found"
        else:
            verdict = f"seed {self.seeds[-1]}" if self.caught else "NOT CAUGHT"
        rules = "; ".join(self.rules) or "-"
        return f"| {self.name} | {verdict} | {len(self.seeds)} | {rules} | {self.cpu:.1f} |"


HEAD = "| bug | caught by | seeds | broken rules | CPU s |\n| -- | -- | -- | -- | -- |"


def hunt(name: str, bug: Bug | None, seeds: Sequence[int], options: Options) -> Hunt:
    """Run seeds on a copy of the package with a bug until it is caught; without a bug, all of them.

    Raises:
        GoneError: the bug's old text is not in the package.
        RuntimeError: a run has no result.
    """
    found = Hunt(name, "" if bug is None else bug.what)
    with TemporaryDirectory(prefix="pdproxy-planted-") as folder:
        package = copy_package(Path(folder))
        if bug is not None:
            bug.plant(package)
            options = msgspec.structs.replace(options, **bug.options)
        for seed in seeds:
            result = run_seed(package, msgspec.structs.replace(options, seed=seed))
            found.seeds.append(seed)
            found.cpu += result.cpu
            wanted = [
                one.rule for one in result.findings if bug is not None and one.rule in bug.rules
            ]
            if wanted:
                found.caught, found.rules = True, list(dict.fromkeys(wanted))
                break
            found.others += [(seed, one) for one in result.findings]
    return found


def run_seed(package: Path, options: Options) -> Result:
    """Run one seed with a copy of the package.

    Raises:
        RuntimeError: there is no result.
    """
    # the copy stands before the package
    path = os.pathsep.join(map(str, (package.parent, ROOT, ROOT / "proxy")))
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.child"],
        input=msgspec.json.encode(options),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        cwd=package.parent,  # -m looks there first
        timeout=_WALL,
        check=False,
    )
    try:
        return msgspec.json.decode(done.stdout, type=Result)
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace")[-_TAIL:]
        raise RuntimeError(
            f"seed {options.seed} ended with exit code {done.returncode}: {said}"
        ) from None


def hunts(
    bugs: Sequence[tuple[str, Bug | None, Sequence[int]]], options: Options, jobs: int
) -> Iterator[Hunt]:
    """Hunt several bugs with the seeds of each, so many at once, and yield what came of each in
    their order. Raises as `hunt`.
    """
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda one: hunt(one[0], one[1], one[2], options), bugs)
