"""Many clients for a long time before engines that fail at random: whether the proxy's memory, open
files and tasks stay flat.

Usage: soak.py [--seconds 1200] [--clients 64] [--pause 1.0] [--seed 1] [--every SECONDS] [--plot
FILE] [--out FILE]

`pdproxy serve` and two prefill and two decode simulated engines run as processes. Each client asks,
reads and judges its answer to the token, waits `--pause` seconds on average, and asks again; some
leave in the middle. Answers break at random, and engines are killed, restarted, terminated,
stopped, or lose their core, one every ten seconds or so. An engine that a broken answer leaves
without its core is started again, as its supervisor would. Every `--every` seconds the proxy's
resident memory and open files are read from /proc, and its tasks from its metrics.

Prints what each measure was at the start, in the middle and at the end (means of tenths), and how
much it has grown by its slope once a fifth of the time is over; then what is held without any
client. The exit code is 1 if an answer was wrong, if a measure has grown by more than chance
explains, or if files or tasks are left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, linear_regression
from tempfile import TemporaryDirectory
from typing import Any

import simulated
import soak_faults
from pdproxy_lab.bench import figure
from pdproxy_lab.bench.errors import BenchError
from stage import PAGE_KB, free_ports, machine, raise_files
from tests.chaos.answers import Answer, MalformedError, Told, read_answer, told
from tests.chaos.oracle import Body, bodies

MODEL = "tiny"
SETTINGS = """\
deadlines: {connect: 1, prefill: 5, first_token: 5, between_tokens: 3, continuation: 5, abandoned_prefill: 3, release: 3,
  total: 120}
probes: {interval: 1, scrape_interval: 4}
health: {stalled_after: 4, canary_timeout: 1}
"""  # noqa: E501
LEAVES = 0.1
"""The share of requests whose client leaves."""
PATIENCE = 180.0
"""Seconds that a client waits for its answer."""
QUIET = 20.0
"""Seconds without clients until what is left is read: idle connections are closed after 5 s."""
WARM = 0.2
"""The part of the time that is left out: caches fill."""
MEASURES = {"memory": ("MB", 4.0), "files": ("open files", 16.0), "tasks": ("tasks", 16.0)}
"""Units, and by how much a measure may grow in any case: less is noise."""
GROWTH = 0.05
"""The part of its mean by which a measure may grow in the time that counts."""
SURE = 3.0
"""Standard errors of a slope: less is chance."""
LEFT = {"files": 4.0, "tasks": 2.0}
"""How many more there may be behind all than before: probes that are under way."""
SAMPLES = 10
"""So many samples are judged at least."""
_TASKS = re.compile(r"^pdproxy_tasks (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """What was read at one time. `at`: seconds since the beginning; `memory` in MB."""

    at: float
    memory: float
    files: float
    tasks: float


@dataclass
class Tally:
    """How requests ended, which engines failed how, and what was wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """Where all listen. `admin`: by the role of an engine."""

    pid: int
    proxy: int
    judge: int
    admin: tuple[tuple[str, int], ...]


@contextmanager
def stage(seed: int) -> Iterator[Stage]:
    """Run the engines, one that is only asked what is right, and the proxy, until the block
    ends.
    """
    roles = ("prefill", "prefill", "decode", "decode")
    proxy, judge, *rest = free_ports(2 + 2 * len(roles))
    ports, admin = rest[: len(roles)], rest[len(roles) :]
    usual = ("--model", MODEL, "--eos-every", "0", "--profile", "h200-8b")
    with ExitStack() as stack:
        file = Path(stack.enter_context(TemporaryDirectory())) / "pdproxy.yaml"
        file.write_text(SETTINGS)
        started: list[tuple[str, ...]] = [
            ("sim", "--port", str(judge), "--connector", "none", *usual)
        ]
        for number, role in enumerate(roles):
            own = (
                "--port",
                str(ports[number]),
                "--admin-port",
                str(admin[number]),
                "--seed",
                str(seed + number),
            )
            started.append(("sim", "--role", role, *own, *usual))
        urls: list[str] = []
        for role in dict.fromkeys(roles):
            urls += (
                f"--{role}",
                *(
                    f"127.0.0.1:{port}"
                    for port, own in zip(ports, roles, strict=True)
                    if own == role
                ),
            )
        processes = [stack.enter_context(simulated.running(*arguments)) for arguments in started]
        serve = (
            "serve",
            "--config",
            str(file),
            "--port",
            str(proxy),
            "--log-level",
            "error",
            *urls,
        )
        processes.append(stack.enter_context(simulated.running(*serve)))
        simulated.wait(
            [f"http://127.0.0.1:{judge}/health", f"http://127.0.0.1:{proxy}/ready"], processes
        )
        yield Stage(
            processes[-1].pid,
            proxy,
            judge,
            tuple(zip((role[0].upper() for role in roles), admin, strict=True)),
        )


# -- clients


async def ask(port: int, body: Body, ident: str, leaves_after: float | None = None) -> Answer:
    """Return the answer to a request; as far as it came, for a client that leaves after some
    seconds.

    Raises:
        OSError, EOFError, TimeoutError: there is none, or it broke off.
        MalformedError: it is no HTTP.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = Answer()
    try:
        writer.write(body.request(ident, keep=False))
        async with asyncio.timeout(PATIENCE if leaves_after is None else leaves_after):
            await read_answer(reader, answer)
    finally:
        writer.transport.abort()
    return answer


def end_of(answer: Answer, right: Told | None) -> str:
    """Return how a request ended: `right`, `error` with its status and its reason, or `wrong` with
    what is wrong.
    """
    try:
        found = told(answer)
    except MalformedError as error:
        return f"wrong: {error}"
    if found.error is not None or answer.status != 200:
        told_error = found.error or {}
        status, reason = told_error.get("code", answer.status), told_error.get("reason")
        words = ("event" * (answer.status == 200), str(status), reason)
        return " ".join(("error", *filter(None, words)))
    return "right" if found == right else f"wrong: {found} instead of {right}"


async def client(
    number: int, at: Stage, asked: Sequence[Body], end: float, pause: float, tally: Tally
) -> None:
    """Send requests until the time is over."""
    chance = random.Random(number)
    await asyncio.sleep(chance.uniform(0, pause))
    count = 0
    while time.monotonic() < end:
        count += 1
        body = chance.choice(asked)
        leaves = chance.uniform(0, 0.5) if chance.random() < LEAVES else None
        try:
            how = end_of(await ask(at.proxy, body, f"soak-{number}-{count}", leaves), body.right)
        except (OSError, EOFError, TimeoutError, MalformedError) as error:
            how = (
                "left"
                if leaves is not None and isinstance(error, TimeoutError)
                else f"wrong: {type(error).__name__}"
            )
        kind, _, text = how.partition(": ")
        tally.ends[kind] += 1
        if kind == "wrong":
            tally.wrong.append(f"request soak-{number}-{count}: {text[:300]}")
        await asyncio.sleep(chance.expovariate(1 / pause))


# -- measures


def sample(at: Stage, began: float) -> Sample:
    """Read the proxy's measures."""
    pages = int(Path(f"/proc/{at.pid}/statm").read_text().split()[1])
    files = len(os.listdir(f"/proc/{at.pid}/fd"))
    with urllib.request.urlopen(f"http://127.0.0.1:{at.proxy}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    (tasks,) = _TASKS.findall(page)
    return Sample(time.monotonic() - began, pages * PAGE_KB / 1024, files, float(tasks))


async def sampled(at: Stage, began: float, end: float, every: float) -> list[Sample]:
    """Read the measures at intervals, and print them."""
    found = []
    while (now := time.monotonic()) < end:
        one = await asyncio.to_thread(sample, at, began)
        found.append(one)
        print(
            f"{one.at:7.0f} s: {one.memory:7.1f} MB, {one.files:4.0f} files, {one.tasks:4.0f} "
            f"tasks",
            flush=True,
        )
        await asyncio.sleep(max(0.0, min(now + every, end) - time.monotonic()))
    return found


@dataclass(frozen=True)
class Verdict:
    """One measure: means of the first, the middle and the last tenth of the samples; growth by the
    slope of those that count.
    """

    name: str
    unit: str
    start: float
    middle: float
    end: float
    growth: float
    allowed: float

    @property
    def flat(self) -> bool:
        """Whether it has not grown by more than is allowed."""
        return self.growth <= self.allowed

    def line(self) -> str:
        """Return a row of the table."""
        values = " | ".join(f"{value:.1f}" for value in (self.start, self.middle, self.end))
        word = "flat" if self.flat else "GROWS"
        return (
            f"| {self.name}, {self.unit} | {values} | {self.growth:+.1f} (at most "
            f"{self.allowed:.1f}) | {word} |"
        )


def trend(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return the slope of values over time, and its standard error. At least three values."""
    slope, begin = linear_regression(times, values)
    rest = sum(
        (value - begin - slope * at) ** 2 for at, value in zip(times, values, strict=True)
    ) / (len(times) - 2)
    middle = fmean(times)
    return slope, sqrt(rest / sum((at - middle) ** 2 for at in times))


def left(before: Sample, after: Sample) -> list[str]:
    """Return what is held without any client that was not held before the first one."""
    return [
        f"{getattr(after, name):g} {MEASURES[name][0]} are left, {getattr(before, name):g} before"
        for name, more in LEFT.items()
        if getattr(after, name) > getattr(before, name) + more
    ]


def verdicts(samples: Sequence[Sample]) -> list[Verdict]:
    """Judge each measure. At least `SAMPLES` of them."""
    count, tenth = len(samples), max(1, len(samples) // 10)
    counted = samples[int(count * WARM) :]
    times = [one.at for one in counted]
    found = []
    for name, (unit, least) in MEASURES.items():
        values = [float(getattr(one, name)) for one in samples]
        middle = values[(count - tenth) // 2 :][:tenth]
        later = values[int(count * WARM) :]
        slope, error = trend(times, later)
        span = times[-1] - times[0]
        growth, allowed = slope * span, max(least, GROWTH * fmean(later), SURE * error * span)
        found.append(
            Verdict(
                name,
                unit,
                fmean(values[:tenth]),
                fmean(middle),
                fmean(values[-tenth:]),
                growth,
                allowed,
            )
        )
    return found


def plot(samples: Sequence[Sample], lines: Sequence[str], path: Path) -> None:
    """Draw the measures over time. `lines`: of the report."""
    with figure.styled():
        figure.save(_drawn(samples, lines), path)


def _drawn(samples: Sequence[Sample], lines: Sequence[str]) -> Any:
    ends = [
        one.partition(":")[0]
        for one in lines
        if " requests: {" in one or " engines failed: {" in one
    ]
    made = figure.figure("pdproxy before engines that fail", ", ".join(ends), (10, 8))
    minutes = [one.at / 60 for one in samples]
    rows = figure.panels(made, len(MEASURES), 1)
    for axes, one in zip(rows, verdicts(samples), strict=True):
        values = [getattr(sample, one.name) for sample in samples]
        growth = f"growth {one.growth:+.1f}, at most {one.allowed:.1f}"
        figure.describe(axes, f"{one.name}, {growth}", "flat")
        axes.plot(minutes, values, linewidth=1.2, color=figure.COLORS[0], label="measured")
        axes.axvspan(
            0, minutes[int(len(samples) * WARM)], alpha=0.15, label="not judged: caches fill"
        )
        axes.set_ylabel(one.unit)
        axes.set_ylim(bottom=0, top=1.15 * max(values))
    rows[-1].set_xlabel("minutes")
    made.legend(*rows[0].get_legend_handles_labels(), loc="outside right upper")
    figure.notes(made, ["not measured: CPU time; latencies"])
    return made


# -- the run


async def measured(
    options: argparse.Namespace, at: Stage
) -> tuple[list[Sample], Tally, Sample, Sample]:
    """Run it all. Return the samples under load, what became of the requests, and a sample before
    and one behind it all.
    """
    asked, tally = bodies(options.seed, MODEL), Tally()
    for number, body in enumerate(asked):
        body.right = told(await ask(at.judge, body, f"judge-{number}"))
    before = sample(at, time.monotonic())
    await asyncio.to_thread(soak_faults.arm, at.admin)
    began = time.monotonic()
    end = began + options.seconds
    chance = random.Random(options.seed)
    async with asyncio.TaskGroup() as group:
        samples = group.create_task(sampled(at, began, end, options.every))
        group.create_task(soak_faults.misfortunes(at.admin, end, chance, tally.faults))
        group.create_task(soak_faults.supervised(at.admin, end, tally.faults))
        for number in range(options.clients):
            group.create_task(client(number, at, asked, end, options.pause, tally))
    for _, port in at.admin:
        await asyncio.to_thread(soak_faults.post, port, "restart")
    await asyncio.sleep(QUIET)
    return samples.result(), tally, before, await asyncio.to_thread(sample, at, began)


def report(found: list[Verdict], tally: Tally, before: Sample, after: Sample) -> list[str]:
    """Return the lines of the result."""
    lines = ["| measure | start | middle | end | growth | |", "| -- | -- | -- | -- | -- | -- |"]
    lines += [one.line() for one in found]
    for name, one in (("before any request", before), ("20 s after the last", after)):
        lines.append(
            f"{name}: {one.memory:.1f} MB, {one.files:.0f} open files, {one.tasks:.0f} tasks"
        )
    lines.append(f"{tally.ends.total()} requests: {dict(tally.ends.most_common())}")
    lines.append(f"{tally.faults.total()} engines failed: {dict(sorted(tally.faults.items()))}")
    return [*lines, *(f"WRONG: {text}" for text in [*left(before, after), *tally.wrong[:10]])]


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the command line's options. Exits with code 2 if they are of no use: before the run,
    not behind it.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--every", type=float, help="seconds between samples (default: 10, in short runs fewer)"
    )
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--redraw", type=Path, metavar="FILE", help="draw a file of --out, and run nothing"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="a file for all that is printed at the end, and the samples, as JSON",
    )
    options = parser.parse_args(arguments)
    if options.every is None:
        options.every = min(10.0, options.seconds / (2 * SAMPLES))
    if (
        not all(0 < value < inf for value in (options.seconds, options.every, options.pause))
        or options.clients < 1
    ):
        parser.error("--seconds, --every, --pause and --clients: expected numbers above 0")
    if options.seconds < SAMPLES * options.every:
        parser.error(
            f"--every {options.every:g}: {options.seconds:g} s have fewer than {SAMPLES} samples"
        )
    if options.redraw is not None and options.plot is None:
        parser.error("--redraw: needs --plot")
    if options.plot is not None:
        try:
            figure.check(options.plot)
        except BenchError as error:
            parser.error(str(error))
    return options


def main() -> int:
    """Run it all, and return the exit code."""
    options = parsed(sys.argv[1:])
    if options.redraw is not None:
        known = json.loads(options.redraw.read_text())
        plot([Sample(**one) for one in known["samples"]], known["result"], options.plot)
        return 0
    raise_files()
    with stage(options.seed) as at:
        samples, tally, before, after = asyncio.run(measured(options, at))
    if len(samples) < SAMPLES:
        tally.wrong.insert(0, f"only {len(samples)} samples: too few to judge")
    found = verdicts(samples) if len(samples) >= SAMPLES else []
    lines = report(found, tally, before, after)
    print("\n".join(lines))
    if options.plot is not None and found:
        plot(samples, lines, options.plot)
    if options.out is not None:
        rows: list[dict[str, Any]] = [vars(one) for one in samples]
        options.out.write_text(
            json.dumps({"machine": machine(), "result": lines, "samples": rows}, indent=1) + "\n"
        )
    return int(bool(tally.wrong or left(before, after)) or not all(one.flat for one in found))


if __name__ == "__main__":
    sys.exit(main())
