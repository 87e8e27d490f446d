"""What predicted latencies cost against the SLO. Pure.

A cost is a number of requests that miss the SLO: a prediction near a limit counts as a part of one, by a logistic step, since
predictions are not exact. To this comes a small part of the latencies themselves, which decides where no limit is near.
"""

from __future__ import annotations

import math

import msgspec


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Limits in seconds; None: no such limit. `gap`: the longest time between two tokens."""

    ttft: float | None = None
    tpot: float | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no engine can keep."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0 seconds, got {value}")

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self.ttft is not None or self.tpot is not None or self.gap is not None


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What costs weigh, in requests that miss the SLO."""

    ttft: float = 0.3
    """A TTFT as long as its limit, beside the chance that it misses."""
    tpot: float = 0.05
    """A TPOT as long as its limit."""
    delay: float = 0.15
    """A TPOT that becomes longer by its limit, beside the chance that it misses: it counts where all is late."""
    kept: float = 0.15
    """An answer at an engine that is kept for prefill."""
    engine_s: float = 2.0
    """A second of an engine, in seconds of which others would make use."""
    ttft_width: float = 0.1
    """How far around the limit a prediction of TTFT is uncertain, as a part of it."""
    tpot_width: float = 0.07


WEIGHTS = Weights()
