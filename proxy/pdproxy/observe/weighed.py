"""What a placement has weighed for a request: its choice and the next best one, with the parts of
their costs. For operators: nothing is decided by it.

A decision notes plain numbers, which costs it next to nothing. What they mean is worked out where
somebody looks.
"""

from __future__ import annotations

import msgspec

TERMS = (
    ("ttft", "the request's own TTFT"),
    ("tpot", "its TPOT"),
    ("harm", "what the engines' other sequences lose by it"),
    ("engines", "the seconds of engines that it takes"),
    ("kept", "an answer at an engine that is kept for prefill"),
    ("cached", "one of the first four, by the prefill of tokens that the other engine lacks"),
)
"""What may have made the difference between two choices."""
_MOST = 0.5
"""So much of a difference in TTFT is most of it."""


class Option(msgspec.Struct, array_like=True, frozen=True):
    """One way to serve a request. `cost`: in requests that miss the SLO, without an SLO in seconds;
    the parts of it have the same unit.

    `ttft_s`, `tpot_s`: predicted; a TPOT of 0 was not computed, since the choice cost too much
    without it. `prefill_cost`: the harm to the sequences of the engine that computes the prompt,
    and its seconds (`prefill_s`); `pull_s`: how long its KV's pull stops another engine, 0 where
    one engine serves it. `cached`: the prompt's tokens in the cache of the engine that computes it.
    """

    cost: float
    ttft_s: float
    tpot_s: float
    ttft_cost: float
    tpot_cost: float
    prefill_cost: float
    prefill_s: float
    pull_s: float
    cached: int

    def values(self) -> dict[str, float]:
        """Return what is shown of it."""
        tpot = {"tpot": self.tpot_s} if self.tpot_s else {}
        return {"ttft": self.ttft_s, **tpot, "cost": self.cost, "cached": self.cached}


class Weighed(msgspec.Struct, array_like=True, frozen=True):
    """What was chosen, and the next best choice: None where nothing else could be chosen, with the
    URLs of its engines, the one that answers last.

    `ttft`, `tpot`: the request's SLO in seconds, None: no bound. `engine_s`: what a second of an
    engine costs.
    """

    chosen: Option
    other: Option | None = None
    engines: tuple[str, ...] = ()
    ttft: float | None = None
    tpot: float | None = None
    engine_s: float = 0.0

    def parts(self, one: Option) -> dict[str, float]:
        """Return the parts of the cost of one of the two: all of `TERMS` but the last one."""
        engines = self.engine_s * (one.prefill_s + one.pull_s)
        rest = one.cost - one.ttft_cost - one.tpot_cost - one.prefill_cost
        # What is left is that an engine is kept for prefill; of a split, what its pull costs.
        kept, pull = (0.0, rest) if one.pull_s else (rest, 0.0)
        return {
            "ttft": one.ttft_cost,
            "tpot": one.tpot_cost,
            "harm": one.prefill_cost + pull - engines,
            "engines": engines,
            "kept": kept,
        }

    def term(self) -> str | None:
        """Return which of `TERMS` made the difference: the one by which the other choice costs most
        more than this one. None: there is no other.
        """
        chosen, other = self.chosen, self.other
        if other is None:
            return None
        ours, theirs = self.parts(chosen), self.parts(other)
        term = max(ours, key=lambda name: theirs[name] - ours[name])
        if term in ("ttft", "harm", "engines") and chosen.cached > other.cached:
            longer = other.prefill_s - chosen.prefill_s
            if longer > 0.0 and longer >= _MOST * (other.ttft_s - chosen.ttft_s):
                return "cached"
        return term

    def good(self, outcome: str, first_s: float | None, tpot_s: float | None) -> bool | None:
        """Return whether a request that has ended has kept its SLO; None where that is not known,
        or there is none. Gaps are not compared.

        `outcome`: as `RequestEnded` has it; `first_s`, `tpot_s`: measured, None where unknown.
        """
        if (self.ttft is None and self.tpot is None) or outcome in _SAYS_NOTHING:
            return None
        if outcome != "ok":
            return False
        known = ((first_s, self.ttft), (tpot_s, self.tpot))
        if any(took is not None and most is not None and took > most for took, most in known):
            return False
        return None if any(took is None and most is not None for took, most in known) else True


_SAYS_NOTHING = ("client_left", "client")


def tpot_of(first_s: float | None, total_s: float, tokens: int | None) -> float | None:
    """Return the mean seconds per token behind the first of a stream; None where unknown, or there
    is one token. `total_s`: from the request's begin to its end.
    """
    if first_s is None or tokens is None or tokens < 2:
        return None
    return (total_s - first_s) / (tokens - 1)
