"""The report as text: the table of servers, and below it what was not measured, the errors and
remarks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdproxy_lab.bench.compare import Cell, Table
from pdproxy_lab.bench.record import Record

_NOTHING = "-"
_MAX_LINES = 40
"""Remarks that are printed. More are in the JSON."""


def text_of(table: Table, records: Sequence[Record]) -> str:
    """Return the report, with a line feed at its end."""
    seeds = max((cell.runs for row in table.rows for cell in row.cells if cell), default=0)
    head = f"median of {seeds} runs (lowest to highest)" if seeds > 1 else "one run"
    lines = [head, *_table(table)]
    remarks = list(dict.fromkeys(_remarks(records)))
    if remarks:
        lines += ["", *remarks[:_MAX_LINES]]
    if len(remarks) > _MAX_LINES:
        lines.append(f"... and {len(remarks) - _MAX_LINES} lines more")
    return "\n".join(lines) + "\n"


def _table(table: Table) -> Iterator[str]:
    rows = [["", *table.names]]
    for row in table.rows:
        title = f"{row.title} ({row.unit})" if row.unit else row.title
        rows.append([title, *(_shown(cell, row.digits) for cell in row.cells)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.names) + 1)]
    for title, *cells in rows:
        shown = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([title.ljust(widths[0]), *shown]).rstrip()


def _shown(cell: Cell | None, digits: int) -> str:
    if cell is None:
        return _NOTHING
    middle = f"{cell.middle:.{digits}f}"
    if cell.runs == 1:
        return middle
    return f"{middle} ({cell.low:.{digits}f} to {cell.high:.{digits}f})"


def _remarks(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        ours = record["pdproxy"]
        where = (
            f"{ours.get('name')}, seed {ours.get('seed')}"
            if ours.get("seed") is not None
            else f"{ours.get('name')}"
        )
        if ours.get("partial"):
            yield f"{where}: PARTIAL: it was stopped, {ours.get('cut')} requests were cut"
        refused = ours.get("not_measured") or {}
        if "run" in refused:
            yield f"{where}: NOT MEASURED: {refused['run']}"
        yield from _missing(
            str(ours.get("name")), where, {key: why for key, why in refused.items() if key != "run"}
        )
        for kind, count in (ours.get("errors") or {}).items():
            yield f"{where}: {count} x {kind}: {(ours.get('error_texts') or {}).get(kind, '')}"
        yield from (f"{where}: {remark}" for remark in ours.get("remarks") or ())
        if ours.get("short"):
            yield f"{where}: {ours['short']} answers have fewer tokens than asked"
        if ours.get("left_out"):
            yield f"{where}: {ours['left_out']} requests of the trace were left out: too long"
        counted, asked = record.get("total_input_tokens"), ours.get("asked_input_tokens")
        if counted and asked and abs(counted - asked) > 0.02 * asked:
            yield f"{where}: prompts had {counted / asked:.2f} times the tokens that were asked for"


def _missing(name: str, where: str, refused: dict[str, str]) -> Iterator[str]:
    """Yield a line per reason why something was not measured. Too few values are the same in all
    runs: without the seed.
    """
    by_reason: dict[str, list[str]] = {}
    for key, reason in refused.items():
        few = reason.startswith("needs ")
        by_reason.setdefault(reason.partition(",")[0] if few else reason, []).append(key)
    for reason, keys in by_reason.items():
        yield (
            f"{name if reason.startswith('needs ') else where}: not measured: {', '.join(keys)}: "
            f"{reason}"
        )
