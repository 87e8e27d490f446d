"""The page of the metrics, made from those that a proxy has before its first request."""

from __future__ import annotations

import asyncio

from prometheus_client.core import Metric

from pdproxy.app.compose import Proxy
from pdproxy.settings.schema import Node, Pool, Role, Settings
from tests.fakes.tokenizer import Shelf, SimTokenizer
from tests.reference.markdown import NOTE, cell, code, table

_ENGINES: dict[str, Role] = {"http://127.0.0.1:8200": "prefill", "http://127.0.0.1:8300": "decode"}
_HEAD = f"""# Metrics

{NOTE}

`GET /metrics` shows these in Prometheus' text format. A name with `_seconds` is in seconds, one with `_bytes` in bytes. A
histogram has the series `_bucket`, `_sum` and `_count`. "Values" are those that a label has from the start; `node` is an engine's
URL, `model` a name that an engine lists. The page also has the process metrics of `prometheus_client` (`process_`, `python_`).
Which metric answers which question: [monitoring](../guide/monitoring.md).
"""


async def _families() -> list[Metric]:
    """Return what a proxy shows that has engines, tokenizes prompts, and has served nothing."""
    nodes = tuple(Node(url=url, role=role) for url, role in _ENGINES.items())
    settings = Settings(pools=(Pool(nodes=nodes, tokenize="always", tokenizer="model"),))
    proxy = Proxy.build(settings, library=Shelf(model=SimTokenizer()))
    try:
        return list(proxy.metrics.collect())
    finally:
        await proxy.stop()


def _row(family: Metric) -> tuple[str, str, str, str]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels: dict[str, dict[str, None]] = {label: {} for label in family.__dict__["_labelnames"]}
    for sample in family.samples:
        for label in labels:
            labels[label].setdefault(sample.labels[label])
    return (
        code(name),
        family.type,
        ", ".join(_label(name, label, values) for label, values in labels.items()),
        cell(family.documentation),
    )


def _label(family: str, name: str, values: dict[str, None]) -> str:
    if family.endswith("_info"):
        return code(name)  # versions of the machine on which the page was made
    known = [value for value in values if value and value not in _ENGINES]
    return f"{code(name)} ({', '.join(known)})" if known else code(name)


def page() -> str:
    """Return the page."""
    rows = [_row(family) for family in asyncio.run(_families())]
    return f"{_HEAD}\n{table(('metric', 'type', 'labels: values', 'counts'), sorted(rows))}"
