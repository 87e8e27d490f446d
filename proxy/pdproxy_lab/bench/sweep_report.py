"""The report of a sweep as text: a table of the rates for each server, and the highest rate that
each of them served within each SLO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdproxy_lab.bench.curves import GOOD_SHARE, Curve, rate_of, served_text
from pdproxy_lab.bench.record import Record
from pdproxy_lab.bench.report import aligned, lines_of, remarks

_LEGEND = "-: not measured, or a percentile needs more values (the 99th: 100 answers)"


def text_of(curves: Sequence[Curve], records: Sequence[Record]) -> str:
    """Return the report, with a line feed at its end."""
    lines = []
    for curve in curves:
        lines += [f"{curve.name}: medians, in req/s and ms", *aligned(rows_of(curve)), ""]
    lines += [_LEGEND, "", *capacities(curves)]
    return "\n".join([*lines, *notes_of(curves, records)]) + "\n"


def notes_of(curves: Sequence[Curve], records: Sequence[Record]) -> list[str]:
    """Return lines on what was not measured, the errors and remarks."""
    measured = [one for one in records if "run" not in (one["pdproxy"].get("not_measured") or {})]
    return [
        *missing(curves),
        *remarks(measured, lambda one: f", {rate_of(one) or 0:g} req/s", few=False),
    ]


def rows_of(curve: Curve) -> list[list[str]]:
    """Return a server's table, with a row of titles and one per rate."""
    return lines_of(curve.table, "rate")


def capacities(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a line per SLO: the highest rate that each server served."""
    for slo in dict.fromkeys(slo for curve in curves for slo in curve.slos):
        rates = "; ".join(f"{one.name} {served_text(one, slo)}" for one in curves)
        yield f"{GOOD_SHARE:g} % of the requests were good ({slo}) up to: {rates}"


def missing(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a line per server and reason: at which rates nothing was measured."""
    for curve in curves:
        for why in dict.fromkeys(curve.not_measured.values()):
            rates = [f"{rate:g}" for rate, reason in curve.not_measured.items() if reason == why]
            yield f"{curve.name}: NOT MEASURED at {', '.join(rates)} req/s: {why}"
