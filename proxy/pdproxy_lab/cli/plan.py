"""`pdproxy plan`: which engines a load needs, and whether to split them."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pdproxy.cli.parser import examples
from pdproxy.scheduling import policies
from pdproxy.settings.errors import SettingsError
from pdproxy_lab.bench import reading
from pdproxy_lab.bench.arrivals import KINDS, Kind
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.cli.load_options import (
    DEFAULT_BURSTINESS,
    add_burstiness,
    add_engine_limits,
    add_lengths,
    add_profile,
    add_trace,
    as_settings_error,
    check_writable,
    entries_of,
    mistakes_with_arrivals,
    mistakes_with_trace,
    opened,
    shape_of,
    typed,
)
from pdproxy_lab.cli.progress import ProgressLine

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands
    from pdproxy_lab.plan.question import Demand, Question
    from pdproxy_lab.plan.search import SearchProgress

_INTERRUPTED = 130
_MAX_GPUS = 64
_MAX_REQUESTS = 20_000
_MAX_CHUNKS = 8
_POLICY = "least_load"
"""What is searched unless others are named: in virtual time no other policy knows more, but of
prefix caches, and each one makes the search longer.
"""
_SHARED = "prefix"
"""What is searched beside it if prompts share beginnings: `auto` knows the caches, too."""
_KINDS = tuple(kind for kind in KINDS if kind != "ramp")


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "plan",
        help=summary,
        description="Search, by simulation, the arrangement of engines that serves the highest "
        "rate "
        "of "
        "a "
        "load within an SLO: "
        "plain engines, prefill and decode engines, or engines of role any for which the placement "
        "auto decides, with which --max-num-batched-tokens. "
        "Nothing is sent. It takes some "
        "seconds, and minutes for many GPUs. The exit code is 0, 1 if no arrangement keeps the "
        "SLO at any rate, 2 if the options "
        "are wrong, or 130 if it was interrupted.",
        usage="pdproxy plan --slo LIMITS [--gpus N] [--rate R] [--trace FILE] [option ...]",
        epilog=examples(
            "pdproxy plan --gpus 8 --input-tokens 4000 --output-tokens 128 --slo "
            "ttft=500ms,tpot=8ms",
            "pdproxy plan --rate 40 --input-tokens 1000 --output-tokens 500 --slo "
            "ttft=500ms,tpot=15ms --plot plan.png",
            "pdproxy plan --trace trace.jsonl --spread --max-tokens 16000 --gpus 8 --slo "
            "ttft=500ms,tpot=8ms",
        ),
    )
    _add_goal(parser.add_argument_group("goal"))
    _add_load(parser.add_argument_group("load (see `pdproxy bench --help`)"))
    _add_engines(parser.add_argument_group("engines"))
    _add_search(parser.add_argument_group("search and report"))
    parser.set_defaults(run=run)


def _add_goal(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        metavar="[NAME:]LIMITS",
        type=typed(parse_slo),
        required=True,
        help="what a good request keeps, such as ttft=500ms,tpot=15ms,gap=50ms,e2e=10s (required)",
    )
    group.add_argument(
        "--share",
        metavar="PERCENT",
        type=typed(reading.number(0.0, 100.0, "percent")),
        default=90.0,
        help="the part of the requests that must keep it (default: 90)",
    )
    group.add_argument(
        "--gpus",
        metavar="N",
        type=typed(reading.whole(1, _MAX_GPUS)),
        help="number of GPUs, with an engine on each (default: as few as serve the rate)",
    )
    group.add_argument(
        "--rate",
        metavar="R",
        type=typed(reading.number(0.0, 100_000.0, "requests per second")),
        help="requests per second that should be served; the report says if it is too much "
        "(default: the trace's own, else the most that the GPUs serve)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add_lengths(group)
    group.add_argument(
        "--arrivals",
        choices=_KINDS,
        help="when requests come (default: poisson, or the times of --trace, stretched to the "
        "rate)",
    )
    add_burstiness(group)
    add_trace(group, "")


def _add_engines(group: argparse._ArgumentGroup) -> None:
    add_profile(group)
    group.add_argument(
        "--chunks",
        metavar="A,B,...",
        type=typed(_chunks),
        default=(512, 1024, 2048, 4096, 8192),
        help="values of vLLM's --max-num-batched-tokens that may be used (default: "
        "512,1024,2048,4096,8192)",
    )
    known = ", ".join(policies.names())
    group.add_argument(
        "--policy",
        metavar="NAME",
        choices=policies.names(),
        action="append",
        help=f"how engines that keep their roles may be chosen: {known}; may be repeated "
        f"(default: {_POLICY}, and {_SHARED} for a trace whose prompts share beginnings)",
    )
    add_engine_limits(group)


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--requests",
        metavar="N",
        type=typed(reading.whole(10, _MAX_REQUESTS)),
        help="requests of a long run (default: as many as come in about a minute; of a trace at "
        "most 6000)",
    )
    group.add_argument(
        "--seeds",
        metavar="N",
        type=typed(reading.whole(1, 20)),
        default=3,
        help="long runs per rate, each with another seed; a trace's own times need only one "
        "(default: 3)",
    )
    group.add_argument(
        "--exhaustive",
        action="store_true",
        help="try all arrangements; it needs --gpus (default: search the promising ones)",
    )
    group.add_argument(
        "--json", metavar="FILE", type=Path, help="write the answer as JSON (default: no file)"
    )
    group.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="plot the alternatives: .png, .svg or .pdf; needs matplotlib (default: none)",
    )


def _chunks(text: str) -> tuple[int, ...]:
    read, parts = reading.whole(1, 10_000_000), text.split(",")
    if len(parts) > _MAX_CHUNKS:
        raise ValueError(f"expected 1 to {_MAX_CHUNKS} chunk sizes, got {len(parts)}")
    return tuple(sorted({read(part) for part in parts}))


def run(arguments: argparse.Namespace) -> int:
    """Search, print the plan, return the exit code."""
    # Imported here: wrong options should be reported at once.
    import msgspec

    from pdproxy_lab.bench import figure
    from pdproxy_lab.bench.errors import BenchError
    from pdproxy_lab.plan.answer import answer, as_json
    from pdproxy_lab.plan.plot import plot
    from pdproxy_lab.plan.question import steady
    from pdproxy_lab.plan.report import text
    from pdproxy_lab.plan.search import exhaustive, gpus_for, search

    _check(arguments)
    with as_settings_error(""):
        question = steady(_question(arguments))
    rate = _rate(arguments, question.demand)
    try:
        with contextlib.ExitStack() as stack, as_settings_error(""):
            if arguments.plot is not None:
                figure.check(arguments.plot)
                check_writable(arguments.plot, "--plot")
            file = opened(arguments.json, stack)
            with ProgressLine() as line:
                options = {
                    "requests": arguments.requests,
                    "seeds": arguments.seeds,
                    "on_progress": lambda one: line.show(_shown(one)),
                }
                if arguments.gpus is None:
                    assert rate is not None
                    result = gpus_for(question, rate, **options)
                else:
                    result = (exhaustive if arguments.exhaustive else search)(
                        question, arguments.gpus, **options
                    )
            found = answer(question, result, rate)
            if file is not None:
                file.write(msgspec.json.encode(as_json(found)) + b"\n")
            print(text(found), end="", flush=True)
            if arguments.plot is not None and found.best is not None:
                figure.save(plot(found), arguments.plot)
    except KeyboardInterrupt:
        sys.stderr.write("pdproxy plan: interrupted\n")
        return _INTERRUPTED
    except BenchError as error:
        sys.stderr.write(f"{arguments.prog}: {error}\n")
        return error.code
    return 0 if found.best is not None else 1


def _shown(one: SearchProgress) -> str:
    best = f", best so far {one.rate:.3g} req/s" if one.rate else ""
    return f"{one.gpus} GPUs: arrangement {one.searched}, {one.runs} simulations{best}"


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and those without effect."""
    mistakes = []
    if arguments.gpus is None and arguments.rate is None and arguments.trace is None:
        mistakes.append("--gpus or --rate is missing")
    if arguments.exhaustive and arguments.gpus is None:
        mistakes.append("--exhaustive: needs --gpus")
    mistakes += mistakes_with_trace(arguments, ("slice", "spread", "max-tokens"))
    mistakes += mistakes_with_arrivals(arguments)
    if mistakes:
        raise SettingsError(*mistakes)


def _question(arguments: argparse.Namespace) -> Question:
    from pdproxy.engine_model.profile import load
    from pdproxy_lab.plan.question import Question

    with as_settings_error("--profile: "):
        profile = load(arguments.profile)
    limits, demand = profile.engine, _demand(arguments)
    with as_settings_error(""):
        return Question(
            demand=demand,
            slo=arguments.slo,
            share=arguments.share / 100,
            hardware=profile.hardware,
            shape=shape_of(arguments, limits, limits.max_num_batched_tokens),
            chunks=arguments.chunks,
            policies=tuple(dict.fromkeys(arguments.policy or _policies(demand))),
            max_model_len=limits.max_model_len,
            fitted=profile.fitted,
        )


def _policies(demand: Demand) -> tuple[str, ...]:
    from pdproxy_lab.plan.question import Traced

    if isinstance(demand, Traced) and any(entry.hash_ids for entry in demand.entries):
        return (_POLICY, _SHARED)
    return (_POLICY,)


def _demand(arguments: argparse.Namespace) -> Demand:
    from pdproxy_lab.bench.workload import Lengths
    from pdproxy_lab.plan.question import Drawn, Traced

    kind, burstiness = (
        cast("Kind | None", arguments.arrivals),
        arguments.burstiness or DEFAULT_BURSTINESS,
    )
    if arguments.trace is not None:
        return Traced(entries=entries_of(arguments), kind=kind, burstiness=burstiness)
    return Drawn(
        inputs=arguments.input_tokens or Lengths(1024, 1024),
        outputs=arguments.output_tokens or Lengths(128, 128),
        kind=kind or "poisson",
        burstiness=burstiness,
    )


def _rate(arguments: argparse.Namespace, demand: Demand) -> float | None:
    """Return the rate that is asked for; None: none is."""
    from pdproxy_lab.plan.question import Traced

    rate = cast("float | None", arguments.rate)
    if rate is None and isinstance(demand, Traced):
        rate = demand.rate
    if rate is None and arguments.gpus is None:
        raise SettingsError("--rate is missing: all requests of the trace have the same time")
    return rate
