"""The service-level objective of a request: what its client, or the pool, wants of its times."""

from __future__ import annotations

import msgspec


class Slo(msgspec.Struct, frozen=True, array_like=True):
    """Upper bounds in seconds, None where there is none. A placement tries to keep them; nothing is
    promised.

    `ttft`: from the request's arrival to its first token. `tpot`: the mean time per token after the
    first. `gap`: the longest time between two tokens. `long_weight`: as many misses of others as a
    miss of a prompt counts that has `long_prompt` tokens or more; the pool says so, no client.
    """

    ttft: float | None = None
    tpot: float | None = None
    gap: float | None = None
    long_prompt: int | None = None
    long_weight: float = 1.0

    def __bool__(self) -> bool:
        return self.ttft is not None or self.tpot is not None or self.gap is not None

    def over(self, other: Slo) -> Slo:
        """Return these bounds, and those of `other`, the pool's, where there is none."""
        return Slo(
            other.ttft if self.ttft is None else self.ttft,
            other.tpot if self.tpot is None else self.tpot,
            other.gap if self.gap is None else self.gap,
            other.long_prompt,
            other.long_weight,
        )

    def weight(self, tokens: int) -> float:
        """Return what a miss of a prompt of so many tokens counts."""
        return 1.0 if self.long_prompt is None or tokens < self.long_prompt else self.long_weight


NO_SLO = Slo()
