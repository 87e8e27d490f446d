"""What workers cost, counted: the Python bytecodes and calls of a request, of one process and of
several workers.

Usage: bytecodes.py [--workers 1 2] [--loads whole,streams] [--requests 400] [--conc 8] [--serve
"MORE OPTIONS"] [--top 0]

CPU times vary by more than what is looked for; these counts do not, but each bytecode counts alike,
and what C code does not count. A trace function of Python counts in all processes of the proxy, in
front of mock engines. What runs without requests is counted for some seconds before, and taken off
by the time; probes are rare meanwhile, and functions that run mostly without requests are left out.
--top: also the functions with the most bytecodes, and what those of the other rows have more than
the first one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import paired
import stage

LOADS = {
    "whole": (64, 0.0, ()),
    "streams": (64, 0.02, ("--stream",)),
    **{
        f"{name}-{form}": (64, 0.02 if stream else 0.0, (*route, *stream))
        for name, route in (
            ("chat", ("--chat",)),
            ("responses", ("--route", "/v1/responses")),
            ("messages", ("--route", "/v1/messages")),
        )
        for form, stream in (("whole", ()), ("streams", ("--stream",)))
    },
}
"""What engines stream (chunks, seconds between two), and what is asked."""
IDLE_S = 4.0
WARMUP = 100
PATIENCE = 30.0
"""Seconds for a process to write its counts."""


class Counting:
    """Counts in this process, from one SIGUSR2 to the next one, which writes the counts to a file.
    Children inherit it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._counts: Counter[CodeType] = Counter()
        self._calls = 0
        self._counts_now = False

    def start(self) -> None:
        """Follow the signal."""
        signal.signal(signal.SIGUSR2, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if not self._counts_now:
            self._counts_now = True
            sys.settrace(self._call)
            sys.setprofile(self._profile)
            return
        sys.settrace(None)
        sys.setprofile(None)
        self._counts_now = False
        written = Path(f"{self._path}.{os.getpid()}")
        part = written.with_suffix(written.suffix + ".part")
        part.write_text(json.dumps(self._found()))
        part.rename(written)
        self._counts.clear()
        self._calls = 0

    def _found(self) -> dict[str, Any]:
        """Return what is written."""
        found: Counter[str] = Counter()
        for code, count in self._counts.items():
            found[f"{code.co_filename}:{code.co_name}"] += count
        return {"calls": self._calls, "bytecodes": found}

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._each

    def _each(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._counts[frame.f_code] += 1
        return self._each

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self._calls += 1


def serve(path: str, arguments: list[str]) -> int:
    """Be pdproxy, with counts."""
    from pdproxy.cli.main import main as pdproxy  # only here: the other processes do without it
    from pdproxy.workers import supervisor

    # a process that counts is slow to answer
    supervisor.SupervisorTimes = partial(  # type: ignore[misc, assignment]
        supervisor.SupervisorTimes, silent_for_all=PATIENCE
    )
    Counting(path).start()
    return pdproxy(["serve", *arguments])


class Counted:
    """The counts of a proxy's processes since a time. `path`: where they write them."""

    def __init__(self, pids: list[int], path: Path) -> None:
        self._pids, self._path = pids, path
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        self._began = time.monotonic()

    def end(self) -> tuple[float, int, Counter[str]]:
        """Return for how many seconds it counted, calls, and bytecodes by function."""
        seconds = time.monotonic() - self._began
        calls, found = 0, Counter[str]()
        for one in self._written():
            calls += one["calls"]
            found.update(one["bytecodes"])
        return seconds, calls, found

    def end_with_all(self) -> dict[str, Any]:
        """Return all that the only process has counted."""
        (found,) = self._written()
        return found

    def _written(self) -> list[dict[str, Any]]:
        for pid in self._pids:
            os.kill(pid, signal.SIGUSR2)
        found = []
        for pid in self._pids:
            written, until = Path(f"{self._path}.{pid}"), time.monotonic() + PATIENCE
            while not written.exists():
                if time.monotonic() > until:
                    raise TimeoutError(f"process {pid} has written no counts")
                time.sleep(0.01)
            found.append(json.loads(written.read_text()))
            written.unlink()
        return found


def _counts(pid: int) -> bool:
    """Return whether a process counts: what reads bodies or sends traces for it does not."""
    return Path(__file__).name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def count(
    workers: int, load: str, given: argparse.Namespace
) -> tuple[float, float, float, dict[str, float]]:
    """Return bytecodes and calls per request, bytecodes per second without requests, and bytecodes
    per request by function.
    """
    chunks, itl, flags = LOADS[load]
    with (
        tempfile.TemporaryDirectory() as folder,
        stage.engines(2, "--chunks", chunks, "--itl", itl, processes=2) as at,
    ):
        path = Path(folder) / "counts"
        more = f"--workers {workers} {given.serve}" if workers > 1 else given.serve
        command = (
            f"{{python}} {__file__} --counts {path} {more} --prefill {{prefills}} --decode "
            f"{{decodes}} --port {{port}}"
        )
        with stage.proxy(
            stage.Peer(command, "/ready", env={"PYTHONHASHSEED": "0", **paired.RARE_PROBES}), at
        ) as (
            process,
            url,
        ):
            stage.load(url, "--n", WARMUP, "--conc", given.conc, *flags)
            pids = [pid for pid in stage.tree(process.pid) if _counts(pid)]
            idle = Counted(pids, path)
            time.sleep(IDLE_S)
            idle_s, idle_calls, idle_found = idle.end()
            busy = Counted(pids, path)
            done = stage.load(url, "--n", given.requests, "--conc", given.conc, *flags)
            seconds, calls, found = busy.end()
    requests, part = done["ok"], seconds / idle_s
    if done["errors"] or not requests:
        raise SystemExit(f"requests have failed: {done['errors']}")
    each = {
        name: (number - part * idle_found[name]) / requests
        for name, number in found.items()
        if part * idle_found[name] < number / 2  # the rest is no part of requests, but much noise
    }
    return (
        sum(each.values()),
        (calls - part * idle_calls) / requests,
        sum(idle_found.values()) / idle_s,
        each,
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--loads", default="whole,streams")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--conc", type=int, default=8)
    parser.add_argument("--serve", default="", help="more options of pdproxy serve")
    parser.add_argument("--top", type=int, default=0)
    given = parser.parse_args()
    print(
        "| load | workers | bytecodes/request | x | calls/request | x | bytecodes/s without "
        "requests |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for load in given.loads.split(","):
        first: tuple[float, float, dict[str, float]] | None = None
        for workers in given.workers:
            bytecodes, calls, idle, each = count(workers, load, given)
            base = (bytecodes, calls, each) if first is None else first
            first = base
            ratios = (
                f"{bytecodes:.0f} | {bytecodes / base[0]:.3f} | {calls:.1f} | {calls / base[1]:.3f}"
            )
            print(f"| {load} | {workers} | {ratios} | {idle:.0f} |", flush=True)
            before = {} if base[2] is each else base[2]
            more = {
                name: each.get(name, 0.0) - before.get(name, 0.0)
                for name in each.keys() | before.keys()
            }
            for name, number in sorted(more.items(), key=lambda one: -abs(one[1]))[: given.top]:
                print(f"    {number:9.1f}  {name.rpartition('/proxy/')[2]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--counts"]:
        sys.exit(serve(sys.argv[2], sys.argv[3:]))
    main()
