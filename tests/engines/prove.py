"""Tries a version of vLLM: `python -m tests.engines.prove --vllm X` runs what real engines show,
part by part, and prints a row.

The row belongs into docs/reference/versions.md. The engines' environment is built if it is missing
(`build.py`). A part is a run of pytest; `PARTS` has its files. `prove ... answers turns` runs only
these two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from .build import EnginesUnavailable, ensure, pinned_vllm

HERE = Path(__file__).resolve().parent
PARTS: dict[str, tuple[str, ...]] = {
    "conformance": ("long_conformance.py", "-k", "not lmcache"),
    "answers": (
        "test_equality.py",
        "test_other_routes.py",
        "test_flags_and_fields.py",
        "test_reasoning.py",
        "test_tokenize.py",
        "test_generated.py",
        "test_clients.py",
        "test_check.py",
    ),
    "turns": ("long_turns.py",),
    "push": ("test_push.py", "long_push.py"),
    "KV events": ("test_kv_events.py",),
    "schedulers": ("test_turn_scheduler.py", "../schedulers/long_*.py"),
    "simulator": ("test_reality.py",),
    "faults": ("test_load.py", "test_changes.py", "test_faults.py", "long_notifier.py"),
}
"""What each column of the table is proven by: files of this folder, and options of pytest."""


@dataclass(frozen=True)
class Result:
    """What a run of pytest reports: the number of tests that passed, and those that did not, by
    name.
    """

    passed: int
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the cell of the table."""
        return f"{self.passed} of {self.passed + len(self.failed)}"


def read(report: Path) -> Result:
    """Return the result in a report of pytest's `--junitxml`. A test that was skipped has not
    failed, and proves nothing.
    """
    passed, failed = 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        if any(case.find(kind) is not None for kind in ("failure", "error")):
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif case.find("skipped") is None:
            passed += 1
    return Result(passed, tuple(failed))


def row(version: str, day: str, results: dict[str, Result]) -> str:
    """Return the row of the table: the version, what its kernels are, the day, and a cell for each
    part.
    """
    kernels = "own" if version == pinned_vllm() else f"{pinned_vllm()}'s"
    cells = [str(results[part]) if part in results else "not run" for part in PARTS]
    return f"| {' | '.join([version, kernels, day, *cells])} |"


def run(part: str, version: str, folder: Path) -> Result:
    """Run a part and show its output; a run that ends without a report has failed."""
    report = folder / f"{part}.xml"
    given = [
        arg
        for word in PARTS[part]
        for arg in (sorted(map(str, HERE.glob(word))) if ".py" in word else [word])
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *given,
    ]
    env = os.environ | {"PDPROXY_ENGINES_VLLM": version, "PDPROXY_REQUIRE_ENGINES": "1"}
    code = subprocess.run(command, check=False, env=env, cwd=HERE.parents[1]).returncode
    if not report.exists():
        return Result(0, (f"pytest ended with {code}",))
    return read(report)


def main() -> int:
    """The command line. Exit code 1: a test failed; 3: the version can't be had here."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--vllm", metavar="VERSION", default=pinned_vllm(), help=f"default: {pinned_vllm()}"
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    try:
        ensure(vllm=options.vllm)
    except EnginesUnavailable as error:
        print(f"engines unavailable: {error}", file=sys.stderr)
        return 3
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts or PARTS:
            print(f"== {part}", flush=True)
            results[part] = run(part, options.vllm, Path(folder))
    for part, result in results.items():
        for name in result.failed:
            print(f"FAILED {part}: {name}")
    print(f"| {' | '.join(['vLLM', 'kernels', 'day', *PARTS])} |")
    print(row(options.vllm, datetime.now(UTC).strftime("%Y-%m-%d"), results))
    return 1 if any(result.failed for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
