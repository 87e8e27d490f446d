"""`pdproxy bench`: an open-loop load on one or more servers, and what they made of it, side by
side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
import ssl
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pdproxy.cli.parser import examples
from pdproxy.settings.errors import SettingsError
from pdproxy_lab.bench.reading import MAX_CLASSES
from pdproxy_lab.cli.bench_load import mean_of, plans_of
from pdproxy_lab.cli.bench_options import add_options
from pdproxy_lab.cli.bench_profile import records_of, simulation_of
from pdproxy_lab.cli.load_options import (
    DEFAULT_BURSTINESS,
    as_settings_error,
    check_writable,
    mistakes_with_arrivals,
    mistakes_with_trace,
)
from pdproxy_lab.cli.progress import ProgressLine, left_text

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands
    from pdproxy_lab.bench.record import Record
    from pdproxy_lab.bench.session import BenchOptions, Progress
    from pdproxy_lab.bench.slo import BenchSlo

_INTERRUPTED = 130
_MAX_KEY = 8192
_MAX_RUNS = 500
"""Of a sweep."""


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
        usage="pdproxy bench [NAME=]URL [...] (--rate R | --sweep RATES) [option ...]",
        epilog=examples(
            "pdproxy bench 127.0.0.1:8000 --rate 8 --input-tokens 4000 --output-tokens 128 --slo "
            "ttft=500ms,tpot=15ms",
            "pdproxy bench split=127.0.0.1:8000 plain=127.0.0.1:8200 --rate 2:12 --arrivals ramp "
            "--plot bench.png",
            "pdproxy bench split=127.0.0.1:8000 plain=127.0.0.1:8200 --sweep 2:16:2 --slo "
            "ttft=500ms,tpot=15ms --html sweep.html",
            "pdproxy bench 127.0.0.1:8000 --trace trace.jsonl --slice 0:60 --spread --json "
            "bench.jsonl",
            "pdproxy bench --compare before.jsonl after.jsonl",
        ),
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the report, return the exit code."""
    from pdproxy_lab.bench import figure, page, plots, sweep_report
    from pdproxy_lab.bench.compare import read_records, table_of
    from pdproxy_lab.bench.curves import curves_of
    from pdproxy_lab.bench.errors import BenchError
    from pdproxy_lab.bench.report import text_of

    code = 0
    records: list[Record] = []
    try:
        _check(arguments)
        if arguments.plot is not None:
            figure.check(arguments.plot)
            check_writable(arguments.plot, "--plot")
        if arguments.html is not None:
            figure.check_matplotlib("--html")
            check_writable(arguments.html, "--html")
        for path in arguments.compare:
            records += read_records(path)
        if arguments.servers:
            options, name = _options(arguments), arguments.profile
            simulations = (
                []
                if name is None
                else [simulation_of(name, load, tuple(arguments.slo)) for load in options.loads]
            )
            code = _measure(options, arguments.json, records)
            for simulation, load in zip(simulations, options.loads, strict=False):
                if code != _INTERRUPTED:
                    records += records_of(simulation, name, options.seeds, load.shape.rate)
        curves = curves_of(records)
        if curves:
            print(sweep_report.text_of(curves, records), end="")
        elif records:
            print(text_of(table_of(records), records), end="")
        if records and (arguments.plot or arguments.html):
            drawn = plots.curves(curves, records) if curves else plots.bars(records)
            if arguments.plot is not None:
                figure.save(drawn, arguments.plot)
            if arguments.html is not None:
                page.write(page.page_of(records, curves, drawn), arguments.html)
    except BenchError as error:
        sys.stderr.write(f"{arguments.prog}: {error}\n")
        return error.code
    return code


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and those without effect."""
    mistakes = []
    if not arguments.servers and not arguments.compare:
        mistakes.append("a URL or --compare is missing")
    mistakes += _mistakes_with_sharegpt(arguments)
    given = [arguments.rate, arguments.sweep, arguments.trace]
    if arguments.servers and all(one is None for one in given):
        mistakes.append("--rate, --sweep or --trace is missing")
    mistakes += _mistakes_with_sweep(arguments)
    if arguments.duration is not None and arguments.requests is not None:
        mistakes.append("--duration and --requests: give one of them")
    mistakes += mistakes_with_arrivals(arguments)
    needed = ("scale", "slice", "spread", *(() if arguments.sharegpt else ("max-tokens",)))
    mistakes += mistakes_with_trace(arguments, needed)
    if arguments.trace is not None and arguments.scale is not None:
        mistakes += [
            f"--scale: has no effect with --{name}"
            for name in ("rate", "sweep")
            if getattr(arguments, name) is not None
        ]
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
    names = [one.name for one in (*arguments.slo, *arguments.classes)]
    mistakes += [
        f"--slo, --class: two have the name {name}"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    mistakes += _mistakes_with_classes(arguments)
    if mistakes:
        raise SettingsError(*mistakes)


def _mistakes_with_classes(arguments: argparse.Namespace) -> list[str]:
    classes, slos = arguments.classes, _slos(arguments)
    mistakes = []
    if len(classes) > MAX_CLASSES:
        mistakes.append(f"--class: {len(classes)} classes, {MAX_CLASSES} at most")
    if arguments.trace or arguments.sharegpt:
        mistakes += [
            f"--class {one.name}: share and output have no effect with --trace or --sharegpt"
            for one in classes
            if one.share is not None or one.outputs is not None
        ]
    if arguments.send_slo and not any(slo.ttft or slo.tpot or slo.gap for slo in slos):
        mistakes.append("--send-slo: no --slo or --class has ttft, tpot or gap")
    if arguments.session_header and arguments.trace is None:
        mistakes.append("--session-header: has no effect without --trace")
    return mistakes


def _slos(arguments: argparse.Namespace) -> tuple[BenchSlo, ...]:
    """Return the SLOs of all requests, then those of classes."""
    return (*arguments.slo, *(one.slo for one in arguments.classes if one.slo is not None))


def _mistakes_with_sharegpt(arguments: argparse.Namespace) -> list[str]:
    if arguments.sharegpt is None:
        return []
    if arguments.trace is not None:
        return ["--trace and --sharegpt: give one of them"]
    return [
        f"--{name}: has no effect with --sharegpt"
        for name in ("input-tokens", "output-tokens", "token-ids")
        if getattr(arguments, name.replace("-", "_")) is not None
    ]


def _mistakes_with_sweep(arguments: argparse.Namespace) -> list[str]:
    if arguments.sweep is None:
        return (
            []
            if arguments.max_seconds is None
            else ["--max-seconds: has no effect without --sweep"]
        )
    mistakes = []
    if arguments.rate is not None:
        mistakes.append("--rate and --sweep: give one of them")
    if arguments.arrivals == "ramp":
        mistakes.append("--sweep: has no ramps")
    runs = len(arguments.sweep) * arguments.seeds * len(arguments.servers)
    if runs > _MAX_RUNS:
        mistakes.append(f"--sweep: {runs} runs, {_MAX_RUNS} at most: fewer rates, seeds or servers")
    return mistakes


def _options(arguments: argparse.Namespace) -> BenchOptions:
    import msgspec

    from pdproxy import __version__
    from pdproxy_lab.bench import reading
    from pdproxy_lab.bench.record import Shape
    from pdproxy_lab.bench.session import BenchOptions, Load
    from pdproxy_lab.bench.workload import Lengths

    file = arguments.trace or arguments.sharegpt
    rates = [(rate, None) for rate in arguments.sweep or ()] or [arguments.rate]
    plans, left_out = plans_of(arguments, rates)
    shape = Shape(
        endpoint=arguments.endpoint,
        arrivals="trace" if rates[0] is None else arguments.arrivals,
        rate=None,
        burstiness=arguments.burstiness or DEFAULT_BURSTINESS
        if arguments.arrivals == "burst"
        else 1.0,
        seed=0,
        salt=arguments.salt or secrets.token_hex(8),
        requests=0,
        trace=None if file is None else file.name,
        left_out=left_out,
    )
    with as_settings_error(""):
        servers = reading.servers(arguments.servers)
    return BenchOptions(
        servers=servers,
        seeds=range(arguments.first_seed, arguments.first_seed + arguments.seeds),
        loads=tuple(
            Load(plan, msgspec.structs.replace(shape, rate=mean_of(rate)))
            for plan, rate in zip(plans, rates, strict=True)
        ),
        sweep_seconds=None if arguments.sweep is None else arguments.max_seconds or 3600.0,
        endpoint=arguments.endpoint,
        slos=_slos(arguments),
        send_slo=arguments.send_slo,
        session_header=arguments.session_header,
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
            sweep = session.sweep
            beyond = sweep is not None and record["label"] in sweep.stopped
            refused = refused or ("run" in record["pdproxy"]["not_measured"] and not beyond)
            _append(file, record)

        line = stack.enter_context(ProgressLine())
        session = BenchSession(options, keep, lambda one: line.show(_shown(one)))
        _loop(session)
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


def _shown(one: Progress) -> str:
    seen = one.seen
    at = "" if one.rate is None else f", {one.rate:g} req/s"
    failed = f", {seen['failed']} failed" if seen["failed"] else ""
    return (
        f"run {one.run} of {one.runs}, {left_text(one.left)}: {one.name}{at}, seed {one.seed}: "
        f"{seen['sent']} sent, {seen['in_flight']} in flight{failed}"
    )
