"""The benchmark that counts bytecodes: what it counts, in this process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bytecodes


def work(times: int) -> int:
    return sum(abs(number) for number in range(times))


def test_what_runs_between_two_signals_is_counted(tmp_path: Path) -> None:
    """Each function by its name, and calls into C as well. A second count begins at nothing.

    From Python 3.13 on, a function's bytecodes are counted from its second traced call on: the
    first count here is not looked at.
    """
    before = signal.getsignal(signal.SIGUSR2)
    counted = []
    try:
        bytecodes.Counting(str(tmp_path / "counts")).start()
        for times in (1, 10, 20):
            counts = bytecodes.Counted([os.getpid()], tmp_path / "counts")
            work(times)
            _, calls, found = counts.end()
            assert calls > 2 * times
            counted.append(
                {
                    name.rpartition(":")[2]: count
                    for name, count in found.items()
                    if __file__ in name
                }
            )
    finally:
        signal.signal(signal.SIGUSR2, before)
        sys.settrace(None)
        sys.setprofile(None)
    assert 0 < counted[1]["work"] == counted[2]["work"]
    each = counted[2]["<genexpr>"] - counted[1]["<genexpr>"]
    assert each == 10 * (each // 10) > 0
    assert not list(tmp_path.iterdir())


def test_each_function_has_its_count(tmp_path: Path) -> None:
    """What a process writes is whole: another one reads it."""
    before = signal.getsignal(signal.SIGUSR2)
    path = tmp_path / "counts"
    try:
        bytecodes.Counting(str(path)).start()
        os.kill(os.getpid(), signal.SIGUSR2)
        work(3)
        work(3)
        os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
        sys.settrace(None)
        sys.setprofile(None)
    written = json.loads((tmp_path / f"counts.{os.getpid()}").read_text())
    assert written["bytecodes"][f"{__file__}:work"] > 0
