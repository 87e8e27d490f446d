"""Plots of runs side by side, and of sweeps. They need matplotlib (`figure.check`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdproxy_lab.bench import figure as figures
from pdproxy_lab.bench.compare import Row, Table, table_of
from pdproxy_lab.bench.curves import GOOD_SHARE, Curve
from pdproxy_lab.bench.load_text import load_text
from pdproxy_lab.bench.record import Record
from pdproxy_lab.bench.report import remarks
from pdproxy_lab.bench.sweep_report import missing

_PANELS = (
    ("TTFT", "TTFT ", "lower"),
    ("TPOT", "TPOT ", "lower"),
    ("worst gap", "worst gap ", "lower"),
    ("good requests", "good: ", "higher"),
)
BARS_TITLE = "Servers under the same load"
SWEEP_TITLE = "Sweep over request rates"
_LEAST_LABELLED = 12
"""Bars of a panel, up to which each has its value."""


def bars(records: Sequence[Record]) -> Any:
    """Return a figure of runs: bars are medians over seeds, lines go from the lowest to the highest
    value.

    Raises:
        BenchError: they are of too many servers.
    """
    with figures.styled():
        return _bars_of(records)


def _bars_of(records: Sequence[Record]) -> Any:
    table = table_of(records)
    made = figures.figure(BARS_TITLE, load_text(records), (12, 9))
    for axes, (title, prefix, better) in zip(figures.panels(made, 2, 2), _PANELS, strict=True):
        rows = [row for row in table.rows if row.title.startswith(prefix) and row.unit != "%"]
        if rows:
            figures.describe(axes, f"{title} ({rows[0].unit})", better)
            _bars(axes, table, rows, prefix)
        else:
            axes.set_title(title, fontsize=10)
            figures.say_in(axes, "not measured" if prefix != "good: " else "no --slo was given")
    made.legend(*made.axes[0].get_legend_handles_labels(), loc="outside right upper")
    what = "bars: medians over the seeds; lines: lowest to highest"
    figures.notes(made, [what, *remarks(records)])
    return made


def _bars(axes: Any, table: Table, rows: list[Row], prefix: str) -> None:
    width = 0.8 / len(table.names)
    for number, name in enumerate(table.names):
        cells = [row.cells[number] for row in rows]
        heights = [cell.middle if cell else 0.0 for cell in cells]
        spans = [
            [cell.middle - cell.low if cell else 0.0 for cell in cells],
            [cell.high - cell.middle if cell else 0.0 for cell in cells],
        ]
        places = [
            index + (number - (len(table.names) - 1) / 2) * width for index in range(len(rows))
        ]
        color = figures.COLORS[number % len(figures.COLORS)]
        drawn = axes.bar(
            places,
            heights,
            width,
            yerr=spans,
            capsize=3,
            ecolor=figures.INK,
            color=color,
            label=name,
        )
        if len(rows) * len(table.names) <= _LEAST_LABELLED:
            shown = [
                f"{cell.middle:.{row.digits}f}" if cell else "-"
                for row, cell in zip(rows, cells, strict=True)
            ]
            axes.bar_label(drawn, shown, fontsize=7, padding=2)
    axes.set_xticks(range(len(rows)), [row.title.removeprefix(prefix) for row in rows])
    axes.set_ylim(bottom=0)


def curves(found: Sequence[Curve], records: Sequence[Record]) -> Any:
    """Return a figure of a sweep: goodput and share of good requests over the rate, and latencies
    over the throughput (Pareto). Points are medians over seeds.
    """
    with figures.styled():
        return _curves_of(found, records)


def _curves_of(found: Sequence[Curve], records: Sequence[Record]) -> Any:
    made = figures.figure(SWEEP_TITLE, load_text(records), (12, 9))
    goodput, share, first, later = figures.panels(made, 2, 2)
    slo = next((slo for curve in found for slo in curve.slos), None)
    for axes, unit, title in (
        (goodput, "req/s", f"Goodput ({slo})"),
        (share, "%", f"Good requests ({slo})"),
    ):
        if slo is None:
            figures.say_in(axes, "no --slo was given")
            continue
        figures.describe(axes, title, "higher")
        _over_rate(axes, found, f"good: {slo}", unit)
    for axes, name in ((first, "TTFT"), (later, "TPOT")):
        if not any(curve.points(f"{name} p50", "ms") for curve in found):
            figures.say_in(axes, f"{name}: not measured")
            continue
        figures.describe(axes, f"{name} over throughput", "right and low")
        _pareto(axes, found, name)
    named = [axes.get_legend_handles_labels() for axes in (first, goodput, share)]
    handles, labels = ([one for pair in named for one in pair[place]] for place in range(2))
    made.legend(handles, labels, loc="outside right upper")
    figures.notes(made, list(missing(found)))
    return made


def _over_rate(axes: Any, found: Sequence[Curve], title: str, unit: str) -> None:
    for number, curve in enumerate(found):
        points = curve.points(title, unit)
        _line(axes, number, [rate for rate, _ in points], [cell for _, cell in points], "")
    rates = [rate for curve in found for rate in curve.rates]
    if unit == "%":
        axes.axhline(GOOD_SHARE, linestyle=":", color="grey", label=f"{GOOD_SHARE:g} % are good")
        axes.set_ylim(0, 105)
    else:
        ends = [0, max(rates)]
        axes.plot(ends, ends, linestyle="--", color="grey", label="all are good")
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("requests sent per second")
    axes.set_ylabel(f"good requests ({unit})")


def _pareto(axes: Any, found: Sequence[Curve], name: str) -> None:
    from matplotlib.ticker import LogFormatter

    lows: list[float] = []
    for number, curve in enumerate(found):
        served = dict(curve.points("throughput", "req/s"))
        for word, style in (("p50", "-"), ("p99", ":")):
            points = [
                (rate, cell)
                for rate, cell in curve.points(f"{name} {word}", "ms")
                if rate in served
            ]
            places = [served[rate].middle for rate, _ in points]
            if not points:
                continue
            lows += [cell.low for _, cell in points]
            label = f"{curve.name}, {word}" if name == "TTFT" else ""
            _line(axes, number, places, [cell for _, cell in points], label, style)
            if word == "p50":
                for place, (rate, cell) in zip(places, points, strict=True):
                    axes.annotate(
                        f"{rate:g}",
                        (place, cell.middle),
                        xytext=(3, -10),
                        textcoords="offset points",
                        fontsize=7,
                    )
    if all(low > 0 for low in lows):  # a logarithm has no 0
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        # labels between powers of ten only where there is room
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    axes.set_xlim(left=0)
    axes.set_xlabel("requests answered per second (at each point: the rate that was sent)")
    axes.set_ylabel(f"{name} (ms)")


def _line(
    axes: Any, number: int, places: list[float], cells: list[Any], label: str, style: str = "-"
) -> None:
    color = figures.COLORS[number % len(figures.COLORS)]
    marker = figures.MARKERS[number % len(figures.MARKERS)]
    middles = [cell.middle for cell in cells]
    axes.plot(places, middles, style, marker=marker, markersize=4, color=color, label=label)
    axes.vlines(places, [c.low for c in cells], [c.high for c in cells], color=color, alpha=0.5)
