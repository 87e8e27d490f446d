"""The index of engines' KV blocks (`scheduling.prefix`): memory per block, CPU time per event, time
of a lookup.

Usage: prefix_index.py [--places 8 50 200] [--blocks 50000] [--shared 0.3] [--repeat 20]

Each place holds `--blocks` blocks of 16 tokens. `--shared` of them are the same in all places: the
beginnings of prompts. They come in events of 40 blocks, as prompts are stored. Memory: what Python
allocated (tracemalloc), and the growth of the process. CPU time is that of this thread; the
engines' removals come one block at a time, as vLLM sends them. A lookup is of 32,768 tokens that
all places hold ("all"), that one place holds, and of which no place knows anything; its keys are
made meanwhile, from JSON, unless they are made already. A restart forgets a place; its blocks are
removed by later events.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import stage
from pdproxy.scheduling.prefix import keys
from pdproxy.scheduling.prefix.block_index import BlockIndex
from pdproxy.scheduling.prefix.reading import GPU
from pdproxy.scheduling.prefix.routed import RoutedIndex
from pdproxy.scheduling.prefix.speculative import SpeculativeIndex
from pdproxy.tokens.ids import TokenIds, from_numbers

UNIT = 16
EVENT = 40
PROMPT = 32768
SINGLE = 10_000
BITS = 2**64 - 1


def rss() -> int:
    """Return this process's resident memory in bytes."""
    return int(int(Path("/proc/self/statm").read_text().split()[1]) * stage.PAGE_KB * 1024)


def median(work: Callable[[], object], repeat: int) -> float:
    """Return the median CPU time of `work` in seconds."""
    times = []
    for _ in range(repeat):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def tokens(first: int, count: int) -> list[int]:
    """Return token ids that differ for each `first`, as a decoder makes them: new integers."""
    return list(range(first * 10_007 % 2**31, first * 10_007 % 2**31 + count))


def hashes(first: int, count: int) -> list[int]:
    """Return what stands for an engine's hashes of 64 bits, new integers as well."""
    return [hash((first, at)) & BITS for at in range(count)]


def store(index: BlockIndex, place: int, prompt: int, blocks: int = EVENT) -> float:
    """Enter the blocks of a prompt. Return the CPU time in seconds."""
    ids, names = tokens(prompt, blocks * UNIT), hashes(prompt, blocks)
    extra_keys = [None] * blocks
    began = time.thread_time()
    index.stored(place, names, None, ids, UNIT, GPU, 0, None, extra_keys, counts=True)
    return time.thread_time() - began


def fill(index: BlockIndex, places: int, blocks: int, shared: float) -> tuple[list[int], float]:
    """Fill places. Return their numbers, and the CPU time per block in seconds."""
    numbers = [index.add_place() for _ in range(places)]
    prompts, spent = blocks // EVENT, 0.0
    for at in range(prompts):
        for place, number in enumerate(numbers):
            spent += store(
                index, number, at if at < prompts * shared else (place + 1) * 1_000_000 + at
            )
    return numbers, spent / (prompts * EVENT * places)


def sizes(places: int, blocks: int, shared: float) -> dict[str, str]:
    """Return the row of one number of places."""
    gc.collect()
    before = rss()
    index = BlockIndex(UNIT, 2 * places * blocks)
    numbers, stored = fill(index, places, blocks, shared)
    gc.collect()
    resident = (rss() - before) / len(index)
    entries = len(index)

    prompt = from_numbers(tokens(1_000_001, PROMPT))
    for number in numbers:
        store(index, number, 1_000_001, PROMPT // UNIT)
    one = from_numbers(tokens(1_000_002, PROMPT))
    store(index, numbers[0], 1_000_002, PROMPT // UNIT)
    cold = from_numbers(tokens(1_000_003, PROMPT))

    def lookup(ids: TokenIds) -> float:
        return median(lambda: index.lookup(keys.of_ids(ids, UNIT, keys.root())), 15) * 1000

    made = keys.of_ids(prompt, UNIT, keys.root())
    times = [lookup(ids) for ids in (prompt, one, cold)]
    times.append(median(lambda: index.lookup(made), 15) * 1000)
    parent, alone, gone = hashes(1_000_002, 1)[0], 0.0, 0.0
    for at in range(SINGLE // 1000):
        events = [
            ([block], tokens(block % 2**20, UNIT), [None]) for block in hashes(1_000_004 + at, 1000)
        ]
        began = time.thread_time()
        for event, ids, extra in events:
            index.stored(numbers[0], event, parent, ids, UNIT, GPU, 0, None, extra, counts=True)
            parent = event[0]
        ended = time.thread_time()
        for event, _, _ in events[:-1]:
            index.removed(numbers[0], event, GPU, 0)
        alone += ended - began
        gone += time.thread_time() - ended
    began = time.thread_time()
    index.restart(numbers[-1])
    restart = time.thread_time() - began
    return {
        "places": str(places),
        "blocks": f"{entries:,}",
        "bytes per block": f"{resident:.0f}",
        "µs per block stored": f"{stored * 1e6:.2f}",
        "in an event of one": f"{alone / SINGLE * 1e6:.2f}",
        "removed": f"{gone / SINGLE * 1e6:.2f}",
        "lookup all, ms": f"{times[0]:.2f}",
        "one": f"{times[1]:.2f}",
        "none": f"{times[2]:.3f}",
        "all, keys made": f"{times[3]:.3f}",
        "restart, ms": f"{restart * 1000:.3f}",
    }


def allocated(places: int, blocks: int, shared: float) -> str:
    """Return bytes per block as tracemalloc counts them, with fewer places: it is slow."""
    gc.collect()
    tracemalloc.start()
    index = BlockIndex(UNIT, 2 * places * blocks)
    fill(index, places, blocks, shared)
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return f"{size / len(index):.0f}"


def others(repeat: int) -> dict[str, str]:
    """Return what keys and the two other indexes take, in ms for a prompt of 32,768 tokens."""
    ids = tokens(5, PROMPT)
    array, packed, start = from_numbers(ids), keys.pack(ids), keys.root()
    prompt = keys.of_ids(ids, UNIT, start)
    prompt.all()
    speculative, routed = SpeculativeIndex(5.0, 1 << 20), RoutedIndex(50_000)
    fresh = [keys.of_ids(tokens(other, PROMPT), UNIT, start) for other in range(100, 140 + repeat)]
    for one in fresh:
        one.all()
    for _ in range(40):
        routed.routed(0, fresh.pop())
    work: dict[str, Callable[[], object]] = {
        "keys of JSON": lambda: keys.of_ids(array, UNIT, start).all(),
        "keys of a list": lambda: keys.of_ids(ids, UNIT, start).all(),
        "keys of packed ids": lambda: keys.of_packed(packed, UNIT, start).all(),
        "keys of a list, units of 64": lambda: keys.of_ids(ids, 64, start).all(),
        "keys of 128 KB text, units of 64 bytes": lambda: keys.of_text(packed, 64, start).all(),
        "note a route, speculative": lambda: speculative.routed(1, prompt, 0.0),
        "note a route, without events": lambda: routed.routed(0, fresh.pop()),
        "note a known route, without events": lambda: routed.routed(0, prompt),
    }
    return {name: f"{median(what, repeat) * 1000:.3f}" for name, what in work.items()}


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--places", type=int, nargs="+", default=[8, 50, 200])
    parser.add_argument("--blocks", type=int, default=50_000)
    parser.add_argument("--shared", type=float, default=0.3)
    parser.add_argument("--repeat", type=int, default=20)
    # one number of places, in a process of its own
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(sizes(options.row, options.blocks, options.shared)))
        return 0
    for name, value in others(options.repeat).items():
        print(f"{value:>8} ms  {name}")
    print(
        f"{allocated(4, options.blocks, options.shared):>8} bytes per block, 4 places, as allocated"
    )
    for number, places in enumerate(options.places):
        again = [sys.executable, __file__, "--row", str(places), "--blocks", str(options.blocks)]
        again += ["--shared", str(options.shared)]
        row = json.loads(subprocess.run(again, check=True, capture_output=True, text=True).stdout)
        if not number:
            print("| " + " | ".join(row) + " |")
        print("| " + " | ".join(row.values()) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
