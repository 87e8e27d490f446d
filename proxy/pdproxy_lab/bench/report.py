"""The report as text: the table of servers, and below it what was not measured, the errors and
remarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pdproxy_lab.bench.compare import Cell, Row, Table, part_tables
from pdproxy_lab.bench.record import Record

_NOTHING = "-"
_FEW = "needs "
"""How the reason begins why a percentile has too few values."""
_ALWAYS = (_FEW, "the server reports no ")
_LINES = ("throughput", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "prompt tokens cached")
"""What a table with a line per column has of it, beside goodput."""
_OF_PARTS = ("requests completed", "TTFT over prediction")
_MAX_LINES = 40
"""Remarks that are printed. More are in the JSON."""


def text_of(table: Table, records: Sequence[Record]) -> str:
    """Return the report, with a line feed at its end."""
    lines = [head_of(table), *aligned(cells_of(table))]
    for caption, rows in tables_of_parts(records):
        lines += ["", caption, *aligned(rows)]
    found = remarks(records)
    return "\n".join([*lines, *([""] if found else []), *found]) + "\n"


def head_of(table: Table) -> str:
    """Return how many runs a table is of."""
    seeds = max((cell.runs for row in table.rows for cell in row.cells if cell), default=0)
    return f"median of {seeds} runs (lowest to highest)" if seeds > 1 else "one run"


def remarks(
    records: Sequence[Record],
    what: Callable[[Record], str] = lambda _: "",
    *,
    few: bool = True,
) -> list[str]:
    """Return lines on what was not measured, the errors and remarks. `what`: goes behind a
    server's name; `few`: whether percentiles with too few values are named.
    """
    found = list(dict.fromkeys(_remarks(records, what, few)))
    if len(found) > _MAX_LINES:
        return [*found[:_MAX_LINES], f"... and {len(found) - _MAX_LINES} lines more"]
    return found


def cells_of(table: Table) -> list[list[str]]:
    """Return a table as texts, with the row of names at its beginning."""
    rows = [["", *table.names]]
    rows += [
        [_titled(row), *(_shown(cell, row.digits) for cell in row.cells)] for row in table.rows
    ]
    return rows


def tables_of_parts(records: Sequence[Record]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield a caption, and as texts a table of a server's classes or decisions."""
    for caption, table in part_tables(records):
        yield f"{caption}: medians, in req/s and ms", lines_of(table, "", *_OF_PARTS)


def lines_of(table: Table, title: str, *more: str) -> list[list[str]]:
    """Return a table as texts, with a line for each of its columns and a row of titles. `title`: of
    the names; `more`: what the lines of parts have beside the usual; they have no rates of good
    requests.
    """
    rows = [
        row
        for row in table.rows
        if row.title in (*more, *_LINES)
        or (row.title.startswith("good: ") and (row.unit == "%" or not more))
    ]
    titles = [f"{row.title} (%)" if row.unit == "%" else row.title for row in rows]
    found = [[title, *titles]]
    for name, *cells in zip(table.names, *(row.cells for row in rows), strict=True):
        shown = [
            _NOTHING if cell is None else f"{cell.middle:.{row.digits}f}"
            for row, cell in zip(rows, cells, strict=True)
        ]
        found.append([name, *shown])
    return found


def _titled(row: Row) -> str:
    """Return a row's title with its unit."""
    return f"{row.title} ({row.unit})" if row.unit else row.title


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line per row: the first column on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
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


def _remarks(records: Sequence[Record], what: Callable[[Record], str], few: bool) -> Iterator[str]:
    for record in records:
        ours = record["pdproxy"]
        name = str(ours.get("name"))
        where = f"{name}{what(record)}"
        if ours.get("seed") is not None:
            where = f"{where}, seed {ours['seed']}"
        if ours.get("partial"):
            yield f"{where}: PARTIAL: it was stopped, {ours.get('cut')} requests were cut"
        refused = ours.get("not_measured") or {}
        if "run" in refused:
            yield f"{where}: NOT MEASURED: {refused['run']}"
        parts = {
            key: why
            for key, why in refused.items()
            if key != "run" and (few or not why.startswith(_FEW))
        }
        yield from _missing(name, where, parts)
        for kind, count in (ours.get("errors") or {}).items():
            yield f"{where}: {count} x {kind}: {(ours.get('error_texts') or {}).get(kind, '')}"
        yield from (f"{where}: {remark}" for remark in ours.get("remarks") or ())
        if ours.get("short"):
            yield f"{where}: {ours['short']} answers have fewer tokens than asked"
        if ours.get("left_out"):
            file = ours.get("trace") or "the trace"
            yield f"{where}: {ours['left_out']} requests of {file} were left out"
        counted, asked = record.get("total_input_tokens"), ours.get("asked_input_tokens")
        if counted and asked and abs(counted - asked) > 0.02 * asked:
            yield f"{where}: prompts had {counted / asked:.2f} times the tokens that were asked for"


def _missing(name: str, where: str, refused: dict[str, str]) -> Iterator[str]:
    """Yield a line per reason why something was not measured. Too few values, and what a server
    never reports, are the same in all runs: without the run.
    """
    by_reason: dict[str, list[str]] = {}
    for key, reason in refused.items():
        few = reason.startswith(_FEW)
        by_reason.setdefault(reason.partition(",")[0] if few else reason, []).append(key)
    for reason, keys in by_reason.items():
        yield (
            f"{name if reason.startswith(_ALWAYS) else where}: not measured: {', '.join(keys)}: "
            f"{reason}"
        )
