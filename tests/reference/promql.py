"""PromQL made of the metrics' declarations: a metric, label or value that does not exist is an
error where the query is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from prometheus_client.parser import text_string_to_metric_families

from pdproxy.observe.description import Description, MetricKind
from pdproxy.observe.metrics import Metrics

Where = Mapping[str, str | tuple[str, ...]]
"""The values of labels that series must have: one, or one of several."""
OF_SCRAPE = ("instance", "job")
"""Labels that Prometheus gives each series."""
UP = Description("up", MetricKind.GAUGE, "Whether Prometheus gets a target's metrics", "bool")
"""Prometheus' own metric of each target."""


class QueryError(ValueError):
    """A query that can't be meant so."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, the labels that its series have, and the unit of their values."""

    text: str
    labels: frozenset[str]
    unit: str

    def sum(self, *by: str) -> Query:
        """Return the sums of the series with the same values of these labels."""
        return self._together("sum", by)

    def max(self, *by: str) -> Query:
        """Return the largest of them."""
        return self._together("max", by)

    def min(self, *by: str) -> Query:
        """Return the smallest of them."""
        return self._together("min", by)

    def _together(self, how: str, by: tuple[str, ...]) -> Query:
        self._has(by)
        grouped = f"{how} by ({', '.join(by)})" if by else how
        return Query(f"{grouped} ({self.text})", frozenset(by), self.unit)

    def over(self, whole: Query, unit: str = "ratio") -> Query:
        """Return these divided by those with the same values of the labels that `whole` has."""
        return Query(f"{self.text} / {self._matching(whole)}{whole.text}", self.labels, unit)

    def _matching(self, other: Query) -> str:
        if self.labels == other.labels:
            return ""
        self._has(tuple(other.labels))
        return f"on ({', '.join(sorted(other.labels))}) group_left () "

    def counting(self, unit: str) -> Query:
        """Return the same, said to count other things than its metric's unit says."""
        return replace(self, unit=unit)

    def plus(self, other: Query) -> Query:
        """Return the sums with the other query's series of the same labels."""
        return self._with("+", other)

    def minus(self, other: Query) -> Query:
        """Return the differences to them."""
        return self._with("-", other)

    def from_now(self) -> Query:
        """Return how many seconds from now the series' times are."""
        return replace(self, text=f"{self.text} - time()")

    def _with(self, operator: str, other: Query) -> Query:
        if self.labels != other.labels:
            raise QueryError(f"{self.text} has other labels than {other.text}")
        return replace(self, text=f"{self.text} {operator} {other.text}")

    def above(self, bound: float) -> Query:
        """Return those of the series that are above a bound."""
        return replace(self, text=f"{self.text} > {bound:g}")

    def below(self, bound: float) -> Query:
        """Return those of the series that are below a bound."""
        return replace(self, text=f"{self.text} < {bound:g}")

    def equal(self, value: float) -> Query:
        """Return those of the series that have a value."""
        return replace(self, text=f"{self.text} == {value:g}")

    def joined(self, other: Query, on: tuple[str, ...], *labels: str) -> Query:
        """Return the series with labels of the other ones, whose values are 1."""
        self._has(on)
        other._has((*on, *labels))
        text = f"({self.text}) * on ({', '.join(on)}) group_left ({', '.join(labels)}) {other.text}"
        return Query(text, self.labels | frozenset(labels), self.unit)

    def _has(self, labels: tuple[str, ...]) -> None:
        for label in labels:
            if label not in self.labels:
                raise QueryError(f"{self.text} has no label {label}")


@dataclass(frozen=True, slots=True)
class Scope:
    """What the queries of one file have in common.

    `matches`: regular expressions for labels, for each metric that has the label; `window`: of
    rates.
    """

    matches: Mapping[str, str]
    window: str

    def now(self, metric: Description, where: Where | None = None) -> Query:
        """Return the values of a gauge."""
        return self._series(metric, MetricKind.GAUGE, where)

    def rate(self, metric: Description, where: Where | None = None) -> Query:
        """Return by how much a counter grows per second."""
        series = self._series(metric, MetricKind.COUNTER, where)
        return Query(
            f"rate({series.text}[{self.window}])", series.labels, f"{metric.unit} per second"
        )

    def increase(self, metric: Description, window: str, where: Where | None = None) -> Query:
        """Return by how much a counter has grown in a window of its own."""
        series = self._series(metric, MetricKind.COUNTER, where)
        return replace(series, text=f"increase({series.text}[{window}])")

    def most(self, metric: Description, window: str, where: Where | None = None) -> Query:
        """Return the largest value of a gauge in a window of its own."""
        series = self._series(metric, MetricKind.GAUGE, where)
        return replace(series, text=f"max_over_time({series.text}[{window}])")

    def mean(self, metric: Description, *by: str, where: Where | None = None) -> Query:
        """Return the mean of what a histogram has observed."""
        sums = self._part(metric, "_sum", where).sum(*by)
        return sums.over(self._part(metric, "_count", where).sum(*by), unit=metric.unit)

    def observed(self, metric: Description, of: str, where: Where | None = None) -> Query:
        """Return how many values per second a histogram observes. `of`: what they are values of."""
        return replace(self._part(metric, "_count", where), unit=f"{of} per second")

    def quantile(
        self, part: float, metric: Description, *by: str, where: Where | None = None
    ) -> Query:
        """Return the value below which this part of what a histogram has observed is."""
        buckets = self._part(metric, "_bucket", where).sum("le", *by)
        text = f"histogram_quantile({part:g}, {buckets.text})"
        return Query(text, frozenset(by), metric.unit)

    def _part(self, metric: Description, part: str, where: Where | None) -> Query:
        series = self._series(metric, MetricKind.HISTOGRAM, where, part)
        labels = series.labels | {"le"} if part == "_bucket" else series.labels
        return Query(f"rate({series.text}[{self.window}])", labels, metric.unit)

    def _series(
        self, metric: Description, kind: MetricKind, where: Where | None, part: str = ""
    ) -> Query:
        if metric.kind is not kind:
            raise QueryError(f"{metric.name} is a {metric.kind.value}, not a {kind.value}")
        labels = frozenset((*metric.label_names, *OF_SCRAPE))
        found = [
            f'{label}=~"{match}"'
            for label, match in self.matches.items()
            if label in labels and label not in (where or {})
        ]
        found += [_matcher(metric, label, value) for label, value in (where or {}).items()]
        chosen = f"{{{', '.join(found)}}}" if found else ""
        return Query(f"{metric.name}{part}{chosen}", labels, metric.unit)


def _matcher(metric: Description, name: str, value: str | tuple[str, ...]) -> str:
    values = (value,) if isinstance(value, str) else value
    if name not in OF_SCRAPE:
        known = next((label.known for label in metric.labels if label.name == name), None)
        if known is None:
            raise QueryError(f"{metric.name} has no label {name}")
        for one in values:
            if known and one not in known:
                raise QueryError(f"{metric.name} has no {name} {one}: {', '.join(known)}")
    return f'{name}="{value}"' if isinstance(value, str) else f'{name}=~"{"|".join(values)}"'


@cache
def of_process(name: str) -> Description:
    """Return a metric that `prometheus_client` shows of the process itself, as on Linux.

    Raises:
        QueryError: it shows no such metric.
    """
    for family in text_string_to_metric_families(Metrics().page().decode()):
        for sample in family.samples:
            if sample.name == name and not sample.labels:
                unit = next((one for one in ("seconds", "bytes") if one in name), "files")
                return Description(name, MetricKind(family.type), family.documentation, unit)
    raise QueryError(f"no process shows {name}")
