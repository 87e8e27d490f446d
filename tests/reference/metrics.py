"""The page of the metrics, made from their declarations."""

from __future__ import annotations

from importlib import import_module

from pdproxy.observe.description import Description, Label, declared
from tests.reference.markdown import NOTE, cell, code, table

_HEAD = f"""# Metrics

{NOTE}

`GET /metrics` shows these in Prometheus' text format, and those of the process itself (`process_*`,
`python_*`, as of `prometheus_client`). A histogram has the series `_bucket`, `_sum` and `_count`.
[Monitoring](../guide/monitoring.md) shows which question each answers.

With [several workers](../guide/processes.md#workers) the page is one for all. `workers` says how
their numbers become one: `sum`, `most`, `least`, or `mean`, the part of the workers for which it is
so.
"""
import_module("pdproxy.workers.parent")  # and with it all that counts
METRICS = declared()


def _row(one: Description) -> tuple[str, str, str, str, str, str]:
    labels = ", ".join(code(label.name) for label in one.labels)
    return code(one.name), one.kind.value, one.unit, labels, one.workers.value, cell(one.text)


def _values(one: Description, label: Label) -> list[tuple[str, str]]:
    return [(code(value), cell(text)) for value, text in label.values] or [("", cell(label.text))]


def _section(one: Description) -> str:
    rows = [(code(label.name), *row) for label in one.labels for row in _values(one, label)]
    return f"### {one.name}\n\n{table(('label', 'value', 'meaning'), rows)}"


def page() -> str:
    """Return the page."""
    overview = table(
        ("metric", "type", "unit", "labels", "workers", "counts"), [_row(one) for one in METRICS]
    )
    sections = "\n".join(_section(one) for one in METRICS if one.labels)
    return f"{_HEAD}\n{overview}\n## Labels\n\n{sections}"
