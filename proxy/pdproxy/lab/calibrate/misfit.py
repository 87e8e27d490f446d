"""How well a profile explains its own measurements: each trial again on a virtual engine, side by side. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pdproxy.lab.calibrate.rows import chunk_row, decode_row
from pdproxy.lab.calibrate.trials import Seen, Trial, TrialError
from pdproxy.lab.calibrate.virtual import seen_of


@dataclass(frozen=True, slots=True)
class Misfit:
    """One kind of trial: medians of what was measured and predicted, in seconds."""

    name: str
    what: str
    """What the seconds are: a step, TTFT, or the steps of the prompt."""
    trials: int
    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        """How much more was predicted than measured, as a share."""
        return self.predicted / self.measured - 1


def misfits(trials: Sequence[tuple[Trial, Seen]], options: dict[str, Any]) -> list[Misfit]:
    """Return one row per kind of trial and value, in the order of the first trials. `options`: fields of `Facts`."""
    kinds: dict[str, tuple[Trial, list[Seen]]] = {}
    for trial, seen in trials:
        kinds.setdefault(trial.name, (trial, []))[1].append(seen)
    budget = int(options["max_num_batched_tokens"])
    found = []
    for name, (trial, measured) in kinds.items():
        try:
            predicted = _values(trial, seen_of(trial, options), budget)
        except TrialError:
            continue
        values = [_values(trial, seen, budget) for seen in measured]
        for what, value in predicted.items():
            several = [one[what] for one in values if what in one]
            if several and value > 0:
                found.append(Misfit(name, what, len(several), median(several), value))
    return found


def _values(trial: Trial, seen: Seen, budget: int) -> dict[str, float]:
    if not trial.beside:
        row = decode_row(trial, seen)
        return {} if row is None else {"step": row.seconds}
    found = {"TTFT": seen.beside[0].ttft}
    if trial.streams:
        found = {}
        chunk = chunk_row(trial, seen, -(-trial.beside[0] // max(budget - trial.streams, 1)))
        if chunk is not None:
            found["the prompt's steps"] = chunk.seconds
    return found
