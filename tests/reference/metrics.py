"""The page of the metrics, made from their declarations."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

from pdproxy.observe.description import Description, Label, MetricKind, declared
from tests.reference.markdown import NOTE, cell, code, table

_HEAD = f"""# Metrics

{NOTE}

`GET /metrics` shows these in Prometheus' text format, and those of the process itself (`process_*`,
`python_*`, as of `prometheus_client`). A histogram has the series `_bucket`, `_sum` and `_count`.
[Monitoring](../guide/monitoring.md) shows which question each answers.

With [several workers](../guide/processes.md#workers) the page is one for all. `workers` says how
the numbers of a gauge become one: `sum`, `most`, `least`, or `mean`, the part of the workers for
which it is so. All others are sums.
"""
import_module("pdproxy.workers.parent")  # and with it all that counts
METRICS = declared()


_MOST = "The first {most:,} values of all processes are shown; all others are `other`"
_ALIKE = 3
"""So many metrics have a label of one meaning: it is explained once, before all others."""


def _row(one: Description) -> tuple[str, str, str, str]:
    labels = ", ".join(code(label.name) for label in one.labels)
    rule = f", {one.workers.value}" if one.kind is MetricKind.GAUGE else ""
    unit = "" if one.kind is MetricKind.HISTOGRAM else f", {one.unit}"
    return code(one.name), labels, f"{one.kind.value}{unit}{rule}", cell(one.text)


def _values(label: Label, above: dict[Label, str]) -> str:
    """Return a label with its values, or with what it is. `above`: the labels that are explained
    above, each with the metric where that is: what one of them has is not said again.

    Values that are the settings of one section are named together.
    """
    if label in above:
        return f"{code(label.name)}: as of {_link(above[label])}.\n"
    if not label.values:
        most = "" if label.most is None else f". {_MOST.format(most=label.most)}"
        return f"{code(label.name)}: {cell(label.text)}{most}.\n"
    values = dict(label.values)
    parts = {one: name for one, name in above.items() if _is_part(one, label)}
    part = max(parts, key=lambda one: len(one.values), default=None)
    lines = []
    if part is not None:
        values = {value: text for value, text in values.items() if value not in part.known}
        lines = [f"- those of {_link(parts[part])}"]
    sections: dict[str, list[str]] = {}
    for value, text in values.items():
        section, _, name = text.rpartition(".")
        if section and name == value:
            sections.setdefault(section, []).append(code(value))
        else:
            lines.append(f"- {code(value)}: {cell(text)}")
    lines += [
        f"- {', '.join(names)}: the setting of that name in {code(section)}"
        for section, names in sections.items()
    ]
    return "\n".join([f"{code(label.name)}:\n", *lines, ""])


def _is_part(one: Label, label: Label) -> bool:
    return one.name == label.name and len(one.values) >= _ALIKE and {*one.values} < {*label.values}


def _link(name: str) -> str:
    return f"[{name}](#{name})"


def _labels() -> str:
    """Return what the labels of all metrics mean: each meaning once."""
    uses = Counter(label for one in METRICS for label in one.labels)
    common = [label for label, times in uses.items() if times >= _ALIKE and not label.values]
    above: dict[Label, str] = {}
    parts = ["Of all metrics that have one:\n"]
    parts += [f"- {code(label.name)}: {cell(label.text)}" for label in common]
    parts.append("")
    for one in METRICS:
        own = [label for label in one.labels if label not in common]
        if own:
            parts.append(f"### {one.name}\n")
        for label in own:
            parts.append(_values(label, above))
            above.setdefault(label, one.name)
    return "\n".join(parts)


def page() -> str:
    """Return the page."""
    overview = table(
        ("metric", "labels", "type, unit, workers", "counts"), [_row(one) for one in METRICS]
    )
    return f"{_HEAD}\n{overview}\n## Labels\n\n{_labels()}"
