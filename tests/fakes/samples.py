"""Samples of metrics by their name and labels. A page has a thousand lines, and the library takes
10 ms to read them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from pdproxy.observe.page import Family


def total(families: Iterable[Metric | Family], name: str, labels: Mapping[str, str]) -> float:
    """The sum of the samples of this name with these labels, 0 where there is none."""
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def read(page: str, beginning: str) -> Iterable[Metric]:
    """The samples of a page whose names begin so, each in a family without a type."""
    return text_string_to_metric_families(
        "".join(f"{line}\n" for line in page.splitlines() if line.startswith(beginning))
    )
