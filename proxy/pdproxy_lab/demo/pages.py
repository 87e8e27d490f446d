"""Reads `/metrics` pages, and computes the changes of counters and histograms between pages. Pure.

Owns how a restarted counter is recognized, and how a quantile is read from buckets: both as
Prometheus does it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

Series = tuple[tuple[str, str], ...]
"""A sample's labels, sorted."""
Page = Mapping[str, Mapping[Series, float]]
"""A page: sample name, labels, value."""

Bucket = tuple[float, float]
"""An upper bound, and the number of observations up to it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A page and when it was read, in seconds of any steady clock."""

    at: float
    page: Page


def parse(text: str, names: Iterable[str]) -> Page:
    """Return the samples whose names begin with one of `names`.

    An engine's page has several hundred samples and is read by the event loop that serves, so the
    others are dropped before they are parsed.

    Raises:
        ValueError: the text is not a metrics page.
    """
    wanted = tuple(names)
    lines = [line for line in text.splitlines() if line.startswith(wanted)]
    page: dict[str, dict[Series, float]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            page.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return page


def values(page: Page, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield labels and value of each series of that name with at least these labels."""
    for series, value in page.get(name, {}).items():
        if labels.items() <= dict(series).items():
            yield dict(series), value


def total(page: Page, name: str, **labels: str) -> float:
    """Return the sum of all series of that name with at least these labels; 0 if there is none."""
    return sum(value for _, value in values(page, name, **labels))


def increase(readings: Sequence[Reading], name: str, **labels: str) -> float:
    """Return by how much counters grew over the readings. A counter that fell has restarted: it
    grew by its value.
    """
    return sum(increases(readings, name, labels).values())


def rate(readings: Sequence[Reading], name: str, **labels: str) -> float | None:
    """Return the growth of counters per second; None with fewer than two readings."""
    seconds = readings[-1].at - readings[0].at if readings else 0.0
    return increase(readings, name, **labels) / seconds if seconds > 0 else None


def buckets(readings: Sequence[Reading], histogram: str) -> list[Bucket]:
    """Return what a histogram observed over the readings, all its series together, by upper
    bound.
    """
    found: dict[float, float] = {}
    for series, grown in increases(readings, f"{histogram}_bucket", {}).items():
        bound = float(dict(series)["le"])
        found[bound] = found.get(bound, 0.0) + grown
    return sorted(found.items())


def quantile(found: Sequence[Bucket], q: float) -> float | None:
    """Return the value below which the share `q` (0 to 1) lies, linear within its bucket; None:
    nothing was observed.

    A value above the last finite bound is returned as that bound.
    """
    if not found or found[-1][1] <= 0:
        return None
    rank = q * found[-1][1]
    place = bisect_left([count for _, count in found], rank)
    bound, count = found[place]
    below, before = found[place - 1] if place else (0.0, 0.0)
    if bound == float("inf"):
        return below
    if count <= before:
        return bound
    return below + (bound - below) * (rank - before) / (count - before)


def increases(
    readings: Sequence[Reading], name: str, labels: Mapping[str, str]
) -> dict[Series, float]:
    """Return by how much each series of a counter with these labels grew, as `increase`."""
    found: dict[Series, float] = {}
    for one, other in pairwise(readings):
        before = one.page.get(name, {})
        for series, value in other.page.get(name, {}).items():
            if labels.items() <= dict(series).items():
                delta = value - before.get(series, 0.0)
                found[series] = found.get(series, 0.0) + (delta if delta >= 0 else value)
    return found
