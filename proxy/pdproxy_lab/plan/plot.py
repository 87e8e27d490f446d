"""A plot of the alternatives of a plan. It needs matplotlib: `bench.figure.check` tests for it."""

from __future__ import annotations

from typing import Any

from pdproxy_lab.bench import figure as figures
from pdproxy_lab.bench.workload import Lengths
from pdproxy_lab.plan.answer import PlanAnswer
from pdproxy_lab.plan.question import Demand, Traced
from pdproxy_lab.plan.report import gain_of

_MAX_BARS = 24


def plot(found: PlanAnswer) -> Any:
    """Return a figure with a bar per alternative: its capacity per GPU. The plan's bar has another
    colour; a line shows the rate that was asked for.
    """
    with figures.styled():
        return _drawn(found)


def _drawn(found: PlanAnswer) -> Any:
    gpus, question = found.result.gpus, found.question
    served = [one for one in found.result.found if one.place is not None]
    shown = served[:_MAX_BARS]
    made = figures.figure(
        f"Engines for a load, on {gpus} GPUs (simulated)",
        _load_text(question.demand),
        (10, 2.5 + 0.3 * len(shown)),
    )
    (axes,) = figures.panels(made, 1, 1)
    what = f"Rate at which {100 * question.share:g} % of the requests keep {question.slo.name}"
    figures.describe(axes, what, "higher")
    for label, own in (("the plan", True), ("alternatives", False)):
        places = [number for number, one in enumerate(shown) if (one == found.best) is own]
        rates = [shown[number].rate / gpus for number in places]
        color = figures.COLORS[0 if own else 5]
        drawn = axes.barh(places, rates, color=color, label=label)
        texts = [
            f"{'' if shown[number].exact else '~'}{shown[number].rate / gpus:.3g}"
            for number in places
        ]
        axes.bar_label(drawn, texts, padding=3, fontsize=8)
    names = [
        f"{one.arrangement.name}, {one.arrangement.chunks}, {one.arrangement.policy}"
        for one in shown
    ]
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("requests per second and GPU")
    if found.asked is not None:
        rate = found.asked.rate
        label = f"asked for: {rate:.3g} req/s"
        axes.axvline(rate / gpus, color=figures.INK, linestyle="--", label=label)
    made.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    figures.notes(made, list(_notes(found, len(served) - len(shown))))
    return made


def _notes(found: PlanAnswer, more: int) -> list[str]:
    unable = len(found.result.found) - sum(one.place is not None for one in found.result.found)
    gain = gain_of(found)
    lines = ["~: from shorter runs, or at most so much", *([gain] if gain is not None else [])]
    if more:
        lines.append(f"not shown: {more} arrangements with lower rates")
    if unable:
        lines.append(f"not shown: {unable} arrangements that keep the SLO at no rate")
    return lines


def _load_text(demand: Demand) -> str:
    kind = f"{demand.kind} arrivals" if demand.kind is not None else "the trace's own arrivals"
    if isinstance(demand, Traced):
        return f"{len(demand.entries)} requests of a trace; {kind}"
    inputs, outputs = _tokens(demand.inputs), _tokens(demand.outputs)
    return f"prompts of {inputs} tokens, answers of {outputs}; {kind}"


def _tokens(lengths: Lengths) -> str:
    low, high = lengths.low, lengths.high
    return f"{low}" if low == high else f"{low} to {high}"
