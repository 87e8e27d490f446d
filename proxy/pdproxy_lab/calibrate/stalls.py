"""How long pulls stop the streams of a decode engine: from the times of their tokens to terms of
`Hardware`. Pure.

A stall of equal pulls may have two modes: vLLM's NIXL posts one descriptor for each block and layer
where blocks are scattered, and far fewer where they can be merged. Streams feel the mean over time,
so the fit is one of means, not of medians.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.calibrate.fitting import without_noise
from pdproxy_lab.calibrate.rows import steps_of
from pdproxy_lab.calibrate.solve import Row, Spread
from pdproxy_lab.calibrate.trials import Seen, Trial

TERMS = ("pull_s", "further_pull_s", "pull_token_s")
"""Fields of `Hardware`, in the order of the fit's columns."""
_FEWEST = 4
"""Tokens of a stream before the first pull and after the last one, by which its usual times are
known.
"""
_AT_ONCE = 2
"""The first tokens of a stream may come at once, late: so many are left out where there are
enough.
"""
_BEFORE, _AFTER = 10, 24
"""Tokens before the first pull, and after the last one, by which it is known when the nearest of
them came.
"""
_SHOWS, _PART = 0.2, 0.25
"""A step in which pulls begin is longer by more than these shares of a usual one, and of the mean
stall of a pull.
"""
_LEAST_ROWS = 4
"""From fewer trials than that a disturbance can't be told from a stall."""
_FAR = 3.0
"""A stall counts as at most so many times what three quarters of its kind are below, and a step."""


@dataclass(frozen=True, slots=True)
class StallRow:
    """Pulls of `tokens` tokens in sum: in how many steps they began, and how much later the
    streams' tokens came by them.
    """

    pulls: int
    steps: int
    tokens: int
    seconds: float


def stall_row(trial: Trial, seen: Seen, hardware: Hardware) -> StallRow | None:
    """Return by how much the streams were later after the pulls than they would have been; None:
    they ended before.

    `hardware`: its terms of decode steps. What the pulled sequences themselves take of the steps is
    no stall. That the client sees some tokens late moves little: of those before and those after
    several are taken together.
    """
    begin = min(one.sent for one in seen.beside) if seen.prefilled is None else seen.prefilled
    end = max(one.answered for one in seen.beside)
    found = [
        one
        for times in seen.streams
        if (
            one := _stall(
                times, begin, end, len(trial.beside), trial.streams * hardware.context_token_s
            )
        )
        is not None
    ]
    if not found:
        return None
    count, tokens = len(trial.beside), sum(trial.beside)
    seconds = median(seconds for seconds, _ in found)
    seconds -= count * hardware.decode_step_per_seq_s + tokens * hardware.context_token_s
    return StallRow(count, min(max(found[0][1], 1), count), tokens, seconds)


def _stall(
    times: Sequence[float], begin: float, end: float, pulls: int, growth: float
) -> tuple[float, int] | None:
    """Return the seconds and the number of long steps of one stream. `growth`: of each step to the
    next one, in seconds.
    """
    before, after = bisect_right(times, begin), bisect_right(times, end)
    first = min(_AT_ONCE, max(before - _FEWEST, 0))
    if before - first < _FEWEST or len(times) - after < _FEWEST:
        return None
    even = [time - growth * place * place / 2 for place, time in enumerate(times)]
    # Those after the pulls say how long a step is: on one machine for both engines, prefill makes
    # those before longer.
    usual = median(steps_of(even[after:]))
    if usual <= 0:
        return None
    nearest = range(max(first, before - _BEFORE), before)
    earlier = _at(
        even, nearest, before - 1, median(even[one] - even[one - 1] for one in nearest[1:])
    )
    later = _at(even, range(after, min(after + _AFTER, len(even))), after, usual)
    seconds = later - earlier - (after - before + 1) * usual
    shows = max(_SHOWS * usual, _PART * seconds / pulls)
    steps = 0
    for place in range(before, after + 1):
        # A token that the client saw late is followed by one that seems early.
        one, both = even[place] - even[place - 1], even[place + 1] - even[place - 1]
        steps += one > usual + shows and both > 2 * usual + shows
    return seconds, steps


def _at(times: Sequence[float], known: Sequence[int], place: int, step: float) -> float:
    """Return when a token came, by those around it: it may have been seen late itself."""
    return median(times[one] + (place - one) * step for one in known)


def fitted_stalls(rows: Sequence[StallRow], step_s: float) -> tuple[dict[str, Spread], list[str]]:
    """Return the terms that show, and in words why the others are 0. `step_s`: seconds of the
    streams' usual step.
    """
    if len(rows) < _LEAST_ROWS:
        few = (
            f"only {len(rows)} trials of pulls beside streams could be timed"
            if rows
            else "the streams ended before the pulls"
        )
        return {}, [f"{name} is 0: not measured, {few}" for name in TERMS]
    why: dict[str, str] = {}
    if all(row.steps == row.pulls for row in rows):
        why["further_pull_s"] = "not measured, no two pulls began in one step"
    if len({row.tokens / row.pulls for row in rows}) < 2:
        why["pull_token_s"] = "not measured, all pulls had the same size"  # noqa: S105 - a token of text
    names = [name for name in TERMS if name not in why]
    kinds: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        kinds.setdefault((row.pulls, row.tokens), []).append(row.seconds)
    most = {
        kind: _FAR * max(_third_quartile(values), 0.0) + step_s for kind, values in kinds.items()
    }
    # Between equal weights, by which only the longest stalls would count, and equal relative ones,
    # by which a stall that streams hardly feel counts as much as one of twenty steps.
    sizes = {
        kind: math.sqrt(max(mean(min(one, most[kind]) for one in values), step_s))
        for kind, values in kinds.items()
    }
    table: list[Row] = []
    for row in rows:
        cells = {
            "pull_s": row.steps,
            "further_pull_s": row.pulls - row.steps,
            "pull_token_s": row.tokens,
        }
        table.append(tuple(float(cells[name]) for name in names))
    found = without_noise(
        table,
        [min(row.seconds, most[row.pulls, row.tokens]) for row in rows],
        [sizes[row.pulls, row.tokens] for row in rows],
        squares=True,
    )
    spreads = {name: one for name, one in zip(names, found, strict=True) if one.value > 0}
    none = "the stalls show no effect of it" if spreads else "no stall shows beside streams"
    why |= {name: none for name in names if name not in spreads}
    return spreads, [f"{name} is 0: {why[name]}" for name in TERMS if name in why]


def _third_quartile(values: Sequence[float]) -> float:
    """Return the value that three quarters are not above; of few values rather a lower one: the
    highest may be a disturbance.
    """
    return sorted(values)[3 * (len(values) - 1) // 4]
