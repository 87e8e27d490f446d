"""The answer of a plan: the arrangement, what it does at the asked rate, and the reason. Pure.

It is what the report, the JSON file and the plot are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdproxy.engine_model.fitted import Extrapolated, Ranges, extrapolated
from pdproxy_lab.plan.arrangement import Arrangement, ArrangementKind, plain
from pdproxy_lab.plan.bounds import work_of
from pdproxy_lab.plan.capacity import GRID, CapacitySearch, Level
from pdproxy_lab.plan.question import SAMPLE, Question
from pdproxy_lab.plan.search import FoundArrangement, Result, best_of
from pdproxy_lab.simulate.summary import Summary

_FEW = 200
_BEYOND = GRID**5
"""How far above its capacity an arrangement is looked at, to see what it misses."""


class AtRate(msgspec.Struct, frozen=True, kw_only=True):
    """What an arrangement does at a rate (requests per second), over all seeds."""

    rate: float
    share: float
    """The part of all requests that is good."""
    goodput_per_gpu: float
    """Good requests per second."""
    headroom: float
    """By which part the rate may grow until the SLO is no longer kept, to 1 %; below 0, it is too
    high.
    """
    kept: bool
    """Whether so many requests are good as must be."""


class LimitReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why an arrangement serves no higher rate: what it is like 5 % above its capacity."""

    missed: dict[str, float]
    """By limit (ttft, tpot, gap, e2e): the part of requests that misses it."""
    busy: dict[str, float]
    """By role: the part of the time in which its engines compute."""
    with_prefill: dict[str, float]
    """By role: the part of the time in steps with a part of a prompt."""

    @property
    def limit(self) -> str | None:
        """The limit that most requests miss; None: none does."""
        worst = max(self.missed, key=lambda name: self.missed[name], default=None)
        return worst if worst is not None and self.missed[worst] > 0 else None


class Hopeless(msgspec.Struct, frozen=True, kw_only=True):
    """What plain engines are like at a low rate (requests per second), where nothing keeps the
    SLO.
    """

    arrangement: Arrangement
    rate: float
    missed: dict[str, float]
    """By limit (ttft, tpot, gap, e2e): the part of requests that misses it."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How long the requests are, of `SAMPLE` at most."""

    longest: int
    """Tokens of prompt and answer."""
    refused: float
    """The part that does not fit into an engine's KV memory."""
    beyond: float
    """The part that is longer than the engine was measured for."""


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All that the report needs. `other`: the best static arrangement if `auto` is the best,
    otherwise the best static one of the other kind, plain or split.
    """

    question: Question
    result: Result
    best: FoundArrangement | None
    other: FoundArrangement | None
    asked: AtRate | None
    """What the best one does at the rate that was asked for."""
    beside: AtRate | None = None
    """What the best static one does there if `auto` is the best, or the other way round."""
    reason: LimitReason | None
    """Of the best one."""
    other_reason: LimitReason | None
    sizes: Sizes
    hopeless: Hopeless | None = None
    """If there is no best one."""
    extrapolated: Extrapolated | None = None
    """What the best ones of both kinds need of the profile that it was not fitted to."""
    auto_splits: float | None = None
    """The part of the requests that `auto` splits at its capacity, if it is the best."""

    @property
    def splits(self) -> bool:
        """Whether the answer is to split all prompts."""
        return self._kind == "split"

    @property
    def decides(self) -> bool:
        """Whether the answer is that `auto` decides for each request."""
        return self._kind == "auto"

    @property
    def _kind(self) -> ArrangementKind | None:
        return None if self.best is None else self.best.arrangement.kind


def answer(question: Question, result: Result, rate: float | None) -> PlanAnswer:
    """Simulate what the report needs beside the search. `rate`: requests per second that were asked
    for; None: none.
    """
    best = result.best
    kind = None if best is None else best.arrangement.kind
    if kind == "auto":
        other, beside = result.static, result.static
    else:
        other = best_of(result.found, "plain" if kind == "split" else "split")
        beside = result.auto
    prober = CapacitySearch(question, work_of(question))
    return PlanAnswer(
        question=question,
        result=result,
        best=best,
        other=other,
        asked=None if best is None or rate is None else _at_rate(prober, best, result, rate),
        beside=None if beside is None or rate is None else _at_rate(prober, beside, result, rate),
        reason=None if best is None else _reason(prober, best, result.level),
        other_reason=None if other is None else _reason(prober, other, result.level),
        sizes=_sizes(question),
        hopeless=None if best is not None else _hopeless(prober, result),
        extrapolated=_extrapolated(
            prober, result.level, [one for one in (best, other) if one is not None]
        ),
        auto_splits=_splits(prober, best, result.level)
        if best is not None and kind == "auto"
        else None,
    )


def _splits(prober: CapacitySearch, auto: FoundArrangement, level: Level) -> float:
    run = prober.at(auto.arrangement, _one_run(level), auto.rate)[0]
    return run.splits / run.requests


def _one_run(level: Level) -> Level:
    return Level(level.requests, 1, 1)


def _extrapolated(
    prober: CapacitySearch, level: Level, found: Sequence[FoundArrangement]
) -> Extrapolated | None:
    """Return what arrangements ask of the engines at their capacities beyond the profile's
    ranges.
    """
    fitted = prober.question.fitted
    if fitted is None:
        return None
    asked = Ranges()
    for one in found:
        (run,) = prober.at(one.arrangement, _one_run(level), one.rate)
        asked = asked.with_(run.asked)
    return extrapolated(fitted, asked)


def _sizes(question: Question) -> Sizes:
    shape, calls = question.shape, question.sample(SAMPLE)
    most = question.max_model_len
    return Sizes(
        longest=max(call.prompt + call.output for call in calls),
        refused=sum(not shape.fits(call.prompt, call.output) for call in calls) / len(calls),
        beyond=0.0
        if most is None
        else sum(call.prompt + call.output > most for call in calls) / len(calls),
    )


def _hopeless(prober: CapacitySearch, result: Result) -> Hopeless:
    question = prober.question
    one = plain(result.gpus, question.chunks[-1], question.policies[0])
    rate = prober.least(one)
    run: Summary = prober.at(one, Level(min(result.level.requests, _FEW), 1, 1), rate)[0]
    return Hopeless(arrangement=one, rate=rate, missed=_missed(run))


def _missed(run: Summary) -> dict[str, float]:
    return {name: 1 - good / run.requests for name, good in run.good.items() if name != "all"}


def _at_rate(
    prober: CapacitySearch, found: FoundArrangement, result: Result, rate: float
) -> AtRate:
    runs = prober.at(found.arrangement, result.level, rate)
    share = sum(run.good["all"] for run in runs) / sum(run.requests for run in runs)
    return AtRate(
        rate=rate,
        share=share,
        goodput_per_gpu=rate * share / result.gpus,
        headroom=found.rate / rate - 1,
        kept=share >= prober.question.share - 1e-9,
    )


def _reason(prober: CapacitySearch, found: FoundArrangement, level: Level) -> LimitReason:
    run: Summary = prober.at(found.arrangement, _one_run(level), found.rate * _BEYOND)[0]
    return LimitReason(
        missed=_missed(run),
        busy={role: use.busy for role, use in run.roles.items()},
        with_prefill={role: use.with_prefill for role, use in run.roles.items()},
    )


def as_json(found: PlanAnswer) -> dict[str, Any]:
    """Return the answer for `--json`: rates in requests per second."""
    best, result = found.best, found.result
    return {
        "gpus": result.gpus,
        "slo": {
            key: value
            for key, value in msgspec.structs.asdict(found.question.slo).items()
            if value is not None
        },
        "share": found.question.share,
        "split": None if best is None else found.splits,
        "plan": None if best is None else _entry(best, result.gpus),
        "asked": None if found.asked is None else msgspec.structs.asdict(found.asked),
        "reason": None if found.reason is None else msgspec.structs.asdict(found.reason),
        "other_kind": None if found.other is None else _entry(found.other, result.gpus),
        "other_reason": None
        if found.other_reason is None
        else msgspec.structs.asdict(found.other_reason),
        **_auto_and_static(found),
        "at_a_low_rate": None
        if found.hopeless is None
        else {"rate": found.hopeless.rate, "missed": found.hopeless.missed},
        "extrapolated": None
        if found.extrapolated is None
        else {
            "beyond": {one.name: one.asked for one in found.extrapolated.outside},
            "off": found.extrapolated.off,
            "lines": found.extrapolated.lines,
        },
        "do_not_fit": found.sizes.refused,
        "alternatives": [_entry(one, result.gpus) for one in result.found],
        "simulations": result.runs,
    }


def _auto_and_static(found: PlanAnswer) -> dict[str, Any]:
    result = found.result
    auto, static, others = result.auto, result.static, result.other_seeds
    asked = None if found.asked is None else msgspec.structs.asdict(found.asked)
    beside = None if found.beside is None else msgspec.structs.asdict(found.beside)
    return {
        "static": None if static is None else _entry(static, result.gpus),
        "static_asked": beside if found.decides else asked,
        "auto": None if auto is None else _entry(auto, result.gpus),
        "auto_asked": asked if found.decides else beside,
        "auto_splits": found.auto_splits,
        "auto_to_static": ratio(auto, static),
        "auto_to_static_other_seeds": None if others is None else ratio(others.auto, others.static),
    }


def ratio(one: FoundArrangement | None, other: FoundArrangement | None) -> float | None:
    """Return how many times the other one's rate an arrangement serves; None: one serves none."""
    if one is None or other is None or not other.rate:
        return None
    return one.rate / other.rate


def _entry(one: FoundArrangement, gpus: int) -> dict[str, Any]:
    this: Arrangement = one.arrangement
    return {
        "name": this.name,
        "prefill": this.prefill,
        "decode": this.decode,
        "aggregated": this.aggregated,
        "any": this.any,
        "max_num_batched_tokens": this.chunk,
        "prefill_max_num_batched_tokens": this.prefill_chunk or None,
        "policy": this.policy,
        "capacity": one.rate,
        "capacity_per_gpu": one.rate / gpus,
        "long_runs": one.exact,
    }
