"""How long the course of one request is to a reader, counted: calls, functions, files, changes of
file, coroutines, bytecodes.

Usage: course.py [--load whole] [--requests 50] [--show calls]

Requests come one after the other. A call counts if its function is the proxy's own; a function or a
file, if at least every second request calls it; a change of file, if the next call is of a function
in another file. --show: what counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dis import opmap
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import paired
import stage
from bytecodes import LOADS, Counted, Counting

WARMUP = 50
RESUME = opmap["RESUME"]
SUSPENDS = CO_COROUTINE | CO_GENERATOR | CO_ASYNC_GENERATOR
"""The flags of functions that can be left and gone on with."""


class Calls(Counting):
    """Counts the calls of the proxy's own functions, and the changes of file between them, in place
    of bytecodes.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._of = Counter[CodeType]()
        self._changes = 0
        self._last = ""
        self._instructions: dict[CodeType, bytes] = {}

    def _goes_on(self, code: CodeType, at: int) -> bool:
        """Return whether a coroutine goes on behind a wait, which is no call: the argument of its
        RESUME says so.
        """
        if not code.co_flags & SUSPENDS:
            return False
        instructions = self._instructions.setdefault(code, code.co_code)
        return instructions[at] == RESUME and instructions[at + 1] != 0

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if "/pdproxy/" in code.co_filename and not self._goes_on(code, frame.f_lasti):
            self._of[code] += 1
            if code.co_filename != self._last:
                self._changes += 1
                self._last = code.co_filename
        return super()._call(frame, event, argument)

    def _found(self) -> dict[str, Any]:
        calls = {
            f"{code.co_filename}:{code.co_firstlineno}:{code.co_qualname}": [
                count,
                bool(code.co_flags & SUSPENDS),
            ]
            for code, count in self._of.items()
        }
        changes, self._changes = self._changes, 0
        self._of.clear()
        return {**super()._found(), "own": calls, "changes": changes}


def count(load: str, requests: int) -> dict[str, Any]:
    """Return what was counted in a process that has served so many requests, one after the
    other.
    """
    chunks, itl, flags = LOADS[load]
    with (
        tempfile.TemporaryDirectory() as folder,
        stage.engines(2, "--chunks", chunks, "--itl", itl, processes=2) as at,
    ):
        path = Path(folder) / "counts"
        command = (
            f"{{python}} {__file__} --counts {path} --prefill {{prefills}} --decode {{decodes}} "
            f"--port {{port}}"
        )
        peer = stage.Peer(command, "/ready", env={"PYTHONHASHSEED": "0", **paired.RARE_PROBES})
        with stage.proxy(peer, at) as (process, url):
            stage.load(url, "--n", WARMUP, "--conc", 1, *flags)
            counted = Counted(stage.tree(process.pid), path)
            done = stage.load(url, "--n", requests, "--conc", 1, *flags)
            found = counted.end_with_all()
    if done["errors"] or done["ok"] != requests:
        raise SystemExit(f"requests have failed: {done['errors']}")
    return found


def main() -> None:
    """Print a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", choices=sorted(LOADS), default="whole")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--show", choices=["calls", "files"])
    given = parser.parse_args()
    found = count(given.load, given.requests)
    often = {name: one for name, one in found["own"].items() if one[0] >= given.requests / 2}
    calls = sum(number for number, _ in often.values()) / given.requests
    coroutines = sum(number for number, suspends in often.values() if suspends) / given.requests
    files = Counter[str]()
    for name, (number, _) in often.items():
        files[name.partition(":")[0]] += number
    bytecodes = sum(found["bytecodes"].values()) / given.requests
    print("| load | own calls | functions | files | changes of file | coroutines | bytecodes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    changes = found["changes"] / given.requests
    print(
        f"| {given.load} | {calls:.0f} | {len(often)} | {len(files)} | {changes:.0f} | "
        f"{coroutines:.0f} | {bytecodes:.0f} |"
    )
    shown = (
        files if given.show == "files" else Counter({name: one[0] for name, one in often.items()})
    )
    for name, number in shown.most_common() if given.show else ():
        print(f"    {number / given.requests:6.1f}  {name.rpartition('/proxy/')[2]}")


def serve(path: str, arguments: list[str]) -> int:
    """Be pdproxy, with counts."""
    from pdproxy.cli.main import main as pdproxy  # only here: the other processes do without it

    Calls(path).start()
    return pdproxy(["serve", *arguments])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--counts"]:
        sys.exit(serve(sys.argv[2], sys.argv[3:]))
    main()
