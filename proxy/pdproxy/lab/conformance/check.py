"""What a check is: a name, what it does in words, and a function that judges. Owns nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pdproxy.lab.conformance.bench import Bench


def always(_bench: Bench) -> str | None:
    """Tell that nothing is against a check."""
    return None


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `run` returns what was seen if all is well, and raises a `VerdictError` if not.

    `why_not(bench)` says why it does not apply to this contract, None if it does. `takes(bench)`:
    seconds that it waits on purpose.
    """

    name: str
    does: str
    run: Callable[[Bench], Awaitable[str]]
    why_not: Callable[[Bench], str | None] = always
    takes: Callable[[Bench], float] = lambda _: 0.0
