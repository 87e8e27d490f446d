"""The table of a fit as Markdown: each measured cell beside its prediction, and what does not fit.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdproxy.engine_model.profile import Profile
from tests.fit.measured import COLUMNS, Measured, Row
from tests.fit.predict import Predicted

TOLERANCE = 0.15
"""A predicted value fits if it differs by no more than this share of the measured one."""
_HEADS = {
    "ttft_p50": "TTFT p50",
    "ttft_p95": "TTFT p95",
    "ttft_p99": "TTFT p99",
    "tpot_p50": "TPOT p50",
    "tpot_p95": "TPOT p95",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "goodput": "goodput",
    "throughput": "throughput",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured value beside its prediction."""

    row: Row
    column: str
    measured: float
    predicted: Predicted

    @property
    def fits(self) -> bool:
        """Whether the prediction is within the tolerance."""
        return abs(self.predicted.median / self.measured - 1) <= TOLERANCE

    @property
    def in_spread(self) -> bool:
        """Whether single runs of the prediction reach the measured value: then one run cannot tell
        them apart.
        """
        return self.predicted.low <= self.measured <= self.predicted.high


def cells_of(measured: Measured, predictions: Sequence[Mapping[str, Predicted]]) -> list[Cell]:
    """Return every measured value with its prediction; `predictions` has one entry per row."""
    return [
        Cell(row, column, value, found[column])
        for row, found in zip(measured.rows, predictions, strict=True)
        for column in COLUMNS
        for value in row.cells.get(column, ())
    ]


def markdown(
    measured: Measured, predictions: Sequence[Mapping[str, Predicted]], profile: Profile, seeds: int
) -> str:
    """Return the page."""
    cells = cells_of(measured, predictions)
    fitting = sum(cell.fits for cell in cells)
    reached = sum(cell.in_spread and not cell.fits for cell in cells)
    load = measured.load
    predicted = (
        f"Predicted: the median of {seeds} {'run' if seeds == 1 else 'runs'} on virtual engines "
        f"with the profile; prompts of"
        f" {load.prompt_tokens} tokens, {load.output_tokens} out, Poisson arrivals for "
        f"{load.seconds:g} s. Times are in"
        f" milliseconds, rates in requests per second; goodput counts requests with TTFT ≤ "
        f"{load.ttft_slo_ms:g} ms and"
        f" TPOT ≤ {load.tpot_slo_ms:g} ms."
    )
    result = (
        f"**{fitting} of {len(cells)} values are within {TOLERANCE:.0%}.** {reached} more, "
        f"marked ~, differ by more, but single"
        f" predicted runs reach the measured value: one run cannot tell them apart. "
        f"{len(cells) - fitting - reached}, marked !,"
        " do not fit."
    )
    lines = [
        f"# The profile `{profile.name}` beside measurements",
        "",
        f"Measured: {measured.source}.",
        "",
        predicted,
        "",
        result,
        "",
        "Each cell: measured (one value per run) → predicted.",
        "",
        f"| way | req/s | {' | '.join(_HEADS[column] for column in COLUMNS)} |",
        f"| -- | -- |{' -- |' * len(COLUMNS)}",
    ]
    for row in measured.rows:
        shown = [
            _shown([cell for cell in cells if cell.row is row and cell.column == column])
            for column in COLUMNS
        ]
        lines.append(f"| {_plain(row.name)} | {row.rate:g} | {' | '.join(shown)} |")
    lines += ["", "## What does not fit", ""]
    lines += [
        f"- {_plain(cell.row.name)} at {cell.row.rate:g} req/s, {_HEADS[cell.column]}: measured "
        f"{cell.measured:g}, predicted"
        f" {_number(cell.predicted.median)} ({_number(cell.predicted.low)} to "
        f"{_number(cell.predicted.high)})"
        for cell in cells
        if not cell.fits and not cell.in_spread
    ] or ["Nothing."]
    if profile.origin.missing:
        lines += [
            "",
            "What the profile does not cover:",
            "",
            *(f"- {_plain(text)}" for text in profile.origin.missing),
        ]
    return "\n".join(lines) + "\n"


def _shown(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    values = " / ".join(f"{cell.measured:g}{_mark(cell)}" for cell in cells)
    return f"{values} → {_number(cells[0].predicted.median)}"


def _mark(cell: Cell) -> str:
    if cell.fits:
        return ""
    return "~" if cell.in_spread else "!"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _plain(text: str) -> str:
    """Return a text that ends no cell of a table."""
    return text.replace("|", "/").replace("\n", " ")
