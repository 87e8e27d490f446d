"""What a run's requests amount to: latencies, rates, goodput, errors. Pure.

Latencies count from when a request was due, so that a server that stops for a while is late for all
that were due then, and not only for those that could be sent (coordinated omission). What was not
measured is None, and `refused` says why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from pdproxy_lab.bench.decision import decision_of
from pdproxy_lab.bench.outcome import Observed, Outcome
from pdproxy_lab.bench.slo import OWN_CLASS, BenchSlo

PERCENTILES = (50, 90, 95, 99)
MAX_LAG = 0.010
"""Seconds. When the 99th percentile of the generator's own lag is above it, a run says more about
the generator.
"""
_MAX_OWN_EVENTS_MISSING = 0.01
"""Share of tokens without an event of their own, up to which gaps between events are gaps between
tokens.
"""
MAX_DECISIONS = 16
"""Choices, and choices with reasons, that are measured apart: those of the most requests."""
_MANY_FAILED = 0.05
_MANY_SHORT = 0.01


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Many values of one kind, in seconds. A percentile is None if there are too few values for
    it.
    """

    count: int
    mean: float
    std: float
    largest: float
    percentiles: dict[int, float | None]


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """By how many seconds this process was late: it sent requests late, or its event loop ran
    late.
    """

    p50: float
    p99: float
    largest: float
    loop_p99: float
    loop_largest: float


class Summary(msgspec.Struct, kw_only=True):
    """One run."""

    requests: int
    """That were sent and not cut by the end of a run that was stopped."""
    completed: int
    failed: int
    cut: int
    partial: bool
    """Whether it was stopped before its end."""
    seconds: float
    lag: Lag
    errors: dict[str, int]
    """Failed requests by kind."""
    error_texts: dict[str, str]
    """The first text of each kind."""
    short: int
    """Answers with fewer tokens than were asked for."""
    input_tokens: int | None = None
    """Of all completed requests, as the server counted."""
    output_tokens: int | None = None
    asked_input_tokens: int = 0
    cached_tokens: int | None = None
    """Of `input_tokens`, found in a cache. None: not known of each completed request."""
    ttft: Spread | None = None
    ttft_from_sent: Spread | None = None
    """From when the request was sent, as vLLM's benchmark counts."""
    ttft_over_prediction: float | None = None
    """By how much of it `ttft_from_sent` was longer on average than pdproxy had predicted."""
    tpot: Spread | None = None
    itl: Spread | None = None
    gap: Spread | None = None
    """The longest gap of each request."""
    e2e: Spread | None = None
    good: dict[str, int | None] = {}
    """Good requests by the name of the SLO."""
    judged: dict[str, int] = {}
    """Requests for which the SLO is, by its name."""
    most_in_flight: int = 0
    peak_tokens_per_s: float = 0.0
    refused: dict[str, str] = {}
    """What was not measured, and why. Key `run`: nothing of this run may be used."""
    remarks: list[str] = []
    classes: dict[str, Summary] = {}
    """The requests of each class."""
    decisions: dict[str, Summary] = {}
    """The requests by what pdproxy chose for them: `split`, and with the reason `split: ttft`. A
    request without a decision is in none.
    """


def needed(percentile: float) -> int:
    """Return how many values a percentile needs: one at least beyond it, 100 for the 99th."""
    return max(math.ceil(round(100 / (100 - percentile), 6)), 2)


def percentile(ordered: Sequence[float], which: float) -> float:
    """Return a percentile of ascending values, interpolated as NumPy's default does."""
    place = (len(ordered) - 1) * which / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return what values amount to; None: there are none."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    return Spread(
        count=len(ordered),
        mean=mean,
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        largest=ordered[-1],
        percentiles={
            p: percentile(ordered, p) if len(ordered) >= needed(p) else None for p in PERCENTILES
        },
    )


def summarise(seen: Observed, slos: Sequence[BenchSlo], *, allow_lag: bool = False) -> Summary:
    """Return what a run's requests amount to."""
    lag = _lag(seen)
    late = max(lag.p99, lag.loop_p99)
    refusal = seen.given_up
    if not refusal and late > MAX_LAG and not allow_lag:
        refusal = (
            f"this process was late itself: p99 {late * 1000:.1f} ms, {MAX_LAG * 1000:.0f} ms "
            f"are the limit (--allow-lag)"
        )
    made = _summary(seen, seen.outcomes, lag, slos, refusal)
    if "run" not in made.refused:
        if late > MAX_LAG:
            made.remarks.append(f"this process was late itself: p99 {late * 1000:.1f} ms")
        made.classes = {
            name: _summary(seen, outcomes, lag, slos)
            for name, outcomes in _by_class(seen.outcomes).items()
        }
        left = made.requests - sum(part.requests for part in made.classes.values())
        if made.classes and left:
            made.remarks.append(f"{left} requests are of no class")
        made.decisions = {
            name: _summary(seen, outcomes, lag, slos)
            for name, outcomes in _by_decision(seen.outcomes).items()
        }
    return made


def _by_class(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.class_name is not None:
            found.setdefault(outcome.class_name, []).append(outcome)
    return dict(sorted(found.items()))


def _by_decision(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the requests by choice, and by choice and reason, the most frequent first."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        decision = None if outcome.decision is None else decision_of(outcome.decision)
        if decision is not None:
            for name in (decision.choice, f"{decision.choice}: {decision.reason}"):
                found.setdefault(name, []).append(outcome)
    most = sorted(found, key=lambda name: len(found[name]), reverse=True)[:MAX_DECISIONS]
    return {name: found[name] for name in most}


def _summary(
    seen: Observed,
    outcomes: Sequence[Outcome],
    lag: Lag,
    slos: Sequence[BenchSlo],
    refusal: str = "",
) -> Summary:
    """Return what some requests of a run amount to. `refusal`: why nothing may be used; empty: all
    may be.
    """
    ended = [outcome for outcome in outcomes if outcome.error != "cut"]
    done = [outcome for outcome in ended if outcome.error is None]
    made = Summary(
        requests=len(ended),
        completed=len(done),
        failed=len(ended) - len(done),
        cut=len(outcomes) - len(ended),
        partial=seen.cut,
        seconds=seen.seconds,
        lag=lag,
        errors=dict(
            Counter(outcome.error for outcome in ended if outcome.error is not None).most_common()
        ),
        error_texts={o.error: o.text for o in reversed(ended) if o.error is not None},
        short=sum(o.output_tokens is not None and o.output_tokens < o.asked_output for o in done),
        asked_input_tokens=sum(o.asked_input for o in done),
        most_in_flight=seen.most_in_flight,
    )
    if refusal:
        made.refused["run"] = refusal
    elif not ended:
        made.refused["run"] = "no request has ended"
    elif not done:
        made.refused["run"] = "no request was answered"
    if "run" not in made.refused:
        _measure(made, done)
        _count_good(made, ended, slos)
    return made


def _lag(seen: Observed) -> Lag:
    sent = sorted(outcome.lag for outcome in seen.outcomes) or [0.0]
    loop = sorted(seen.loop_lags) or [0.0]
    return Lag(
        p50=percentile(sent, 50),
        p99=percentile(sent, 99),
        largest=sent[-1],
        loop_p99=percentile(loop, 99),
        loop_largest=loop[-1],
    )


def _measure(made: Summary, done: Sequence[Outcome]) -> None:
    made.ttft = spread_of([o.ttft for o in done if o.ttft is not None])
    made.ttft_from_sent = spread_of([o.times[0] - o.sent for o in done])
    made.ttft_over_prediction = _over_prediction(done)
    made.e2e = spread_of([o.e2e for o in done if o.e2e is not None])
    made.gap = spread_of([o.worst_gap for o in done if o.worst_gap is not None])
    made.peak_tokens_per_s = float(
        max(Counter(int(time) for o in done for time in o.times).values())
    )
    if made.gap is None:
        made.refused["gap"] = made.refused["itl"] = "no answer has more than one event"
    for name, spread in (("ttft", made.ttft), ("gap", made.gap), ("e2e", made.e2e)):
        _name_missing(made, name, spread)
    if all(o.prompt_tokens is not None for o in done):
        made.input_tokens = sum(o.prompt_tokens or 0 for o in done)
    else:
        made.refused["input_tokens"] = "the server reports no usage"
    _count_cached(made, done)
    if any(o.output_tokens is None for o in done):
        made.refused["output_tokens"] = made.refused["tpot"] = made.refused["itl"] = (
            "the server reports no usage"
        )
    else:
        _per_token(made, done)
    if made.failed > _MANY_FAILED * made.requests:
        made.remarks.append(
            f"{made.failed} of {made.requests} requests failed: latencies are those of the others"
        )
    if made.short > _MANY_SHORT * made.completed:
        made.remarks.append(
            f"{made.short} answers are shorter than asked: does the server ignore ignore_eos?"
        )


def _over_prediction(done: Sequence[Outcome]) -> float | None:
    """Compare sums: with single ratios, one short prediction would outweigh many."""
    predicted = measured = 0.0
    for one in done:
        decision = None if one.decision is None else decision_of(one.decision)
        if decision is not None and decision.ttft is not None:
            predicted += decision.ttft
            measured += one.times[0] - one.sent
    return measured / predicted - 1 if predicted else None


def _count_cached(made: Summary, done: Sequence[Outcome]) -> None:
    """Count the tokens from a cache. A part of the answers would say nothing of the others, and a
    missing count is no 0.
    """
    known = [o for o in done if o.cached_tokens is not None]
    if len(known) < len(done):
        who = (
            f"{len(done) - len(known)} of {len(done)} answers report"
            if known
            else ("the server reports")
        )
        made.refused["cached_tokens"] = (
            f"{who} no cached tokens (vLLM: --enable-prompt-tokens-details)"
        )
    elif any((o.cached_tokens or 0) > (o.prompt_tokens or 0) for o in known):
        made.refused["cached_tokens"] = "the server reports more cached tokens than prompts have"
    else:
        made.cached_tokens = sum(o.cached_tokens or 0 for o in known)


def _per_token(made: Summary, done: Sequence[Outcome]) -> None:
    made.output_tokens = sum(o.output_tokens or 0 for o in done)
    made.tpot = spread_of([o.tpot for o in done if o.tpot is not None])
    if made.tpot is None:
        made.refused["tpot"] = "no answer has more than one token"
    _name_missing(made, "tpot", made.tpot)
    missing = sum(max((o.output_tokens or 0) - len(o.times), 0) for o in done)
    if missing > _MAX_OWN_EVENTS_MISSING * made.output_tokens:
        made.refused["itl"] = (
            f"events carry several tokens: {missing} of {made.output_tokens} tokens had no event "
            f"of their own"
        )
    elif made.gap is not None:
        made.itl = spread_of([gap for o in done for gap in o.gaps])
        _name_missing(made, "itl", made.itl)


def _name_missing(made: Summary, name: str, spread: Spread | None) -> None:
    for p, value in spread.percentiles.items() if spread is not None else ():
        if value is None and spread is not None:
            made.refused[f"p{p}_{name}"] = f"needs {needed(p)} values, got {spread.count}"


def _count_good(made: Summary, ended: Sequence[Outcome], slos: Sequence[BenchSlo]) -> None:
    for slo in slos:
        own = [o for o in ended if slo.of is None or o.class_name == slo.of]
        made.judged[slo.name] = len(own)
        if not own:
            made.good[slo.name] = None
            made.refused[f"goodput {slo.name}"] = "no request is of its class"
        elif made.cut:
            made.good[slo.name] = None
            made.refused[f"goodput {slo.name}"] = (
                f"{made.cut} requests were cut: it isn't known whether they were good"
            )
        elif not all(slo.knows(outcome) for outcome in own):
            made.good[slo.name] = None
            made.refused[f"goodput {slo.name}"] = (
                "the server reports no usage, so TPOT is not known"
            )
        else:
            made.good[slo.name] = sum(slo.kept(outcome) for outcome in own)
    if of_classes := [slo.name for slo in slos if slo.of is not None]:
        goods = [made.good[name] for name in of_classes if made.judged[name]]
        known = [good for good in goods if good is not None]
        made.good[OWN_CLASS] = sum(known) if goods and len(known) == len(goods) else None
        made.judged[OWN_CLASS] = sum(made.judged[name] for name in of_classes)
