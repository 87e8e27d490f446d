"""A small robust fit: least absolute relative deviations, no coefficient below 0, and how far
resampled data move them. Pure.

For up to six unknowns and some hundred rows; numpy would be a dependency for this alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import quantiles

Row = tuple[float, ...]
_ROUNDS = 30
_FLOOR = 1e-3
"""A row's relative deviation below this weighs as if it were this: otherwise one exact row would
outweigh all.
"""
_RESAMPLES = 60
_SHARE = 10
"""The spread is from the first to the last of these quantiles: 10 to 90 %."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A coefficient: the fitted value, and the range of 80 % of the values that resampled rows
    give.
    """

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Spread:
        """Return it times a positive factor."""
        return Spread(self.value * factor, self.low * factor, self.high * factor)

    @property
    def relative(self) -> float:
        """The width of the range per value; infinite at 0."""
        return (self.high - self.low) / self.value if self.value > 0 else float("inf")


def fit(
    rows: Sequence[Row], values: Sequence[float], sizes: Sequence[float], *, squares: bool = False
) -> list[float]:
    """Return coefficients x >= 0 so that the sum of |rows · x - values| / sizes is least. Sizes
    must be above 0.

    `squares`: so that the sum of their squares is least: rows that are equal but for their values
    count with the mean of these, not with the median.

    Iteratively reweighted least squares. Columns that the rows can't tell apart share an effect in
    any way: see `spread`.

    Raises:
        ValueError: no rows, or sizes that are not above 0.
    """
    if not rows or len(rows) != len(values) or min(sizes) <= 0:
        raise ValueError("a fit needs rows, and sizes above 0")
    width = len(rows[0])
    scales = [max(abs(row[column]) for row in rows) or 1.0 for column in range(width)]
    relative = [
        [cell / scale / size for cell, scale in zip(row, scales, strict=True)]
        for row, size in zip(rows, sizes, strict=True)
    ]
    wanted = [value / size for value, size in zip(values, sizes, strict=True)]
    weights = [1.0] * len(rows)
    found = [0.0] * width
    for _ in range(1 if squares else _ROUNDS):
        before, found = found, _least_squares(relative, wanted, weights)
        off = deviations(relative, wanted, [1.0] * len(wanted), found)
        weights = [1.0 / max(one, _FLOOR) for one in off]
        if max(abs(a - b) for a, b in zip(before, found, strict=True)) < 1e-6 * (max(found) or 1.0):
            break
    return [x / scale for x, scale in zip(found, scales, strict=True)]


def deviations(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    sizes: Sequence[float],
    found: Sequence[float],
) -> list[float]:
    """Return each row's |prediction - value| / size."""
    return [
        abs(sum(c * x for c, x in zip(row, found, strict=True)) - value) / size
        for row, value, size in zip(rows, values, sizes, strict=True)
    ]


def spread(
    rows: Sequence[Row],
    values: Sequence[float],
    sizes: Sequence[float],
    *,
    squares: bool = False,
    seed: int = 0,
) -> list[Spread]:
    """Return the fit, and how far it moves when rows are drawn again with replacement. Rows of a
    kind should be several.

    Raises:
        ValueError: as `fit`.
    """
    found = fit(rows, values, sizes, squares=squares)
    chance = random.Random(seed)
    drawn: list[list[float]] = []
    for _ in range(_RESAMPLES):
        places = chance.choices(range(len(rows)), k=len(rows))
        part = [(rows[place], values[place], sizes[place]) for place in places]
        drawn.append(fit(*(list(one) for one in zip(*part, strict=True)), squares=squares))
    spreads = []
    for column, value in enumerate(found):
        cuts = quantiles([one[column] for one in drawn], n=_SHARE)
        spreads.append(Spread(value, min(cuts[0], value), max(cuts[-1], value)))
    return spreads


def _least_squares(
    rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return the best x >= 0 for rows · x = values: each set of columns that may be above 0 is
    tried, the largest first.
    """
    width = len(rows[0])
    gram = [[0.0] * width for _ in range(width)]
    right = [0.0] * width
    for row, value, weight in zip(rows, values, weights, strict=True):
        for i, left in enumerate(row):
            if left:
                right[i] += weight * left * value
                for j in range(width):
                    gram[i][j] += weight * left * row[j]
    best, least = [0.0] * width, float("inf")
    for size in range(width, 0, -1):
        for columns in combinations(range(width), size):
            part = _solved(
                [[gram[i][j] for j in columns] for i in columns], [right[i] for i in columns]
            )
            if part is None or min(part) < 0:
                continue
            found = [0.0] * width
            for column, value in zip(columns, part, strict=True):
                found[column] = value
            # The squared error less its constant part.
            error = sum(
                found[i] * (sum(gram[i][j] * found[j] for j in columns) - 2 * right[i])
                for i in columns
            )
            if error < least:
                best, least = found, error
            if size == width:
                return found  # no bound holds it: nothing can be better
    return best


def _solved(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Return the solution of a small symmetric system, None if it has no single one."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    largest = max((abs(line[i]) for i, line in enumerate(matrix)), default=0.0)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) <= 1e-12 * largest or not largest:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(size):
            if i != column and (factor := rows[i][column] / rows[column][column]):
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
