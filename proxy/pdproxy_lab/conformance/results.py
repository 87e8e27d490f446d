"""The results of checks. A check returns a text if it passed and raises an exception if not. Owns
the four verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Verdict = Literal["passed", "failed", "not_applicable", "not_judged"]
VERDICTS: tuple[Verdict, ...] = ("passed", "failed", "not_applicable", "not_judged")


class VerdictError(Exception):
    """A check has not passed. The text says why, for an operator."""

    verdict: Verdict


class FailedError(VerdictError):
    """Something is not as the contract says."""

    verdict: Verdict = "failed"


class NotJudgedError(VerdictError):
    """It could not be judged."""

    verdict: Verdict = "not_judged"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one pair. `does`: what was done; `says`: what was seen, or the reason for the
    verdict.
    """

    name: str
    does: str
    verdict: Verdict
    says: str
    seconds: float = 0.0


class PairResults(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of a prefill and a decode engine, in order."""

    prefill: str
    decode: str
    results: Sequence[Result]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    connector: str
    pairs: Sequence[PairResults]

    def count(self, verdict: Verdict) -> int:
        """Return how many checks have a verdict."""
        return sum(result.verdict == verdict for pair in self.pairs for result in pair.results)
