"""What a prediction weighs against the SLO. Pure.

A cost is a number of requests that miss the SLO: a prediction near a limit counts as a part of one,
by a logistic step, since predictions are not exact. To this comes a small part of the latencies
themselves, which decides where no limit is near.
"""

from __future__ import annotations

import msgspec


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What costs weigh, in requests that miss the SLO."""

    ttft: float = 0.3
    """A TTFT as long as its limit, beside the chance that it misses."""
    tpot: float = 0.05
    """A TPOT as long as its limit."""
    delay: float = 0.15
    """A TPOT that becomes longer by its limit, beside the chance that it misses: it counts where
    all is late.
    """
    kept: float = 0.15
    """An answer at an engine that is kept for prefill."""
    engine_s: float = 2.0
    """What a second of an engine is worth: the seconds that other requests would use of it."""
    ttft_width: float = 0.1
    """How far around the limit a prediction of TTFT is uncertain, as a part of it."""
    tpot_width: float = 0.07


WEIGHTS = Weights()
