"""Service level objectives: what a request must keep to be a good one."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from pdproxy_lab.bench.outcome import Outcome

LIMITS = ("ttft", "tpot", "gap", "e2e")
OWN_CLASS = "own class"
"""The name under which each request is judged by the SLO of its class. No other SLO can have it."""
_MOST_MS = 604_800_000
"""A week. pdproxy refuses more, and such a limit is none."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}")
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s)")


class BenchSlo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits in seconds, None: no such limit. `ttft` and `e2e` count from when the request was
    due.
    """

    name: str
    ttft: float | None = None
    tpot: float | None = None
    gap: float | None = None
    """Of the longest time between two events with tokens."""
    e2e: float | None = None
    of: str | None = None
    """The class of requests that it is for. None: it is for all."""

    def kept(self, outcome: Outcome) -> bool:
        """Return whether a request was good. One that failed is not; one token alone has no TPOT
        and no gap to miss.

        If the server has not counted its tokens, its TPOT is not known: ask `knows` before.
        """
        if outcome.error is not None:
            return False
        found = (
            (self.ttft, outcome.ttft),
            (self.tpot, outcome.tpot),
            (self.gap, outcome.worst_gap),
            (self.e2e, outcome.e2e),
        )
        return all(limit is None or value is None or value <= limit for limit, value in found)

    def knows(self, outcome: Outcome) -> bool:
        """Return whether it can be said if the request was good."""
        return outcome.error is not None or self.tpot is None or outcome.output_tokens is not None


def parse_slo(text: str, of: str | None = None) -> BenchSlo:
    """Read `ttft=500ms,tpot=15ms`, with a name in front: `chat:ttft=0.5s`. Without a name, the text
    is the name. `of`: the class that it is for.

    Raises:
        ValueError: it is something else.
    """
    name, colon, rest = text.partition(":")
    if not colon:
        name, rest = text, text
    elif not _NAME.fullmatch(name):
        raise ValueError(f"a name has 1 to 32 letters, digits, '.', '_' or '-', got {name[:40]!r}")
    limits: dict[str, float] = {}
    for part in rest.split(","):
        key, equals, value = part.strip().partition("=")
        found = _TIME.fullmatch(value)
        if key not in LIMITS or not equals or found is None or key in limits or not float(found[1]):
            raise ValueError(
                f"expected [NAME:]ttft=500ms,tpot=15ms,gap=50ms,e2e=10s, each once at most, got "
                f"{text[:80]!r}"
            )
        limits[key] = float(found[1]) / (1000 if found[2] == "ms" else 1)
    return BenchSlo(name=name, of=of, **limits)


def listed(slos: Sequence[BenchSlo]) -> list[BenchSlo]:
    """Return the SLOs by which a run is judged: with those of classes, also `OWN_CLASS`."""
    own = [BenchSlo(name=OWN_CLASS)] if any(slo.of is not None for slo in slos) else []
    return [*slos, *own]


def slo_headers(slo: BenchSlo, speed: float = 1.0) -> dict[str, str]:
    """Return the headers by which a request tells pdproxy its limits; `e2e` has none. `speed`: how
    fast time runs, 1 being real.
    """
    found = {}
    for name, seconds in (("ttft", slo.ttft), ("tpot", slo.tpot), ("gap", slo.gap)):
        if seconds is not None:
            value = f"{min(1000 * seconds / speed, _MOST_MS):.6f}"  # no exponent: it is refused
            found[f"x-pdproxy-slo-{name}-ms"] = value.rstrip("0").rstrip(".")
    return found
