"""The loads of `pdproxy bench`: what its options make the requests of a seed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from pdproxy_lab.bench.sharegpt import Question
from pdproxy_lab.bench.trace import TraceEntry
from pdproxy_lab.bench.workload import Planned
from pdproxy_lab.cli.load_options import DEFAULT_BURSTINESS, as_settings_error

Rate = tuple[float, float | None]
"""Requests per second: of a ramp, at its start and at its end."""
Plan = Callable[[int], list[Planned]]


def mean_of(rate: Rate | None) -> float | None:
    """Return requests per second over a whole run, of a ramp the middle."""
    if rate is None or rate[1] is None:
        return None if rate is None else rate[0]
    return (rate[0] + rate[1]) / 2


def plans_of(arguments: argparse.Namespace, rates: Sequence[Rate | None]) -> tuple[list[Plan], int]:
    """Return what makes the requests of a seed at each rate, and how many requests of the
    file were left out.
    """
    from pdproxy_lab.bench.sharegpt import read_sharegpt
    from pdproxy_lab.bench.trace import cut, read_trace, spread

    entries = questions = None
    left_out = 0
    longest = arguments.max_tokens or math.inf
    if arguments.sharegpt is not None:
        with as_settings_error("--sharegpt: "):
            questions, left_out = read_sharegpt(arguments.sharegpt, longest)
    if arguments.trace is not None:
        with as_settings_error("--trace: "):
            found = cut(read_trace(arguments.trace), *(arguments.slice or (0.0, math.inf)))
            found = spread(found) if arguments.spread else found
            entries = [e for e in found if e.input_tokens + e.output_tokens <= longest]
            left_out = len(found) - len(entries)
    plans = [_marked(arguments, _plan(arguments, rate, entries, questions)) for rate in rates]
    with as_settings_error(""):
        if not all(plan(0) for plan in plans):
            raise ValueError("no requests: the trace's slice or the duration is too short")
    return plans, left_out


def _marked(arguments: argparse.Namespace, plan: Plan) -> Plan:
    """Return what makes the same requests with their classes and conversations."""
    from pdproxy_lab.bench.workload import classified, conversations

    def made(seed: int) -> list[Planned]:
        found = plan(seed)
        if arguments.classes and (arguments.trace or arguments.sharegpt):
            found = classified(found, arguments.classes)
        return conversations(found) if arguments.session_header else found

    return made


def _plan(
    arguments: argparse.Namespace,
    rate: Rate | None,
    entries: Sequence[TraceEntry] | None,
    questions: Sequence[Question] | None,
) -> Plan:
    """Return what makes the requests of a seed. `rate`: None: the trace's own times."""
    import msgspec

    from pdproxy_lab.bench.arrivals import Arrivals
    from pdproxy_lab.bench.sharegpt import asked
    from pdproxy_lab.bench.workload import RequestClass, replayed, synthetic

    arrivals = None
    if rate is not None:
        with as_settings_error("--rate: "):
            arrivals = Arrivals(
                kind=arguments.arrivals,
                rate=rate[0],
                end_rate=rate[1],
                burstiness=arguments.burstiness or DEFAULT_BURSTINESS,
            )
    duration, requests = arguments.duration, arguments.requests
    if entries is None:
        assert arrivals is not None
        length = None if requests is not None else duration or 60.0
        if questions is not None:
            return lambda seed: asked(questions, arrivals, seed, duration=length, requests=requests)
        classes = [
            msgspec.structs.replace(
                one,
                inputs=one.inputs or arguments.input_tokens,
                outputs=one.outputs or arguments.output_tokens,
            )
            for one in arguments.classes or [RequestClass()]
        ]
        return lambda seed: synthetic(arrivals, classes, seed, duration=length, requests=requests)
    scale = arguments.scale or 1.0
    return lambda seed: replayed(
        entries, seed, scale=scale, arrivals=arrivals, duration=duration, requests=requests
    )
