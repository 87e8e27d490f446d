"""How pdproxy spends its CPU time under a load of compare.py: a flame graph, and the functions with
the highest own cost.

Usage: flamegraph.py [--load paced128-128] [--seconds 8] [--out flame.svg] [--rate 500]
[--no-native]

Samples with py-spy (`pip install py-spy`), including native frames, so that the C parts of uvloop
and httptools and the system calls are visible. Needs the right to trace a process. Idle waits are
left out. (The name `profile.py` is taken by a module of Python.)
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import compare
import stage

WIDTH, ROW, MIN_WIDTH = 1200, 16, 0.7
"""Pixels: width of the graph, height of a frame, width of the narrowest frame that is drawn."""


@dataclass
class Frame:
    """A function, with the functions that it called."""

    name: str
    samples: int = 0
    called: dict[str, Frame] = field(default_factory=dict)


def folded(lines: Iterable[str]) -> Frame:
    """Read collapsed stacks (`a;b;c 12`) into one tree."""
    root = Frame("all")
    for line in lines:
        stack, _, count = line.rpartition(" ")
        root.samples += int(count)
        at = root
        for name in stack.split(";"):
            at = at.called.setdefault(name, Frame(name))
            at.samples += int(count)
    return root


def own(root: Frame) -> Counter[str]:
    """Return how often each function was on top of the stack; lines of one function count
    together.
    """
    found: Counter[str] = Counter()

    def walk(frame: Frame) -> None:
        name = (
            frame.name.rpartition(":")[0] + ")"
            if frame.name.endswith(")") and ":" in frame.name
            else frame.name
        )
        found[name] += frame.samples - sum(each.samples for each in frame.called.values())
        for each in frame.called.values():
            walk(each)

    walk(root)
    return found


def svg(root: Frame, title: str) -> str:
    """Return the tree as a flame graph (SVG): a frame lies on its caller, its width is its time."""
    parts: list[str] = []
    scale = WIDTH / max(1, root.samples)
    deepest = 0

    def draw(frame: Frame, x: float, depth: int) -> None:
        nonlocal deepest
        width = frame.samples * scale
        if width < MIN_WIDTH:
            return
        deepest = max(deepest, depth)
        hue = 20 + hash_of(frame.name) % 35
        share = f"{escape(frame.name)}: {100 * frame.samples / root.samples:.1f} %"
        label = escape(frame.name[: int(width / 6.5)]) if width > 30 else ""
        parts.append(
            f'<g transform="translate({x:.1f} {-(depth + 1) * ROW})"><title>{share}</title>'
            f'<rect width="{width:.1f}" height="{ROW - 1}" fill="hsl({hue} 80% 62%)"/><text '
            f'x="2" y="11">{label}</text></g>'
        )
        for each in sorted(frame.called.values(), key=lambda one: one.name):
            draw(each, x, depth + 1)
            x += each.samples * scale

    draw(root, 0, 0)
    height = (deepest + 1) * ROW + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="monospace" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="4" y="16">{escape(title)}</text>'
        f'<g transform="translate(0 {height})">{"".join(parts)}</g></svg>\n'
    )


def hash_of(name: str) -> int:
    """Return a number for a name that is the same in every run."""
    return sum(ord(letter) * index for index, letter in enumerate(name, 1))


def record(pid: int, seconds: float, rate: int, native: bool) -> list[str]:
    """Sample a process and return its collapsed stacks."""
    program = shutil.which("py-spy") or str(Path(sys.executable).parent / "py-spy")
    with tempfile.NamedTemporaryFile() as raw:
        command = [
            program,
            "record",
            "-p",
            str(pid),
            "-d",
            f"{seconds:g}",
            "-r",
            str(rate),
            "-f",
            "raw",
            "-o",
            raw.name,
        ]
        try:
            subprocess.run(
                [*command, *(["--native"] if native else [])], check=True, capture_output=True
            )
        except FileNotFoundError:
            raise SystemExit("py-spy is not installed: pip install py-spy") from None
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"py-spy: {error.stderr.decode()[-500:]}") from None
        return Path(raw.name).read_text().splitlines()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", choices=list(compare.CASES), default="paced128-128")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=int, default=500, help="samples per second")
    parser.add_argument("--out", type=Path, default=Path("flame.svg"))
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument(
        "--no-native",
        action="store_true",
        help="only Python frames, if native frames are not available",
    )
    options = parser.parse_args()
    case = compare.CASES[options.load]
    over = threading.Event()
    with (
        stage.engines(2, "--chunks", case.chunks, "--itl", case.itl) as at,
        stage.proxy(stage.PDPROXY, at) as (process, url),
    ):

        def keep_busy() -> None:
            while not over.is_set():
                stage.load(url, "--conc", case.clients, "--n", case.requests // 2, *case.flags)

        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            time.sleep(1)
            lines = record(process.pid, options.seconds, options.rate, not options.no_native)
        finally:
            over.set()
            busy.join()
    root = folded(lines)
    options.out.write_text(svg(root, f"{options.load}, {root.samples} samples, {stage.commit()}"))
    print(
        f"{options.load}: {root.samples} samples, {options.out}\n\n| own time % | function |\n"
        f"|---|---|"
    )
    for name, count in own(root).most_common(options.top):
        print(f"| {100 * count / root.samples:.1f} | {name} |")


if __name__ == "__main__":
    main()
