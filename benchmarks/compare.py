"""What proxies cost, side by side: CPU microseconds per request and per streamed chunk, in front of the same mock engines.

Usage: compare.py [--peers peers.json] [--rounds 3] [--loads NAME,...] [--only NAME]

Each proxy in turn serves each load; the CPU time of its whole process tree is read from /proc before and after. That holds
on noisy machines where a throughput does not; quote medians and the ratio between proxies of one run. Peers are
installed by hand (`pip install vllm-router`); one that isn't there is left out, with a word.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """One load: how the engines stream and how the clients ask."""

    chunks: int
    itl: float
    flags: tuple[str, ...]


CASES = {
    "whole-32": Case(64, 0, ("--conc", "32", "--n", "6000")),
    "stream64-32": Case(64, 0, ("--conc", "32", "--n", "1500", "--stream")),
    "chat64-32": Case(64, 0, ("--conc", "32", "--n", "1500", "--stream", "--chat")),
    "prompt64k-8": Case(64, 0, ("--conc", "8", "--n", "3000", "--prompt-bytes", "65536")),
    "paced128-128": Case(128, 0.02, ("--conc", "128", "--n", "256", "--stream")),
}


def tree(pid: int) -> list[int]:
    found = [pid]
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and int(stat(entry)[1]) == pid:
                found += tree(int(entry))
        except OSError:
            continue
    return found


def stat(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def cpu(pid: int) -> float:
    total = 0.0
    for each in tree(pid):
        try:
            fields = stat(each)
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=2) as answer:
        return bytes(answer.read())


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            get(url)
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
        else:
            return True
    return False


def measure(peer: dict[str, str], case: Case, base: int) -> dict[str, float] | None:
    """Run one proxy under one load. None: it could not be started."""
    ports = {"port": base, "p0": base + 1, "p1": base + 2, "d0": base + 3, "d1": base + 4, "aux": base + 5}
    mock = [sys.executable, str(HERE / "mock_engine.py")]
    flags = ["--chunks", str(case.chunks), "--itl", str(case.itl)]
    engines = [subprocess.Popen([*mock, str(ports[name]), *flags]) for name in ("p0", "p1", "d0", "d1")]
    url = f"http://127.0.0.1:{base}"
    with tempfile.TemporaryFile() as log:
        proxy = subprocess.Popen(
            shlex.split(peer["cmd"].format(**ports)), stdout=log, stderr=log, start_new_session=True
        )
        try:
            for number, engine in enumerate(engines, 1):
                wait_for(f"http://127.0.0.1:{base + number}/health", engine)
            if not wait_for(url + peer["ready"], proxy):
                return None
            time.sleep(float(peer.get("settle", 1)))
            load = [sys.executable, str(HERE / "load.py"), url, *case.flags]
            subprocess.run([*load, "--n", "64"], capture_output=True, check=True)  # warm: the last --n wins
            before = cpu(proxy.pid)
            result = json.loads(subprocess.run(load, capture_output=True, check=True).stdout)
            spent = 1e6 * (cpu(proxy.pid) - before)
            counts = [json.loads(get(f"http://127.0.0.1:{ports[name]}/_counts")) for name in ("d0", "d1")]
            return {
                "us_request": spent / max(1, result["ok"]),
                "us_chunk": spent / max(1, result["chunks"]) if result["chunks"] else 0.0,
                "errors": sum(result["errors"].values()),
                "split": sum(c["decode_with_kv"] for c in counts) / max(1, sum(c["decode"] for c in counts)),
            }
        finally:
            os.killpg(proxy.pid, signal.SIGTERM)
            try:
                proxy.wait(8)
            except subprocess.TimeoutExpired:
                os.killpg(proxy.pid, signal.SIGKILL)
                proxy.wait()
            for engine in engines:
                engine.kill()
                engine.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, default=HERE / "peers.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default=",".join(CASES))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    peers = json.loads(options.peers.read_text())
    chosen = {name: peer for name, peer in peers.items() if options.only in name}
    for name in [name for name, peer in chosen.items() if shutil.which(shlex.split(peer["cmd"])[0]) is None]:
        print(f"left out: {name} is not installed", file=sys.stderr)
        del chosen[name]
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    base = 21000
    for _ in range(options.rounds):
        for name, peer in chosen.items():
            for load in options.loads.split(","):
                base = 21000 if base > 29000 else base + 10
                result = measure(peer, CASES[load], base)
                if result is None:
                    print(f"left out: {name} did not start", file=sys.stderr)
                    continue
                results.setdefault((load, name), []).append(result)
    print("| load | proxy | CPU us/request | CPU us/chunk | split | errors |\n|---|---|---|---|---|---|")
    for (load, name), rows in sorted(results.items()):
        median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(
            f"| {load} | {name} | {median['us_request']:.0f} | {median['us_chunk']:.1f} "
            f"| {median['split']:.2f} | {sum(row['errors'] for row in rows):.0f} |"
        )


if __name__ == "__main__":
    main()
