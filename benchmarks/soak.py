"""Many clients for a long time before engines that fail at random: whether the proxy's memory, open
files, tasks, metrics and log stay flat.

Usage: soak.py [--seconds 1200] [--clients 64] [--pause 1.0] [--seed 1] [--every SECONDS] [--plot
FILE] [--out FILE] [--pairs 2] [--workers 1] [--keys 0] [--adapters 0] [--real]

`pdproxy serve` and pairs of prefill and decode simulated engines run as processes. Each client
asks, reads and judges its answer to the token, waits `--pause` seconds on average, and asks again;
some leave in the middle. Answers break at random, and engines are killed, restarted, terminated,
stopped, or lose their core, one every ten seconds or so. An engine that a broken answer leaves
without its core is started again, as its supervisor would. Engines leave the settings and join
again. With `--workers` one of them is killed every two minutes or so; with `--keys` each request
has another client's key, and a tenth of the keys change with the settings; with `--adapters` each
request names another adapter; with `--real` a pair of real vLLM engines serves a fourth of the
requests, and is killed, ended and stopped, too.

Every `--every` seconds the proxy's resident memory and open files are read from /proc, its tasks
and the number of its metrics' series from its metrics, and how much its log has grown. Of several
processes those count that live from the first sample to the last.

Prints what each measure was at the start, in the middle and at the end (means of tenths), and how
much it has grown by its slope once a fifth of the time is over; then what is held without any
client. The exit code is 1 if an answer was wrong, if a measure has grown by more than chance
explains, or if files or tasks are left.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import soak_faults
from pdproxy_lab.bench import figure
from pdproxy_lab.bench.errors import BenchError
from soak_stage import MODEL, REAL, Size, Stage, stage
from stage import PAGE_KB, machine, raise_files, tree
from tests.chaos.answers import Answer, MalformedError, Told, read_answer, told
from tests.chaos.oracle import Body, bodies

LEAVES = 0.1
"""The share of requests whose client leaves."""
CUT = 2.0
"""Seconds behind the end of a worker in which a connection that breaks off was that worker's."""
PATIENCE = 180.0
"""Seconds that a client waits for its answer."""
QUIET = 20.0
"""Seconds without clients until what is left is read: idle connections are closed after 5 s."""
WARM = 0.2
"""The part of the time that is left out: caches fill."""
ON_REAL = 0.25
"""The share of requests to real engines, where there are some."""
MEASURES = {
    "memory": ("MB", 4.0),
    "files": ("open files", 16.0),
    "tasks": ("tasks", 16.0),
    "series": ("series", 20.0),
    "log": ("KB per sample", 8.0),
}
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
    """What was read at one time. `at`: seconds since the beginning; `memory` in MB; `log`: KB since
    the sample before. `processes`: memory and files of each, by its id.
    """

    at: float
    memory: float
    files: float
    tasks: float
    series: float = 0.0
    log: float = 0.0
    processes: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@dataclass
class Tally:
    """How requests ended, which engines failed how, and what was wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


# -- clients


async def ask(
    port: int, body: Body, ident: str, leaves_after: float | None = None, key: str | None = None
) -> Answer:
    """Return the answer to a request; as far as it came, for a client that leaves after some
    seconds. `key`: the client's.

    Raises:
        OSError, EOFError, TimeoutError: there is none, or it broke off.
        MalformedError: it is no HTTP.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = Answer()
    headers = () if key is None else (b"authorization: Bearer %b" % key.encode(),)
    try:
        writer.write(body.request(ident, keep=False, headers=headers))
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
    if found == right:
        return "right"
    if right is not None and found.ends == {0: "completed"}:
        text = found.texts.get(0, "")
        if right.texts.get(0, "").startswith(text):
            return "half a response"  # its engine was terminated, and names no abort
    return f"wrong: {found} instead of {right}"


async def client(
    number: int, at: Stage, asked: Sequence[Body], end: float, pause: float, tally: Tally
) -> None:
    """Send requests until the time is over."""
    chance = random.Random(number)
    await asyncio.sleep(chance.uniform(0, pause))
    count = 0
    while time.monotonic() < end:
        count += 1
        body = _with_adapter(chance.choice(asked), at.size, chance)
        key = at.next_key()
        leaves = chance.uniform(0, 0.5) if chance.random() < LEAVES else None
        try:
            answer = await ask(at.proxy, body, f"soak-{number}-{count}", leaves, key)
            how = end_of(answer, body.right)
        except (OSError, EOFError, TimeoutError, MalformedError) as error:
            how = f"wrong: {type(error).__name__}"
            if leaves is not None and isinstance(error, TimeoutError):
                how = "left"
            elif time.monotonic() - at.killed_at < CUT:
                how = "cut with its worker"
        kind, _, text = how.partition(": ")
        tally.ends[kind] += 1
        if kind == "wrong":
            tally.wrong.append(f"request soak-{number}-{count}: {text[:300]}")
        await asyncio.sleep(chance.expovariate(1 / pause))


def _with_adapter(body: Body, size: Size, chance: random.Random) -> Body:
    """Return a request that names any of the adapters, if its engines have some: their answers are
    the model's.
    """
    if not size.adapters or body.fields["model"] != MODEL:
        return body
    fields = {**body.fields, "model": f"adapter-{chance.randrange(size.adapters)}"}
    return Body(body.path, fields, body.right)


# -- measures


def sample(at: Stage, began: float, logged: int = 0) -> Sample:
    """Read the proxy's measures. `logged`: how large its log was at the sample before."""
    processes = {}
    for pid in tree(at.pid):
        with suppress(OSError):  # it was killed
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{pid}/fd"))
            processes[pid] = pages * PAGE_KB / 1024, float(files)
    page = _metrics(at.proxy)
    (tasks,) = _TASKS.findall(page)
    return Sample(
        time.monotonic() - began,
        *_sums(processes.values()),
        float(tasks),
        float(sum(not line.startswith("#") for line in page.splitlines())),
        (at.log.stat().st_size - logged) / 1024,
        processes,
    )


def _metrics(port: int) -> str:
    """Return the page of metrics. The worker that has the connection may be killed meanwhile."""
    tries = 0
    while True:
        tries += 1
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                page: bytes = answer.read()
                return page.decode()
        except (OSError, http.client.HTTPException):
            if tries == 3:
                raise


def _sums(processes: Iterable[tuple[float, float]]) -> tuple[float, float]:
    memory, files = zip(*processes, strict=True)
    return sum(memory), sum(files)


def lasting(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with the memory and the files of the processes that are in all of them."""
    pids = set.intersection(*(set(one.processes) for one in samples))
    if not pids:
        return [*samples]
    found = []
    for one in samples:
        memory, files = _sums(one.processes[pid] for pid in pids)
        found.append(replace(one, memory=memory, files=files))
    return found


async def sampled(at: Stage, began: float, end: float, every: float) -> list[Sample]:
    """Read the measures at intervals, and print them."""
    found: list[Sample] = []
    logged = at.log.stat().st_size
    while (now := time.monotonic()) < end:
        one = await asyncio.to_thread(sample, at, began, logged)
        logged += int(one.log * 1024)
        found.append(one)
        print(
            f"{one.at:7.0f} s: {one.memory:7.1f} MB, {one.files:4.0f} files, {one.tasks:4.0f} "
            f"tasks, {one.series:5.0f} series, {one.log:5.0f} KB logged",
            flush=True,
        )
        await asyncio.sleep(max(0.0, min(now + every, end) - time.monotonic()))
    return lasting(found)


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
    shown = [  # earlier runs have fewer measures
        one for one in verdicts(samples) if any(getattr(sample, one.name) for sample in samples)
    ]
    rows = figure.panels(made, len(shown), 1)
    for axes, one in zip(rows, shown, strict=True):
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
    if at.real is not None:
        served = bodies(options.seed, REAL)
        for number, body in enumerate(served):
            answer = await ask(at.real.engines["decode"].port, body, f"judge-real-{number}")
            body.right = told(answer)
        asked *= round(1 / ON_REAL) - 1
        asked += served
    before = sample(at, time.monotonic())
    await asyncio.to_thread(soak_faults.arm, at.admin)
    began = time.monotonic()
    end = began + options.seconds
    chance = random.Random(options.seed)
    async with asyncio.TaskGroup() as group:
        samples = group.create_task(sampled(at, began, end, options.every))
        group.create_task(soak_faults.misfortunes(at.admin, end, chance, tally.faults))
        group.create_task(soak_faults.supervised(at.admin, end, tally.faults))
        group.create_task(soak_faults.adapters_loaded(at, end))
        for course in (
            soak_faults.changes,
            soak_faults.workers_killed,
            soak_faults.real_engines,
        ):
            group.create_task(course(at, end, random.Random(options.seed), tally.faults))
        for number in range(options.clients):
            group.create_task(client(number, at, asked, end, options.pause, tally))
    for _, port in at.admin:
        await asyncio.to_thread(soak_faults.post, port, "restart")
    if at.real is not None:
        await asyncio.to_thread(at.real.wait)
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
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keys", type=int, default=0)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="a pair of real engines, too")
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
        or min(options.clients, options.pairs, options.workers) < 1
    ):
        parser.error(
            "--seconds, --every, --pause, --clients, --pairs, --workers: expected numbers above 0"
        )
    if min(options.keys, options.adapters) < 0:
        parser.error("--keys and --adapters: expected 0 or more")
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
    size = Size(options.pairs, options.workers, options.keys, options.adapters, options.real)
    with stage(options.seed, size) as at:
        samples, tally, before, after = asyncio.run(measured(options, at))
    if len(samples) < SAMPLES:
        tally.wrong.insert(0, f"only {len(samples)} samples: too few to judge")
    found = verdicts(samples) if len(samples) >= SAMPLES else []
    lines = report(found, tally, before, after)
    print("\n".join(lines))
    if options.plot is not None and found:
        plot(samples, lines, options.plot)
    if options.out is not None:
        rows: list[dict[str, Any]] = [
            {name: value for name, value in vars(one).items() if name != "processes"}
            for one in samples
        ]
        options.out.write_text(
            json.dumps({"machine": machine(), "result": lines, "samples": rows}, indent=1) + "\n"
        )
    return int(bool(tally.wrong or left(before, after)) or not all(one.flat for one in found))


if __name__ == "__main__":
    sys.exit(main())
