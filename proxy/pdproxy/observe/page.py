"""Metrics as text, in Prometheus' format.

The text is prometheus-client's, byte for byte. It is made in portions, between which the event loop
can do other work: with 200 engines it has 8,000 lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

AT_ONCE = 200
"""Lines of a portion: about half a millisecond."""
_number: Callable[[float], str] = floatToGoString


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, named as on the page, and its samples, which may be made one by one."""

    name: str
    kind: str
    text: str
    samples: Iterable[Sample]


def portions(families: Iterable[Family]) -> Iterator[str]:
    """Yield the text of counters, gauges and histograms without timestamps, in portions."""
    lines: list[str] = []
    for one in families:
        words = one.text.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {one.name} {words}\n# TYPE {one.name} {one.kind}\n")
        for sample in one.samples:
            pairs = [f'{name}="{_escaped(sample.labels[name])}"' for name in sorted(sample.labels)]
            labels = f"{{{','.join(pairs)}}}" if pairs else ""
            lines.append(f"{sample.name}{labels} {_number(sample.value)}\n")
            if len(lines) >= AT_ONCE:
                yield "".join(lines)
                lines = []
    yield "".join(lines)


def whole(families: Iterable[Family]) -> bytes:
    """Return the text, made at once."""
    return "".join(portions(families)).encode()


async def in_turns(families: Iterable[Family]) -> bytes:
    """Return the text. Each portion is made in a turn of the event loop of its own."""
    text = []
    for portion in portions(families):
        text.append(portion)
        await asyncio.sleep(0)
    return "".join(text).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
