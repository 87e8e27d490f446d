"""Whether `pdproxy simulate` agrees with simulated engines behind HTTP: one load on both, medians
side by side.

Usage: simulate_agrees.py [--prefill 1 --decode 1] [--aggregated 0] [-- --trace FILE --slice 0:60
--spread ...]

The engines are those of `pdproxy sim --profile`, in real time, behind `pdproxy serve`; `pdproxy
bench` sends the load, by default 4 requests per second with 4,000 tokens for 15 s. The exit code is
1 if a median of TTFT or TPOT differs by more than `--within`. The machine must be fast enough for
the engines: what their HTTP and bench take themselves is not in the profile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from simulated import running, wait
from stage import free_ports

MEDIANS = ("median_ttft_ms", "median_tpot_ms")


def main() -> int:
    """Run both, print the table, return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for role, count in (("prefill", 1), ("decode", 1), ("aggregated", 0)):
        parser.add_argument(f"--{role}", type=int, default=count)
    parser.add_argument("--profile", default="h200-8b")
    parser.add_argument("--within", type=float, default=0.1)
    parser.add_argument(
        "load",
        nargs=argparse.REMAINDER,
        help="options of the load, the same as those of `pdproxy bench`",
    )
    arguments = parser.parse_args()
    usual = ["--profile", arguments.profile, "--eos-every", "0", "--model", "sim"]
    synthetic = [
        "--rate",
        "4",
        "--duration",
        "15",
        "--input-tokens",
        "4000",
        "--output-tokens",
        "128",
        "--seeds",
        "1",
    ]
    load = [option for option in arguments.load if option != "--"] or synthetic
    roles = {role: getattr(arguments, role) for role in ("prefill", "decode", "aggregated")}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        *ports, proxy = free_ports(sum(roles.values()) + 1)
        engines = list(
            zip((role for role, count in roles.items() for _ in range(count)), ports, strict=True)
        )
        started = [
            (
                "sim",
                "--role",
                role,
                "--port",
                str(port),
                "--connector",
                "none" if role == "aggregated" else "nixl",
                *usual,
            )
            for role, port in engines
        ]
        urls = [part for role, port in engines for part in (f"--{role}", f"127.0.0.1:{port}")]
        started.append(("serve", "--port", str(proxy), "--log-level", "error", *urls))
        wait(
            [f"http://127.0.0.1:{proxy}/ready"],
            [stack.enter_context(running(*line)) for line in started],
        )
        real, virtual = folder / "http.jsonl", folder / "simulate.jsonl"
        command("bench", f"http=http://127.0.0.1:{proxy}", *load, "--json", str(real))
        fleet = [part for role, count in roles.items() for part in (f"--{role}", str(count))]
        command(
            "simulate",
            *fleet,
            "--profile",
            arguments.profile,
            *load,
            "--json",
            str(virtual),
            "--name",
            "simulate",
        )
        print(command("bench", "--compare", str(virtual), str(real)), end="")
        return judged(virtual, real, arguments.within)


def command(*line: str) -> str:
    """Run a command of pdproxy, return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pdproxy", *line], capture_output=True, text=True, timeout=900
    )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return done.stdout


def judged(virtual: Path, real: Path, within: float) -> int:
    """Print how much the medians of each seed differ, return the exit code."""
    code = 0
    runs = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in (virtual, real)
    ]
    for seed, (ours, theirs) in enumerate(zip(*runs, strict=True)):
        for name in MEDIANS:
            off = ours[name] / theirs[name] - 1 if theirs[name] else float("inf")
            code |= abs(off) > within
            print(f"seed {seed}: {name}: simulate differs from HTTP by {off:+.1%}")
    return code


if __name__ == "__main__":
    sys.exit(main())
