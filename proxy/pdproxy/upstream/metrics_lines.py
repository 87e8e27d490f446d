"""Reads single lines of a page in Prometheus' text format, without parsing the rest of the page.

A line as `prometheus_client` writes it is read here, in 2 us; any other one by the library, which
takes 50 us: so the callers limit their number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from pdproxy.kit.text import truncate

MAX_LINE = 4 << 10
"""Bytes of a line: the library's time for a line grows with the square of its labels."""
_LABEL = r'(_?[a-zA-Z][a-zA-Z0-9_]*)="([^"\\]*)"'
_LABELS = re.compile(_LABEL)
_PLAIN = re.compile(
    rf"[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{{({_LABEL}(?:,{_LABEL})*)?\}})? "
    r"([0-9]{1,15}(?:\.[0-9]{1,17})?(?:e[-+]?[0-9]{1,2})?)"
)
"""A line without escapes and without a timestamp, whose value is finite and has no sign."""


def lines_of(page: bytes, names: Iterable[bytes], most: int) -> dict[bytes, list[bytes]]:
    """Return the lines of some metrics, by name.

    Raises:
        ValueError: there are more than `most`, or one is too long: what the page has, in words.
    """
    found: dict[bytes, list[bytes]] = {}
    text, count = b"\n" + page, 0
    for name in names:
        lines = found[name] = []
        start = b"\n" + name
        at = text.find(start)
        while at >= 0:
            count += 1
            if count > most:
                raise ValueError(f"more than {most} lines of those that are read")
            end = text.find(b"\n", at + 1)
            line = text[at + 1 : end if end >= 0 else len(text)]
            if line[len(name) : len(name) + 1] in b"{ \t":
                if len(line) > MAX_LINE:
                    raise ValueError(f"more than {MAX_LINE} bytes in a line that is read")
                lines.append(line)
            at = text.find(start, at + 1)
    return found


def read_line(line: bytes) -> tuple[dict[str, str], float]:
    """Return the labels and the value of a line.

    Raises:
        ValueError: it is none, or its value is not finite: what the page has, in words.
    """
    text = line.decode("utf-8", "replace")
    if (plain := _PLAIN.fullmatch(text)) is not None:
        pairs = _LABELS.findall(plain[1] or "")
        labels = dict(pairs)
        if len(labels) == len(pairs):
            return labels, float(plain[plain.lastindex or 0])
    try:
        (family,) = text_string_to_metric_families(text + "\n")
        (sample,) = family.samples
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"a line not in Prometheus text format: {truncate(error)}") from None
    if not math.isfinite(sample.value):
        raise ValueError(f"a value that is not finite: {truncate(sample.name)} {sample.value}")
    return sample.labels, sample.value
