"""The load of runs in one line, for the head of a plot. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdproxy_lab.bench.curves import rate_of
from pdproxy_lab.bench.record import Record

_MAX_NAMES = 3


def load_text(records: Sequence[Record]) -> str:
    """Return what the records tell of their load: arrivals, rates, mean lengths, models, seeds."""
    return "; ".join(_parts(records))


def _parts(records: Sequence[Record]) -> Iterator[str]:
    rates = sorted({rate for one in records if (rate := rate_of(one)) is not None})
    arrivals = _names(one["pdproxy"].get("arrivals") for one in records)
    traces = _names(one["pdproxy"].get("trace") for one in records)
    if rates:
        shown = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}"
        yield f"{arrivals} arrivals, {shown} req/s" if arrivals else f"{shown} req/s"
    if traces:
        yield f"requests of {traces}"
    answered = sum(_count(one, "completed") for one in records)
    for what, key in (("prompts", "total_input_tokens"), ("answers", "total_output_tokens")):
        known = [one for one in records if _count(one, key)]
        if known and sum(_count(one, "completed") for one in known) == answered:
            mean = sum(_count(one, key) for one in known) / answered
            yield f"{what} of {mean:.0f} tokens on average"
    if models := _names(one.get("model_id") for one in records):
        yield f"model {models}"
    seeds = {one["pdproxy"].get("seed") for one in records} - {None}
    if seeds:
        yield f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"


def _count(record: Record, key: str) -> int:
    value = record.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _names(values: Iterator[object]) -> str:
    found = list(dict.fromkeys(str(value) for value in values if value is not None))
    more = ", ..." if len(found) > _MAX_NAMES else ""
    return ", ".join(found[:_MAX_NAMES]) + more
