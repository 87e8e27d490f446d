"""Whether the requests of late are such as the engines' profiles were fitted to. Pure.

Looked at now and then, and only at what is known anyway: how many answers to prompts of which size
have ended, how long answers are, and what decodes at the engines. Seconds by a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pdproxy.engine_model.fitted import FittedRanges, Range, Ranges, extrapolated
from pdproxy.scheduling.auto.loads import PredictedLoad
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.outputs import Outputs

_LOOK_S = 2.0
"""Seconds between two looks."""
_SAID_S = 60.0
"""Seconds for which something is said after it was last seen."""
_GAIN = 0.2
"""The part of a mean that the last look makes."""
_ANSWERS = 100
"""Answers that show which sizes prompts have."""
_FEW = 20
"""A size that fewer than one of so many prompts have is left out."""


class SeenTraffic:
    """See the module. `fitted`: what an engine's profile was fitted to, None where it has none, or
    it does not say.
    """

    def __init__(self, fitted: Callable[[LedgerEngine], FittedRanges | None]) -> None:
        self._fitted = fitted
        self._looked = self._until = 0.0
        self._text: str | None = None
        self._counts: tuple[int, ...] = ()
        self._prompts: Range | None = None
        self._sequences = self._context = 0.0

    def look(self, now: float, loads: Iterable[PredictedLoad], outputs: Outputs) -> None:
        """Look at the requests, if that was not just done. `loads`: all engines; `outputs`: the
        answers.
        """
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        decoding = [load for load in loads if load.decoding]
        if not decoding:
            return
        self._note_prompts(outputs)
        count = len(decoding)
        sequences = sum(load.decoding for load in decoding) / count
        context = sum(load.context() for load in decoding) / count
        self._sequences += _GAIN * (sequences - self._sequences)
        self._context += _GAIN * (context - self._context)
        if self._prompts is None:
            return
        chunks = [load.times.chunk for load in decoding]
        asked = Ranges(
            prompt_tokens=self._prompts,
            answer_tokens=(outputs.mean, outputs.mean),
            sequences=(self._sequences, self._sequences),
            context_tokens=(self._context, self._context),
            chunk=(float(min(chunks)), float(max(chunks))),
        )
        profiles = {id(one): one for load in decoding if (one := self._fitted(load.engine))}
        for fitted in profiles.values():
            beyond = extrapolated(fitted, asked)
            if beyond is not None:
                self._text, self._until = f"placement auto: {beyond}", now + _SAID_S

    def _note_prompts(self, outputs: Outputs) -> None:
        """Note which sizes the prompts have whose answers have ended since the last time: from the
        end of the class of the shortest to the beginning of that of the longest.
        """
        counts = outputs.counts
        before = self._counts or (0,) * len(counts)
        new = [one - old for one, old in zip(counts, before, strict=True)]
        if sum(new) < _ANSWERS:
            return
        self._counts = counts
        sizes = [bits for bits, one in enumerate(new) if one * _FEW >= sum(new)]
        low, high = float((1 << sizes[0]) - 1), float(1 << sizes[-1] >> 1)
        self._prompts = (low, high) if low < high else ((low + high) / 2,) * 2

    def said(self, now: float) -> str | None:
        """Return what lies outside, as long as that was seen lately."""
        return self._text if now < self._until else None
