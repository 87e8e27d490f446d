"""What a change costs, on a machine with other work: two checkouts of pdproxy, measured in turns of
half a second.

Usage: paired.py --before FOLDER [--after FOLDER] [--rounds 40] [--loads whole,streams,chats]
       paired.py --peers peers-workers.json [--rounds 40] [--loads whole,streams,chats] paired.py
       (--before FOLDER [--after FOLDER] | --peers FILE) --instructions [--loads
       whole,streams,chats]

Both proxies run at the same time, in front of the same mock engines. In each round both get the
same load, one after the other, and which is first alternates. The result is the median over the
rounds of the ratio of their CPU times per request, with an interval that holds the true median in
95 % of runs. What slows the machine for seconds slows both halves of a round.

`--peers`: the first two proxies of such a file in the place of two checkouts, the first as
`before`.

`--instructions` counts the instructions of all the proxy's processes per request with valgrind's
callgrind, which must be installed, less those of the same time without requests. They vary less
than times, but are none: a cache miss counts like a hit, the kernel's work not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import stage


@dataclass(frozen=True)
class Load:
    """What the engines stream (chunks, seconds between two), and what each turn sends."""

    chunks: int
    itl: float
    requests: int
    flags: tuple[object, ...]


LONG = ("--prompt-bytes", 262_144)
LOADS = {
    "whole": Load(64, 0, 1200, ("--conc", 32)),
    "streams": Load(64, 0.001, 250, ("--conc", 32, "--stream")),
    "chats": Load(64, 0.001, 250, ("--conc", 32, "--stream", "--chat")),
    "prompt256k": Load(64, 0, 250, ("--conc", 8, *LONG)),
    "chat256k": Load(64, 0, 250, ("--conc", 8, *LONG, "--chat")),
    "chat256k-stream": Load(64, 0, 250, ("--conc", 8, *LONG, "--chat", "--stream")),
    "chat256k-paced": Load(64, 0.02, 60, ("--conc", 32, *LONG, "--chat", "--stream")),
}
COUNTED_START, COUNTED_WARMUP, COUNTED = 400.0, 60, 400
"""With callgrind: seconds for the start, which is fifty times as slow, and requests before and
while it counts.
"""
RARE_PROBES = {"PDPROXY_PROBES__INTERVAL": "60", "PDPROXY_PROBES__SCRAPE_INTERVAL": "600"}
"""While instructions are counted: one scrape more or less in a window would be as much as 4 % of
its requests' instructions.
"""
Z95 = 1.96
LIFE = 8
"""Rounds before the proxies and the engines are started again."""


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process tree so far, in nanoseconds' resolution (`stage.cpu` has
    hundredths).
    """
    total = 0.0
    for each in stage.tree(pid):
        with contextlib.suppress(OSError):  # it has ended
            total += time.clock_gettime((~each << 3) | 2)  # Linux: the clock id of another process
    return total


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest of those that may be the median, by order statistics at 95
    %.
    """
    found = sorted(values)
    reach = Z95 * len(found) ** 0.5 / 2
    low = max(0, int(len(found) / 2 - reach))
    return found[low], found[-1 - low]


def measure(
    sides: dict[str, stage.Peer], load: Load, rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Return the CPU seconds per request of each side in each round, and the number of errors. The
    first round does not count.
    """
    spent: dict[str, list[float]] = {name: [] for name in sides}
    errors = 0
    names = list(sides)
    with (
        stage.engines(2, "--chunks", load.chunks, "--itl", load.itl, processes=2) as at,
        stage.proxy(sides[names[0]], at) as first,
        stage.proxy(sides[names[1]], at) as second,
    ):
        proxies = dict(zip(names, (first, second), strict=True))
        for number in range(rounds + 1):
            for name in names[:: 1 if number % 2 else -1]:
                process, url = proxies[name]
                began = cpu(process.pid)
                found = stage.load(url, "--n", load.requests, *load.flags)
                taken = cpu(process.pid) - began
                errors += sum(found["errors"].values())
                if number:
                    spent[name].append(taken / max(1, found["ok"]))
    return spent, errors


def run(
    sides: dict[str, stage.Peer], load: Load, rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Measure in several lives of the proxies, since each process has costs of its own by where its
    memory lies.
    """
    spent: dict[str, list[float]] = {name: [] for name in sides}
    errors = 0
    for life in range(0, rounds, LIFE):
        turn = dict(list(sides.items())[:: 1 if life // LIFE % 2 else -1])
        more, failed = measure(turn, load, min(LIFE, rounds - life))
        errors += failed
        for name, values in more.items():
            spent[name] += values
    return spent, errors


def instructions(peer: stage.Peer, load: Load) -> float:
    """Return how many instructions the proxy takes for a request, in user space."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        at = stack.enter_context(
            stage.engines(2, "--chunks", load.chunks, "--itl", load.itl, processes=2)
        )
        (port,) = stage.free_ports(1)
        # Without --trace-children it counts in forked processes, too, but can't be asked for their
        # counts.
        valgrind = (
            "valgrind",
            "--tool=callgrind",
            "--trace-children=yes",
            f"--callgrind-out-file={folder}/%p",
        )
        command = [*valgrind, *peer.command(at, port)]
        process = stack.enter_context(
            stage.running(command, env={"PYTHONHASHSEED": "0"} | peer.env | RARE_PROBES)
        )
        stage.wait_for(stage.url(port) + peer.ready, process, COUNTED_START)
        flags = ("--conc", 4, *load.flags[2:])
        stage.load(stage.url(port), "--n", COUNTED_WARMUP, *flags)
        pids = stage.tree(process.pid)
        _callgrind("--zero", pids)
        began = time.monotonic()
        found = stage.load(stage.url(port), "--n", COUNTED, *flags)
        _callgrind("--dump", pids)
        time.sleep(time.monotonic() - began)  # probes and timers, which run without requests, too
        _callgrind("--dump", pids)
        busy, idle = (
            sum(counted((folder / f"{pid}.{number}").read_text()) for pid in pids)
            for number in (1, 2)
        )
        return (busy - idle) / max(1, int(found["ok"]))


def counted(dump: str) -> int:
    """Return the total of a dump of callgrind.

    Raises:
        ValueError: it has none.
    """
    found = re.search(r"^(?:summary|totals): (\d+)", dump, re.MULTILINE)
    if found is None:
        raise ValueError("a dump of callgrind without its total")
    return int(found[1])


def _callgrind(action: str, pids: Sequence[int]) -> None:
    for pid in pids:
        subprocess.run(["callgrind_control", action, str(pid)], check=True, capture_output=True)


def count(sides: dict[str, stage.Peer], loads: Sequence[str]) -> None:
    """Print a table of instructions."""
    print("| load | instructions/request before | after | ratio |")
    print("| --- | --- | --- | --- |")
    for name in loads:
        before, after = (instructions(sides[side], LOADS[name]) for side in ("before", "after"))
        print(f"| {name} | {before:.0f} | {after:.0f} | {after / before:.4f} |", flush=True)


def _checkouts(before: Path, after: Path) -> dict[str, stage.Peer]:
    """Return pdproxy of two checkouts."""
    return {
        name: stage.Peer(
            stage.PDPROXY.cmd,
            "/ready",
            env={"PYTHONPATH": str(folder.resolve() / "proxy"), "PYTHONHASHSEED": "0"},
        )
        for name, folder in (("before", before), ("after", after))
    }


def _of_file(peers: Path) -> dict[str, stage.Peer]:
    """Return the first two proxies of a file."""
    first, second, *_ = [stage.Peer(**peer) for peer in json.loads(peers.read_text()).values()]
    return {"before": first, "after": second}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a checkout")
    parser.add_argument(
        "--peers", type=Path, help="a file with two proxies, as those of compare.py"
    )
    parser.add_argument(
        "--after", type=Path, default=stage.ROOT, help="another one; without it, this one"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--loads", default=",".join(LOADS), help=f"comma separated, from {', '.join(LOADS)}"
    )
    parser.add_argument(
        "--instructions", action="store_true", help="count instructions in place of CPU time"
    )
    given = parser.parse_args()
    if (given.before is None) == (given.peers is None):
        parser.error("give --before or --peers")
    sides = _checkouts(given.before, given.after) if given.peers is None else _of_file(given.peers)
    loads = given.loads.split(",")
    if given.instructions:
        count(sides, loads)
        return 0
    print("| load | CPU us/request before | after | median of the rounds' ratios | 95 % | errors |")
    print("| --- | --- | --- | --- | --- | --- |")
    failed = 0
    for name in loads:
        spent, errors = run(sides, LOADS[name], given.rounds)
        ratios = [
            after / before for before, after in zip(spent["before"], spent["after"], strict=True)
        ]
        low, high = interval(ratios)
        medians = " | ".join(
            f"{1e6 * statistics.median(spent[side]):.0f}" for side in ("before", "after")
        )
        print(
            f"| {name} | {medians} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | "
            f"{errors} |",
            flush=True,
        )
        failed += errors
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
