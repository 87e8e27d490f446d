"""`pdproxy bench`: an open-loop load on one or more servers, and what they made of it, side by
side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import secrets
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pdproxy.cli.parser import examples
from pdproxy.settings.errors import SettingsError
from pdproxy_lab.cli.bench_options import add_options
from pdproxy_lab.cli.bench_profile import records_of, simulation_of
from pdproxy_lab.cli.load_options import (
    DEFAULT_BURSTINESS,
    as_settings_error,
    check_writable,
    mistakes_with_arrivals,
    mistakes_with_trace,
)

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands
    from pdproxy_lab.bench.client import RunProgress
    from pdproxy_lab.bench.record import Record
    from pdproxy_lab.bench.session import BenchOptions
    from pdproxy_lab.bench.workload import Planned

_INTERRUPTED = 130
_MAX_KEY = 8192


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "bench",
        help=summary,
        description="Send requests at times that do not depend on the answers, and print "
        "latencies, "
        "rates and how many requests "
        "were good. Several servers are measured alternately with the same loads. The exit code "
        "is 0 if all was measured, 1 if "
        "not, 2 if the options are wrong, 130 if it was interrupted.",
        usage="pdproxy bench [NAME=]URL [...] --rate R [option ...]",
        epilog=examples(
            "pdproxy bench 127.0.0.1:8000 --rate 8 --input-tokens 4000 --output-tokens 128 --slo "
            "ttft=500ms,tpot=15ms",
            "pdproxy bench split=127.0.0.1:8000 plain=127.0.0.1:8200 --rate 2:12 --arrivals ramp "
            "--plot bench.png",
            "pdproxy bench 127.0.0.1:8000 --trace trace.jsonl --slice 0:60 --spread --json "
            "bench.jsonl",
            "pdproxy bench --compare before.jsonl after.jsonl",
        ),
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the report, return the exit code."""
    from pdproxy_lab.bench import plots
    from pdproxy_lab.bench.compare import read_records, table_of
    from pdproxy_lab.bench.errors import BenchError
    from pdproxy_lab.bench.report import text_of

    code = 0
    records: list[Record] = []
    try:
        _check(arguments)
        if arguments.plot is not None:
            plots.check(arguments.plot)
            check_writable(arguments.plot, "--plot")
        for path in arguments.compare:
            records += read_records(path)
        if arguments.servers:
            options, name = _options(arguments), arguments.profile
            simulation = None if name is None else simulation_of(name, options.plan, options.slos)
            code = _measure(options, arguments.json, records)
            if simulation is not None and code != _INTERRUPTED:
                records += records_of(simulation, name, options.seeds)
        if records:
            table = table_of(records)
            print(text_of(table, records), end="")
            if arguments.plot is not None:
                plots.plot(table, arguments.plot)
    except BenchError as error:
        sys.stderr.write(f"{arguments.prog}: {error}\n")
        return error.code
    return code


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and those without effect."""
    mistakes = []
    if not arguments.servers and not arguments.compare:
        mistakes.append("a URL or --compare is missing")
    if arguments.servers and arguments.rate is None and arguments.trace is None:
        mistakes.append("--rate or --trace is missing")
    if arguments.duration is not None and arguments.requests is not None:
        mistakes.append("--duration and --requests: give one of them")
    mistakes += mistakes_with_arrivals(arguments)
    mistakes += mistakes_with_trace(arguments, ("scale", "slice", "max-tokens", "spread"))
    if arguments.trace is not None and arguments.rate is not None and arguments.scale is not None:
        mistakes.append("--scale: has no effect with --rate")
    if arguments.token_ids is not None and arguments.endpoint == "chat":
        mistakes.append("--token-ids: has no effect with --endpoint chat")
    if arguments.api_key is not None and arguments.api_key_file is not None:
        mistakes.append("--api-key and --api-key-file: give one of them")
    if arguments.detailed and arguments.json is None:
        mistakes.append("--detailed: has no effect without --json")
    if not arguments.servers and arguments.json is not None:
        mistakes.append("--json: has no effect without a URL")
    if not arguments.servers and arguments.profile is not None:
        mistakes.append("--profile: has no effect without a URL")
    names = [slo.name for slo in arguments.slo]
    mistakes += [
        f"--slo: two have the name {name}" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    if mistakes:
        raise SettingsError(*mistakes)


def _options(arguments: argparse.Namespace) -> BenchOptions:
    from pdproxy import __version__
    from pdproxy_lab.bench import reading
    from pdproxy_lab.bench.record import Shape
    from pdproxy_lab.bench.session import BenchOptions
    from pdproxy_lab.bench.workload import Lengths

    plan, left_out = _plan(arguments)
    shape = Shape(
        endpoint=arguments.endpoint,
        arrivals="trace" if arguments.rate is None else arguments.arrivals,
        rate=None
        if arguments.rate is None
        else sum(r for r in arguments.rate if r) / (2 if arguments.rate[1] else 1),
        burstiness=arguments.burstiness or DEFAULT_BURSTINESS
        if arguments.arrivals == "burst"
        else 1.0,
        seed=0,
        salt=arguments.salt or secrets.token_hex(8),
        requests=0,
        trace=None if arguments.trace is None else arguments.trace.name,
        left_out=left_out,
    )
    with as_settings_error(""):
        servers = reading.servers(arguments.servers)
    return BenchOptions(
        servers=servers,
        seeds=range(arguments.first_seed, arguments.first_seed + arguments.seeds),
        plan=plan,
        shape=shape,
        endpoint=arguments.endpoint,
        slos=tuple(arguments.slo),
        model=arguments.model,
        headers=dict(arguments.header) | authorization(arguments),
        timeout=arguments.timeout,
        max_in_flight=arguments.max_in_flight,
        allow_lag=arguments.allow_lag,
        ids=arguments.token_ids or Lengths(300, 4000),
        extra=arguments.extra_body,
        warm_up=arguments.warm_up,
        detailed=arguments.detailed,
        tls=tls_of(arguments.ca),
        version=__version__,
    )


def _plan(arguments: argparse.Namespace) -> tuple[Callable[[int], list[Planned]], int]:
    """Return what makes the requests of a seed, and how many of the trace were left out for their
    length.
    """
    from pdproxy_lab.bench.arrivals import Arrivals
    from pdproxy_lab.bench.trace import cut, read_trace, spread
    from pdproxy_lab.bench.workload import Lengths, replayed, synthetic

    arrivals = None
    if arguments.rate is not None:
        with as_settings_error("--rate: "):
            low, high = arguments.rate
            arrivals = Arrivals(
                kind=arguments.arrivals,
                rate=low,
                end_rate=high,
                burstiness=arguments.burstiness or DEFAULT_BURSTINESS,
            )
    duration, requests = arguments.duration, arguments.requests
    if arguments.trace is None:
        assert arrivals is not None
        inputs = arguments.input_tokens or Lengths(1024, 1024)
        outputs = arguments.output_tokens or Lengths(128, 128)
        length = None if requests is not None else duration or 60.0

        def plan(seed: int) -> list[Planned]:
            return synthetic(arrivals, inputs, outputs, seed, duration=length, requests=requests)

        left_out = 0
    else:
        with as_settings_error("--trace: "):
            entries = cut(read_trace(arguments.trace), *(arguments.slice or (0.0, math.inf)))
            entries = spread(entries) if arguments.spread else entries
            fitting = [
                e
                for e in entries
                if e.input_tokens + e.output_tokens <= (arguments.max_tokens or math.inf)
            ]
            left_out = len(entries) - len(fitting)

        def plan(seed: int) -> list[Planned]:
            scale = arguments.scale or 1.0
            return replayed(
                fitting, seed, scale=scale, arrivals=arrivals, duration=duration, requests=requests
            )

    with as_settings_error(""):
        if not plan(0):
            raise ValueError("no requests: the trace's slice or the duration is too short")
    return plan, left_out


def authorization(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the header of --api-key or --api-key-file."""
    key = arguments.api_key
    if arguments.api_key_file is not None:
        try:
            with arguments.api_key_file.open("rb") as file:
                key = file.read(_MAX_KEY).decode("ascii", "replace").strip()
        except OSError as error:
            raise SettingsError(f"--api-key-file: can't be read: {error.strerror}") from None
    if key is None:
        return {}
    if not key or not key.isascii() or not key.isprintable():
        raise SettingsError("--api-key: expected a key of printable ASCII")
    return {"authorization": f"Bearer {key}"}


def tls_of(ca: Path | None) -> ssl.SSLContext | None:
    """Return what trusts the certificates of --ca, None without."""
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"--ca: {ca.name}: {error.strerror or 'no certificates in PEM'}"
        ) from None


def _measure(options: BenchOptions, path: Path | None, records: list[Record]) -> int:
    """Measure, add the records, write each to the file as soon as it is known; return the exit
    code.
    """
    from pdproxy_lab.bench.session import BenchSession

    with contextlib.ExitStack() as stack:
        file = None
        if path is not None:
            try:
                file = stack.enter_context(path.open("wb"))
            except OSError as error:
                raise SettingsError(
                    f"--json: {path.name} can't be written: {error.strerror}"
                ) from None
        refused = False

        def keep(record: Record) -> None:
            nonlocal refused
            records.append(record)
            refused = refused or "run" in record["pdproxy"]["not_measured"]
            _append(file, record)

        terminal = sys.stderr.isatty()
        session = BenchSession(options, keep, _show if terminal else None)
        _loop(session)
        if terminal:
            sys.stderr.write("\r\x1b[K")
    if session.stopped:
        sys.stderr.write("pdproxy bench: interrupted\n")
        return _INTERRUPTED
    return 1 if refused else 0


def _append(file: IO[bytes] | None, record: Record) -> None:
    import msgspec

    if file is not None:
        file.write(msgspec.json.encode(record) + b"\n")
        file.flush()


def _loop(session: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, session.stop)
        await session.measure()

    try:
        from uvloop import new_event_loop
    except ImportError:
        asyncio.run(main())
        return
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())


def _show(name: str, seed: int, progress: RunProgress) -> None:
    try:
        width = max(os.get_terminal_size(sys.stderr.fileno()).columns - 1, 20)
    except (OSError, ValueError):  # no terminal by now
        width = 80
    failed = f", {progress['failed']} failed" if progress["failed"] else ""
    line = (
        f"{name}, seed {seed}: {progress['seconds']:.0f} s, {progress['sent']} sent, "
        f"{progress['in_flight']} in flight{failed}"
    )
    with contextlib.suppress(OSError):
        sys.stderr.write(f"\r\x1b[K{line[:width]}")
        sys.stderr.flush()
