"""The runs of a sweep as curves: what each server made of each rate. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pdproxy_lab.bench.compare import Cell, Row, Table, name_of, table_of
from pdproxy_lab.bench.record import Record

GOOD_SHARE = 90.0
"""Percent of the requests that must be good at the rate that a server is said to serve."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One server: `rates` in requests per second, ascending, and a table with a column for each."""

    name: str
    rates: tuple[float, ...]
    table: Table
    not_measured: dict[float, str]
    """Why nothing was measured at a rate."""

    def row(self, title: str, unit: str) -> Row | None:
        """Return a measure at all rates. None: it was measured at none."""
        return next(
            (one for one in self.table.rows if (one.title, one.unit) == (title, unit)), None
        )

    def points(self, title: str, unit: str) -> list[tuple[float, Cell]]:
        """Return rates with a measure, without those at which it was not measured."""
        row = self.row(title, unit)
        cells = () if row is None else row.cells
        return [(rate, cell) for rate, cell in zip(self.rates, cells, strict=False) if cell]

    @property
    def slos(self) -> list[str]:
        """The names of the SLOs."""
        rows = (row.title for row in self.table.rows if row.unit == "%")
        return [title.removeprefix("good: ") for title in rows if title.startswith("good: ")]


def rate_of(record: Record) -> float | None:
    """Return a run's rate, in requests per second. None: it has none that is a number."""
    rate = record.get("request_rate")
    if not isinstance(rate, int | float) or isinstance(rate, bool):
        return None
    return float(rate) if math.isfinite(rate) else None


def curves_of(records: Sequence[Record]) -> list[Curve]:
    """Return a curve per server. Empty: no server was measured at two rates, so they are no sweep.

    Raises:
        BenchError: a server has too many rates.
    """
    found = []
    for name in dict.fromkeys(map(name_of, records)):
        own = [one for one in records if name_of(one) == name and rate_of(one) is not None]
        own.sort(key=lambda one: rate_of(one) or 0.0)
        rates = tuple(dict.fromkeys(rate_of(one) or 0.0 for one in own))
        reasons = {}
        for one in own:
            missing = one["pdproxy"].get("not_measured")
            if isinstance(missing, dict) and "run" in missing:
                reasons[rate_of(one) or 0.0] = str(missing["run"])
        table = table_of(own, lambda one: f"{rate_of(one):g}")
        found.append(Curve(name=name, rates=rates, table=table, not_measured=reasons))
    return found if any(len(curve.rates) > 1 for curve in found) else []


def served(curve: Curve, slo: str) -> float | None:
    """Return the highest rate up to which at least `GOOD_SHARE` percent of the requests were good
    at all rates of the sweep, in requests per second. None: not at the lowest one.
    """
    shares = dict(curve.points(f"good: {slo}", "%"))
    best = None
    for rate in curve.rates:
        cell = shares.get(rate)
        if cell is None or cell.middle < GOOD_SHARE or rate in curve.not_measured:
            break
        best = rate
    return best


def served_text(curve: Curve, slo: str) -> str:
    """Return `served` in words."""
    best = served(curve, slo)
    if best is None:
        return f"less than {curve.rates[0]:g} req/s"
    return f"{'at least ' if best == curve.rates[-1] else ''}{best:g} req/s"
