"""A check: its name, its description, and a function that judges."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pdproxy_lab.conformance.pair_under_test import PairUnderTest


def always(_bench: PairUnderTest) -> str | None:
    """Return None: the check applies."""
    return None


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `run` returns what was seen if it passed, and raises a `VerdictError` if not.

    `why_not(pair)` returns why it does not apply to this contract, None if it does. `takes(pair)`:
    seconds that it has to wait.
    """

    name: str
    does: str
    run: Callable[[PairUnderTest], Awaitable[str]]
    why_not: Callable[[PairUnderTest], str | None] = always
    takes: Callable[[PairUnderTest], float] = lambda _: 0.0
