"""`pdproxy simulate`: what a fleet of engines would do with a load, without engines."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pdproxy.cli.parser import examples
from pdproxy.scheduling import policies
from pdproxy.settings.errors import SettingsError
from pdproxy_lab.bench import reading
from pdproxy_lab.bench.arrivals import KINDS, MAX_REQUESTS
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.cli.load_options import (
    DEFAULT_BURSTINESS,
    add_burstiness,
    add_engine_limits,
    add_lengths,
    add_profile,
    add_scale,
    add_trace,
    as_settings_error,
    entries_of,
    mistakes_with_arrivals,
    mistakes_with_trace,
    opened,
    shape_of,
    typed,
)
from pdproxy_lab.cli.progress import ProgressLine, seconds_left

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands
    from pdproxy.engine_model.fitted import FittedRanges
    from pdproxy_lab.simulate.load import Load
    from pdproxy_lab.simulate.run import Simulation

_INTERRUPTED = 130
_MAX_ENGINES = 4096
_AUTO = "auto"


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "simulate",
        help=summary,
        description="Run a load on virtual engines in virtual time, behind the scheduling code of "
        "the "
        "proxy, and print "
        "latencies, rates, goodput and how busy the engines were. Nothing is sent. 100,000 "
        "requests on 64 engines take a "
        "minute. The exit code is 0, or 2 if the options are wrong, or 130 if it was interrupted.",
        usage="pdproxy simulate (--prefill N --decode M | --aggregated K | --any K) (--rate R | "
        "--trace FILE) [option ...]",
        epilog=examples(
            "pdproxy simulate --prefill 5 --decode 3 --rate 40 --input-tokens 4000 "
            "--output-tokens 128 --slo ttft=500ms,tpot=8ms",
            "pdproxy simulate --aggregated 8 --chunk 1024 --rate 40 --input-tokens 4000 "
            "--output-tokens 128",
            "pdproxy simulate --any 8 --policy auto --rate 40 --input-tokens 4000 "
            "--output-tokens 128 --slo ttft=500ms,tpot=8ms",
            "pdproxy simulate --prefill 40 --decode 24 --trace trace.jsonl --spread --scale 20 "
            "--requests 100000 --seeds 1",
        ),
    )
    _add_fleet(parser.add_argument_group("engines"))
    _add_load(parser.add_argument_group("load (see `pdproxy bench --help`)"))
    report = parser.add_argument_group("report")
    report.add_argument(
        "--slo",
        metavar="[NAME:]LIMITS",
        type=typed(parse_slo),
        action="append",
        default=[],
        help="what a good request keeps, such as chat:ttft=500ms,tpot=15ms,gap=50ms,e2e=10s; may "
        "be repeated (default: none)",
    )
    report.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="write a JSON object per seed, which `pdproxy bench --compare` reads (default: no "
        "file)",
    )
    report.add_argument(
        "--name",
        metavar="NAME",
        help="name of the runs in the report (default: such as 5P3D, or 8A for aggregated ones)",
    )
    parser.set_defaults(run=run)


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    for role in ("prefill", "decode", "aggregated"):
        group.add_argument(
            f"--{role}",
            metavar="N",
            type=typed(reading.whole(0, _MAX_ENGINES)),
            default=0,
            help=f"number of {role} engines (default: 0)",
        )
    group.add_argument(
        "--any",
        metavar="N",
        type=typed(reading.whole(0, _MAX_ENGINES)),
        default=0,
        help="number of engines that serve requests whole or share them, as --policy auto decides "
        "(default: 0)",
    )
    add_profile(group)
    known = ", ".join(policies.names())
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}-policy",
            metavar="NAME",
            choices=policies.names(),
            help=f"how {role} engines are chosen: {known} (default: as --policy)",
        )
    group.add_argument(
        "--policy",
        metavar="NAME",
        choices=(*policies.names(), _AUTO),
        default="least_load",
        help=f"how engines are chosen: {known}, or {_AUTO}, which decides for each request where "
        f"it runs and whether it is "
        "split, for the first --slo (default: least_load)",
    )
    group.add_argument(
        "--chunk",
        metavar="TOKENS",
        type=typed(reading.whole(1, 10_000_000)),
        help="vLLM's --max-num-batched-tokens of all engines (default: the profile's)",
    )
    group.add_argument(
        "--prefill-chunk",
        metavar="TOKENS",
        type=typed(reading.whole(1, 10_000_000)),
        help="vLLM's --max-num-batched-tokens of prefill engines (default: as --chunk)",
    )
    add_engine_limits(group)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate",
        metavar="R",
        type=typed(reading.rate),
        help="requests per second; A:B with --arrivals ramp (default: the times of --trace)",
    )
    group.add_argument(
        "--arrivals",
        choices=KINDS,
        help="when requests come (default: poisson, or the times of --trace without --rate)",
    )
    add_burstiness(group)
    group.add_argument(
        "--duration",
        metavar="S",
        type=typed(reading.number(0.0, 86_400.0, "seconds")),
        help="seconds in which requests come (default: 300; with --trace: all of it, once)",
    )
    group.add_argument(
        "--requests",
        metavar="N",
        type=typed(reading.whole(1, MAX_REQUESTS)),
        help="number of requests, instead of --duration; a trace is repeated, if it has fewer "
        "(default: by --duration)",
    )
    add_lengths(group)
    group.add_argument(
        "--seeds",
        metavar="N",
        type=typed(reading.whole(1, 100)),
        default=3,
        help="runs, each with another seed (default: 3)",
    )
    add_trace(group, "; with --rate only the times are others")
    add_scale(group)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print the report, return the exit code."""
    # Imported here: wrong options should be reported at once.
    from pdproxy_lab.simulate.run import run_all, text

    _check(arguments)
    simulation, fitted = _simulation(arguments)
    fleet = simulation.fleet
    kinds = (
        (f"{fleet.prefill}P{fleet.decode}D", fleet.prefill or fleet.decode),
        (f"{fleet.aggregated}A", fleet.aggregated),
        (f"{fleet.any} any", fleet.any),
    )
    name = arguments.name or "+".join(word for word, count in kinds if count)
    with contextlib.ExitStack() as stack, as_settings_error(""):
        file = opened(arguments.json, stack)
        progress = _Progress(stack.enter_context(ProgressLine()), arguments.seeds)

        def done(record: dict[str, object]) -> None:
            _append(file, record)
            progress.ended()

        try:
            records = run_all(
                simulation,
                name,
                range(arguments.seeds),
                _asked(arguments),
                done,
                progress.requests,
            )
        except KeyboardInterrupt:
            sys.stderr.write("pdproxy simulate: interrupted\n")
            return _INTERRUPTED
    print(text(records, fitted), end="")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and those without effect."""
    mistakes = []
    if arguments.rate is None and arguments.trace is None:
        mistakes.append("--rate or --trace is missing")
    if arguments.duration is not None and arguments.requests is not None:
        mistakes.append("--duration and --requests: give one of them")
    mistakes += mistakes_with_trace(arguments, ("scale", "slice", "spread", "max-tokens"))
    if arguments.trace is not None and arguments.rate is not None and arguments.scale is not None:
        mistakes.append("--scale: has no effect with --rate")
    if arguments.trace is not None and arguments.rate is None and arguments.arrivals is not None:
        mistakes.append("--arrivals: has no effect with --trace and without --rate")
    mistakes += mistakes_with_arrivals(arguments)
    if not arguments.prefill:
        mistakes += [
            f"--{name.replace('_', '-')}: has no effect without --prefill"
            for name in ("prefill_chunk", "prefill_policy")
            if getattr(arguments, name) is not None
        ]
    if arguments.any and arguments.policy != _AUTO:
        mistakes.append(f"--any: only --policy {_AUTO} decides what such engines do")
    if arguments.policy == _AUTO and (arguments.prefill_policy or arguments.decode_policy):
        mistakes.append(
            f"--prefill-policy and --decode-policy: have no effect with --policy {_AUTO}"
        )
    names = [slo.name for slo in arguments.slo]
    mistakes += [
        f"--slo: two have the name {name}" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    if mistakes:
        raise SettingsError(*mistakes)


def _simulation(arguments: argparse.Namespace) -> tuple[Simulation, FittedRanges | None]:
    """Return what is simulated, and what its profile was fitted to."""
    from pdproxy.engine_model.profile import load
    from pdproxy.scheduling.ledger_engine import Role
    from pdproxy_lab.simulate.placements import auto, bounds_of
    from pdproxy_lab.simulate.run import Simulation
    from pdproxy_lab.simulate.shape import Fleet

    with as_settings_error(""):
        fleet = Fleet(
            prefill=arguments.prefill,
            decode=arguments.decode,
            aggregated=arguments.aggregated,
            any=arguments.any,
        )
    with as_settings_error("--profile: "):
        profile = load(arguments.profile)
    limits = profile.engine
    chunk = arguments.chunk or limits.max_num_batched_tokens
    with as_settings_error(""):
        shapes = {
            role: shape_of(
                arguments,
                limits,
                (arguments.prefill_chunk if role is Role.PREFILL else None) or chunk,
            )
            for role in Role
        }
        policy = arguments.policy
        chosen = {}
        if policy != _AUTO:
            chosen = {
                Role.PREFILL: arguments.prefill_policy or policy,
                Role.DECODE: arguments.decode_policy or policy,
            }
        simulation = Simulation(
            fleet=fleet,
            hardware=profile.hardware,
            shapes=shapes,
            policies=chosen,
            load=_load(arguments),
            slos=tuple(arguments.slo),
            placement=auto(bounds_of(*arguments.slo[:1])) if policy == _AUTO else None,
        )
    return simulation, profile.fitted


def _load(arguments: argparse.Namespace) -> Load:
    from pdproxy_lab.bench.arrivals import Arrivals
    from pdproxy_lab.bench.workload import Lengths
    from pdproxy_lab.simulate.load import Synthetic, TraceReplay

    arrivals = None
    if arguments.rate is not None:
        with as_settings_error("--rate: "):
            low, high = arguments.rate
            arrivals = Arrivals(
                kind=arguments.arrivals or "poisson",
                rate=low,
                end_rate=high,
                burstiness=arguments.burstiness or DEFAULT_BURSTINESS,
            )
    duration, requests = arguments.duration, arguments.requests
    if arguments.trace is None:
        assert arrivals is not None
        return Synthetic(
            arrivals=arrivals,
            inputs=arguments.input_tokens or Lengths(1024, 1024),
            outputs=arguments.output_tokens or Lengths(128, 128),
            duration=(duration or 300.0) if requests is None else None,
            requests=requests,
        )
    return TraceReplay(
        entries=entries_of(arguments),
        scale=arguments.scale or 1.0,
        arrivals=arrivals,
        duration=duration,
        requests=requests,
    )


def _asked(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options for the record."""
    names = (
        "prefill",
        "decode",
        "aggregated",
        "any",
        "profile",
        "policy",
        "chunk",
        "prefill_chunk",
        "scale",
        "spread",
    )
    found: dict[str, object] = {name: getattr(arguments, name) for name in names}
    found["arrivals"] = arguments.arrivals or ("trace" if arguments.rate is None else "poisson")
    return found | {
        "rate": arguments.rate,
        "trace": None if arguments.trace is None else arguments.trace.name,
    }


class _Progress:
    """How far the runs are. How many requests a run has is known when the first one has ended."""

    def __init__(self, line: ProgressLine, runs: int) -> None:
        self._line, self._runs = line, runs
        self._begun = time.monotonic()
        self._ended = self._last = self._each = 0

    def requests(self, number: int) -> None:
        """Show that so many requests of this run have come."""
        self._last = number
        run = f"run {self._ended + 1} of {self._runs}"
        part = (self._ended + number / self._each) / self._runs if self._each else 0.0
        left = seconds_left(self._begun, time.monotonic(), min(part, 1.0))
        self._line.show(f"{run}{left}: {number} requests")

    def ended(self) -> None:
        """Note the end of a run."""
        self._ended += 1
        self._each = max(self._each, self._last)


def _append(file: IO[bytes] | None, record: dict[str, object]) -> None:
    import msgspec

    if file is not None:
        file.write(msgspec.json.encode(record) + b"\n")
        file.flush()
