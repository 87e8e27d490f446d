"""Many streams at once: whether any are lost, how much memory one takes, and how many one core
carries.

Usage: streams.py [--streams 2000] [--itl 0.1] [--chunks 100]
       streams.py --search [--added-ms 5] [--itl 0.02]

The first form opens all streams at once, each with one token every `--itl` seconds. Memory per
stream is the proxy's peak resident memory minus its idle memory, divided by the streams. `--search`
pins the proxy to one core and the rest to the others, and finds how many streams it carries before
it adds more than `--added-ms` to the 99th percentile of the gaps of the engines alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import threading
import time

import stage

TOLERANCE = 0.1
"""The search ends when it knows the number with this relative error."""


class Peak(threading.Thread):
    """Records the peak of a process tree's memory."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.kb = 0.0
        self.over = threading.Event()

    def run(self) -> None:
        """Sample four times per second."""
        while not self.over.wait(0.25):
            self.kb = max(self.kb, stage.rss(self.pid))


def peer(streams: int) -> stage.Peer:
    """Return pdproxy with limits that allow this many requests at once."""
    bounds = {
        "PDPROXY_LIMITS__MAX_INFLIGHT": str(streams + 64),
        "PDPROXY_LIMITS__MAX_QUEUE": str(streams + 64),
    }
    return stage.Peer(
        stage.PDPROXY.cmd,
        stage.PDPROXY.ready,
        env={**bounds, "PDPROXY_OBSERVE__LOG_LEVEL": "warning"},
    )


def hold(streams: int, chunks: int, itl: float) -> int:
    """Open all streams at once and print the results. Return how many events are missing."""
    flags = ["--conc", streams, "--n", streams, "--stream", "--prompt-bytes", 512]
    with (
        stage.engines(2, "--chunks", chunks, "--itl", itl) as at,
        stage.proxy(peer(streams), at) as (process, url),
    ):
        # what the first request allocates does not belong to a stream
        stage.load(url, "--conc", 32, "--n", 64)
        time.sleep(1)
        idle = stage.rss(process.pid)
        peak = Peak(process.pid)
        peak.start()
        began = stage.cpu(process.pid)
        found = stage.load(url, *flags)
        spent = stage.cpu(process.pid) - began
        peak.over.set()
        time.sleep(1)
        after = stage.rss(process.pid)
    missing = streams * (chunks + 1) - int(found["events"])
    print(f"{streams} streams at once, {chunks} tokens each, one every {1000 * itl:g} ms")
    print(f"whole: {found['ok']}, failed: {found['errors'] or 'none'}, events missing: {missing}")
    print(
        f"gap p50 {found['gap_p50_ms']} ms, p99 {found['gap_p99_ms']} ms; first token p50 "
        f"{found['first_p50_ms']} ms"
    )
    print(
        f"CPU {1e6 * spent / max(1, found['events']):.1f} us per event, "
        f"{100 * spent / found['wall_s']:.0f} % of a core"
    )
    print(
        f"memory idle {idle / 1024:.1f} MB, peak {peak.kb / 1024:.1f} MB, afterwards "
        f"{after / 1024:.1f} MB"
    )
    print(f"memory per stream: {(peak.kb - idle) / streams:.1f} KB")
    return missing


def search(added_ms: float, itl: float, seconds: float) -> None:
    """Double the number of streams until it is too slow, then bisect."""
    cores = sorted(os.sched_getaffinity(0))
    mine, others = {cores[0]}, set(cores[1:])
    if not others:
        raise SystemExit("needs at least two cores: one is for the proxy")
    chunks = max(16, int(seconds / itl))

    def added(streams: int) -> float:
        flags = ["--conc", streams, "--n", streams, "--stream"]
        with stage.engines(2, "--chunks", chunks, "--itl", itl, cores=others) as at:
            alone = stage.load(*at.pairs, *flags, cores=others)
            with stage.proxy(peer(streams), at, cores=mine) as (process, url):
                began = stage.cpu(process.pid)
                found = stage.load(url, *flags, cores=others)
                spent = stage.cpu(process.pid) - began
        lost = sum(found["errors"].values())
        more = float(found["gap_p99_ms"]) - float(alone["gap_p99_ms"])
        print(
            f"{streams} streams: gap p99 {found['gap_p99_ms']} ms, engines alone "
            f"{alone['gap_p99_ms']} ms, added {more:.1f} ms, "
            f"{100 * spent / found['wall_s']:.0f} % of the core, {lost} lost",
            flush=True,
        )
        return float("inf") if lost else more

    good, bad, streams = 0, 0, 64
    while not bad or (bad - good) > TOLERANCE * bad:
        if added(streams) <= added_ms:
            good = streams
        else:
            bad = streams
        streams = (good + bad) // 2 if bad else 2 * good
        if streams < 8:
            break
    print(
        f"streams per core before gaps grow by {added_ms:g} ms (p99), one token every "
        f"{1000 * itl:g} ms: {good}"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument(
        "--itl", type=float, help="seconds between two tokens (0.1; 0.02 in a search)"
    )
    parser.add_argument(
        "--search", action="store_true", help="find how many streams one core carries"
    )
    parser.add_argument("--added-ms", type=float, default=5.0)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="length of the streams in a search"
    )
    options = parser.parse_args()
    stage.raise_files()
    try:
        if options.search:
            search(options.added_ms, options.itl or 0.02, options.seconds)
        elif hold(options.streams, options.chunks, options.itl or 0.1):
            raise SystemExit(1)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"the load failed: {error}") from error


if __name__ == "__main__":
    main()
