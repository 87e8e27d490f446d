"""How well a profile explains its own measurements: each trial again on a virtual engine, side by
side. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.calibrate.rows import chunk_row, decode_row
from pdproxy_lab.calibrate.stalls import stall_row
from pdproxy_lab.calibrate.trials import Seen, Trial, TrialError
from pdproxy_lab.calibrate.virtual import seen_of


@dataclass(frozen=True, slots=True)
class Misfit:
    """One kind of trial: medians of what was measured and predicted, in seconds; of stalls by pulls
    the mean.
    """

    name: str
    what: str
    """What the seconds are: a step, TTFT, the steps of the prompt, or a step and the stalls by
    pulls.
    """
    trials: int
    measured: float
    predicted: float
    lowest: float | None = None
    """Of what was measured, where it may have two modes; None: not noted."""
    highest: float | None = None

    @property
    def relative(self) -> float:
        """How much more was predicted than measured, as a share."""
        return self.predicted / self.measured - 1


def misfits(trials: Sequence[tuple[Trial, Seen]], options: dict[str, Any]) -> list[Misfit]:
    """Return one row per kind of trial and value, in the order of the first trials. `options`:
    fields of `Facts`.
    """
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


def pair_misfits(trials: Sequence[tuple[Trial, Seen]], options: dict[str, Any]) -> list[Misfit]:
    """Return the same for trials whose prompts beside went through a pair."""
    hardware: Hardware = options["hardware"]
    kinds: dict[str, list[tuple[Trial, Seen]]] = {}
    for trial, seen in trials:
        kinds.setdefault(trial.name, []).append((trial, seen))
    found = []
    for name, measured in kinds.items():
        # The streams of a kind may differ in length: they became longer where they ended before the
        # pulls.
        trial = max((trial for trial, _ in measured), key=lambda one: one.output_tokens)
        try:
            predicted = _through(trial, seen_of(trial, options, split=True), hardware)
        except TrialError:
            continue
        values = [one for one in (_through(*one, hardware) for one in measured) if one is not None]
        if predicted is None or not values:
            continue
        if trial.streams:
            what, value = "a step and the stalls", mean(values)
            found.append(
                Misfit(name, what, len(values), value, predicted, min(values), max(values))
            )
        else:
            found.append(Misfit(name, "TTFT", len(values), median(values), predicted))
    return found


def _through(trial: Trial, seen: Seen, hardware: Hardware) -> float | None:
    if not trial.streams:
        return seen.beside[0].ttft
    row = stall_row(trial, seen, hardware)
    # With a usual step, for a stall of nearly nothing is neither far off nor near by its own
    # measure.
    return None if row is None else row.seconds + hardware.step_s(0, trial.streams)


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
