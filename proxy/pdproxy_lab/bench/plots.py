"""A plot of runs side by side. It needs matplotlib, which is an extra: `pip install
'pdproxy[plot]'`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdproxy_lab.bench.compare import Row, Table
from pdproxy_lab.bench.errors import USAGE_ERROR, BenchError

ENDINGS = (".png", ".svg", ".pdf")
_PANELS = (
    ("TTFT", "TTFT "),
    ("TPOT", "TPOT "),
    ("worst gap", "worst gap "),
    ("good requests", "good: "),
)


def check(path: Path) -> None:
    """Check before a run that its plot can be made.

    Raises:
        BenchError: matplotlib is missing, or the file's ending is none of `ENDINGS`.
    """
    if path.suffix.lower() not in ENDINGS:
        raise BenchError(
            f"--plot: expected a file that ends with {', '.join(ENDINGS)}, got {path.name!r}",
            USAGE_ERROR,
        )
    try:
        import matplotlib as _  # noqa: F401 - only for this
    except ImportError:
        raise BenchError(
            "--plot: needs matplotlib: pip install 'pdproxy[plot]'", USAGE_ERROR
        ) from None


def plot(table: Table, path: Path) -> None:
    """Write a plot: bars are medians over seeds, lines go from the lowest to the highest value.

    Raises:
        BenchError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, prefix) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        rows = [row for row in table.rows if row.title.startswith(prefix) and row.unit != "%"]
        _bars(axes, table, rows, prefix)
        axes.set_title(title)
        axes.set_ylabel(rows[0].unit if rows else "not measured")
        axes.set_ylim(bottom=0)
    figure.legend(table.names, loc="outside lower center", ncols=min(len(table.names), 4))
    try:
        figure.savefig(path)
    except OSError as error:
        raise BenchError(f"--plot: {path.name} can't be written: {error.strerror}") from None


def _bars(axes: Any, table: Table, rows: list[Row], prefix: str) -> None:
    width = 0.8 / len(table.names)
    for number, _ in enumerate(table.names):
        cells = [row.cells[number] for row in rows]
        heights = [cell.middle if cell else 0.0 for cell in cells]
        spans = [
            [cell.middle - cell.low if cell else 0.0 for cell in cells],
            [cell.high - cell.middle if cell else 0.0 for cell in cells],
        ]
        places = [
            index + (number - (len(table.names) - 1) / 2) * width for index in range(len(rows))
        ]
        axes.bar(places, heights, width, yerr=spans, capsize=3)
    axes.set_xticks(range(len(rows)), [row.title.removeprefix(prefix) for row in rows])
