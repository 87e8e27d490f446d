"""Runs side by side: medians over seeds with the lowest and the highest value, one column per
server. Pure, but for the files.

Also reads result files of vLLM's serving benchmark: they have no `pdproxy` key, so some rows stay
empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from pdproxy_lab.bench.errors import USAGE_ERROR, BenchError, one_line
from pdproxy_lab.bench.measures import PERCENTILES
from pdproxy_lab.bench.record import Record

MAX_FILE = 1 << 30
"""Bytes of a result file."""
MAX_COLUMNS = 16
_PARTED = {"classes": "class", "decisions": "decision"}
"""What a run's requests are parted by: the key of the record, and its word."""


class Cell(msgspec.Struct, frozen=True):
    """One measure of one server over its runs: median, lowest, highest; None: not measured in any
    run, or not usable.
    """

    middle: float
    low: float
    high: float
    runs: int


class Row(msgspec.Struct, frozen=True):
    """One measure of all servers. `digits`: behind the point."""

    title: str
    unit: str
    digits: int
    cells: tuple[Cell | None, ...]


class Table(msgspec.Struct, frozen=True):
    """Columns are servers, or the rates of a sweep."""

    names: tuple[str, ...]
    rows: tuple[Row, ...]


def read_records(path: Path) -> list[Record]:
    """Read a file that `--json` wrote, or one of vLLM's benchmark: a JSON object per line, or one
    over several lines.

    Raises:
        BenchError: it can't be read, or is something else.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise BenchError(f"{path.name} can't be read: {error.strerror}", USAGE_ERROR) from None
    if len(content) > MAX_FILE:
        raise BenchError(f"{path.name} is larger than {MAX_FILE} bytes", USAGE_ERROR)
    try:
        try:
            found = [msgspec.json.decode(content)]
        except msgspec.DecodeError:
            found = [msgspec.json.decode(line) for line in content.splitlines() if line.strip()]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BenchError(
            f"{path.name} is no result file: {' '.join(str(error).split())}", USAGE_ERROR
        ) from None
    if not found or not all(isinstance(one, dict) and "request_throughput" in one for one in found):
        raise BenchError(
            f"{path.name} is no result file: it needs objects with request_throughput", USAGE_ERROR
        )
    for one in found:
        ours = one.get("pdproxy")
        if not isinstance(ours, dict):
            one["pdproxy"] = ours = {}
        name = ours.get("name") or one.get("label") or path.stem
        ours["name"] = one_line(str(name), 64)
        ours |= {key: _texts(ours.get(key)) for key in ("not_measured", "errors", "error_texts")}
        remarks = ours.get("remarks")
        lines = remarks if isinstance(remarks, list) else []
        ours["remarks"] = [one_line(str(line)) for line in lines]
    return found


def _texts(value: object) -> dict[str, str]:
    """Return texts that a file may have, as a terminal can show them."""
    found = value if isinstance(value, dict) else {}
    return {one_line(str(key)): one_line(str(text)) for key, text in found.items()}


def name_of(record: Record) -> str:
    """Return the server's name."""
    return str(record["pdproxy"]["name"])


def table_of(records: Sequence[Record], column: Callable[[Record], str] = name_of) -> Table:
    """Return the records side by side, in the order in which the columns' names come first.
    `column`: the name of a record's column.

    Raises:
        BenchError: they are too many columns.
    """
    names = tuple(dict.fromkeys(map(column, records)))
    if len(names) > MAX_COLUMNS:
        raise BenchError(f"{len(names)} columns: {MAX_COLUMNS} fit side by side", USAGE_ERROR)
    columns = [[record for record in records if column(record) == name] for name in names]

    def row(title: str, unit: str, digits: int, *path: str, factor: float = 1.0) -> Row:
        return Row(
            title,
            unit,
            digits,
            tuple(_cell((_at(one, path) for one in column), factor) for column in columns),
        )

    rows = [
        row("requests completed", "", 0, "completed"),
        row("failed", "", 0, "failed"),
        row("throughput", "req/s", 2, "request_throughput"),
        row("output tokens", "tok/s", 0, "output_throughput"),
    ]
    rows.append(row("prompt tokens cached", "%", 1, "pdproxy", "cached_share", factor=100.0))
    for title, key in (
        ("TTFT", "ttft"),
        ("TPOT", "tpot"),
        ("ITL", "itl"),
        ("worst gap", "gap"),
        ("end to end", "e2el"),
    ):
        place = ("pdproxy",) if key == "gap" else ()
        for p in PERCENTILES:
            word = "median" if p == 50 else f"p{p}"
            rows.append(row(f"{title} p{p}", "ms", 1, *place, f"{word}_{key}_ms"))
    over = ("pdproxy", "ttft_over_prediction")
    rows.append(row("TTFT over prediction", "%", 1, *over, factor=100.0))
    for name in dict.fromkeys(str(slo.get("name")) for record in records for slo in _slos(record)):
        goods = [[_slo(one, name) for one in column] for column in columns]
        for title, unit, key, factor in (
            ("good", "req/s", "goodput", 1.0),
            ("good", "%", "share", 100.0),
        ):
            cells = tuple(_cell((slo.get(key) for slo in column), factor) for column in goods)
            rows.append(Row(f"{title}: {name}", unit, 1 if unit == "%" else 2, cells))
    rows.append(row("own lag p99", "ms", 1, "pdproxy", "lag_ms", "p99"))
    return Table(names, tuple(one for one in rows if any(one.cells)))


def part_tables(records: Sequence[Record]) -> Iterator[tuple[str, Table]]:
    """Yield a caption and a table for each server and what its requests were parted by: a column
    for each part, `MAX_COLUMNS` at most.
    """
    for name in dict.fromkeys(map(name_of, records)):
        own = [record for record in records if name_of(record) == name]
        for key, word in _PARTED.items():
            parts = [part for record in own for part in _parts(record, key)]
            shown = list(dict.fromkeys(map(name_of, parts)))[:MAX_COLUMNS]
            if shown:
                yield (
                    f"{name} by {word}",
                    table_of([part for part in parts if name_of(part) in shown]),
                )


def _parts(record: Record, key: str) -> Iterator[Record]:
    """Yield the records of a run's parts, with their names. A file may have anything there."""
    found = record["pdproxy"].get(key)
    for name, part in found.items() if isinstance(found, dict) else ():
        ours = part.get("pdproxy") if isinstance(part, dict) else None
        if isinstance(ours, dict):
            yield part | {"pdproxy": ours | {"name": one_line(str(name), 64)}}


def _slos(record: Record) -> list[Record]:
    slos = record["pdproxy"].get("slos")
    return [slo for slo in slos if isinstance(slo, dict)] if isinstance(slos, list) else []


def _slo(record: Record, name: str) -> Record:
    return next((slo for slo in _slos(record) if slo.get("name") == name), {})


def _at(record: Record, path: Sequence[str]) -> Any:
    value: Any = record
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _cell(values: Iterable[Any], factor: float) -> Cell | None:
    found = [
        float(value) * factor
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
    return Cell(median(found), min(found), max(found), len(found)) if found else None
