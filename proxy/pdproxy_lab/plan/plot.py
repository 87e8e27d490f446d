"""A plot of the alternatives of a plan. It needs matplotlib: `bench.figure.check` tests for it."""

from __future__ import annotations

from pathlib import Path

from pdproxy_lab.bench.errors import USAGE_ERROR, BenchError
from pdproxy_lab.plan.answer import PlanAnswer

_MAX_BARS = 24


def plot(found: PlanAnswer, path: Path) -> None:
    """Write a bar per alternative: its capacity per GPU. The plan's bar is darker; a line shows the
    rate that was asked for.

    Raises:
        BenchError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    gpus, shown = (
        found.result.gpus,
        [one for one in found.result.found if one.place is not None][:_MAX_BARS],
    )
    figure = Figure(figsize=(10, 2 + 0.3 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [
        f"{one.arrangement.name}, {one.arrangement.chunks}, {one.arrangement.policy}"
        for one in shown
    ]
    colors = ["tab:blue" if one == found.best else "lightsteelblue" for one in shown]
    axes.barh(range(len(shown)), [one.rate / gpus for one in shown], color=colors)
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"requests per second and GPU that keep {found.question.slo.name}")
    if found.asked is not None:
        axes.axvline(
            found.asked.rate / gpus,
            color="black",
            linestyle="--",
            label=f"{found.asked.rate:.3g} req/s",
        )
        axes.legend()
    axes.set_title(f"{gpus} GPUs, {100 * found.question.share:g} % of the requests keep the SLO")
    try:
        figure.savefig(path)
    except OSError as error:
        raise BenchError(
            f"--plot: {path.name} can't be written: {error.strerror}", USAGE_ERROR
        ) from None
