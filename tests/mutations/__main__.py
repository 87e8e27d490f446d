"""Makes a copy of the package per mutation and runs the tests that are nearest to it, until one
fails.

Usage: python -m tests.mutations [--seed 0] [--count 200] [--jobs 2] [--minutes 60] [--limit 90]
[--only PART]

Prints each mutation that no test has noticed as soon as that is known, and how many were noticed.
Those whose tests did not end within the limit are listed, too: a test may have hung, or the machine
was slow. The exit code is 0 whatever survives: `docs/evidence/mutations.txt` lists survivors,
and a reader judges them. It is 1 if the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.planted.bug import PACKAGE
from tests.mutations.nearest import DATA_PATH, LEFT_OUT, TESTS, nearest
from tests.mutations.sites import Mutation, sites

NOTICED, SURVIVED, LATE = "noticed", "survived", "did not end"


def all_mutations(only: str = "") -> list[Mutation]:
    """Return all mutations of the data path, or of the modules whose path in the package begins
    so.
    """
    found: list[Mutation] = []
    for part in DATA_PATH:
        for file in sorted((PACKAGE / part).rglob("*.py")):
            name = file.relative_to(PACKAGE).as_posix()
            if name.startswith(only) and not name.startswith(LEFT_OUT):
                found += sites(name, file.read_bytes())
    return found


def judged(mutation: Mutation | None, files: Sequence[str], limit: float) -> str:
    """Run tests against a copy of the package, with a mutation or without, until one fails. Return
    what has become of it.
    """

    def mutate(package: Path) -> None:
        if mutation is not None:
            file = package / mutation.path
            file.write_bytes(mutation.of(file.read_bytes()))

    return tested(mutate, files, limit)


def tested(change: Callable[[Path], None] | None, tests: Sequence[str], limit: float) -> str:
    """Run tests against a copy of the package, changed or not, until one fails. Return what has
    become of the change. `tests`: as pytest names them in the folder of tests.
    """
    with TemporaryDirectory(prefix="mutation-") as folder:
        package = Path(shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name))  # with its bytecode
        if change is not None:
            change(package)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *(str(TESTS / one) for one in tests),
        ]
        env = os.environ | {
            # the copy stands before the package
            "PYTHONPATH": os.pathsep.join((folder, str(PACKAGE.parent))),
            "HYPOTHESIS_STORAGE_DIRECTORY": folder,
            "PDPROXY_TEST_EXAMPLES": "100",
            "PDPROXY_TEST_SEEDS": "3",
        }
        with subprocess.Popen(
            command,
            cwd=TESTS.parent,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes of the tests
                return LATE
    return SURVIVED if code == 0 else NOTICED


def tried(mutation: Mutation, limit: float) -> str:
    """Have the tests judge a mutation that are nearest to its module."""
    return judged(mutation, nearest(mutation.path), limit)


def main(arguments: list[str]) -> int:
    """Try a sample, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description="See which changes no test notices."
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--count", type=int, default=200, help="mutations (default: 200)")
    parser.add_argument("--jobs", type=int, default=2, help="at once (default: 2)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="none begins later (default: 60)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=90.0,
        help="seconds of the tests of one mutation (default: 90)",
    )
    parser.add_argument(
        "--only", default="", help="modules whose path in the package begins so, like serving/kv"
    )
    parser.add_argument(
        "--unproven", action="store_true", help="do not run the tests without a mutation before"
    )
    given = parser.parse_args(arguments)
    every = all_mutations(given.only)
    sample = random.Random(given.seed).sample(every, min(given.count, len(every)))
    print(f"{len(sample)} of {len(every)} mutations, seed {given.seed}", flush=True)
    if (
        not given.unproven
        and (result := judged(None, _files(sample), 60 * given.minutes)) != SURVIVED
    ):
        print(f"the tests fail without a mutation: {result}")
        return 1
    end, counts = time.monotonic() + 60 * given.minutes, Counter[str]()
    with ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(_in_time, one, given.limit, end): one for one in sample}
        for done in as_completed(running):
            counts[result := done.result()] += 1
            if result in (SURVIVED, LATE):
                print(f"{result}: {running[done]}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())), flush=True)
    return 0


def _files(sample: Sequence[Mutation]) -> list[str]:
    return sorted({file for one in sample for file in nearest(one.path)})


def _in_time(mutation: Mutation, limit: float, end: float) -> str:
    return tried(mutation, limit) if time.monotonic() < end else "not tried"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
