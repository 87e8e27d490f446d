"""The service-level objective of a request: what its client, or the pool, wants of its times."""

from __future__ import annotations

import msgspec


class Slo(msgspec.Struct, frozen=True, array_like=True):
    """Upper bounds in seconds, None where there is none. A placement tries to keep them; nothing is
    promised.

    `ttft`: from the request's arrival to its first token. `tpot`: the mean time per token after the
    first. `gap`: the longest time between two tokens.
    """

    ttft: float | None = None
    tpot: float | None = None
    gap: float | None = None

    def __bool__(self) -> bool:
        return self.ttft is not None or self.tpot is not None or self.gap is not None

    def over(self, other: Slo) -> Slo:
        """Return these bounds, and those of `other` where there is none."""
        return Slo(
            other.ttft if self.ttft is None else self.ttft,
            other.tpot if self.tpot is None else self.tpot,
            other.gap if self.gap is None else self.gap,
        )


NO_SLO = Slo()
