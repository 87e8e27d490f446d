"""When to say that a pool needs more engines of a role, or fewer: for operators who start engines
themselves. Pure.

An advice needs a clear margin for some minutes, and holds until the load is clearly another one: it
neither comes nor goes with each burst.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.wanted_engines import Wanted

MORE_S, FEWER_S = 180.0, 1800.0
"""For how many seconds engines must be missing, or be too many."""
_LACK, _LACK_PART = 0.25, 0.1
"""How many must be missing, and which part of those that there are."""
_SPARE = 1.25
"""How many must be too many: without one, the others still have some to spare."""
_GAP_S = 120.0
"""Behind so many seconds without a look nothing is known of the time between."""
_NEED = {
    "prompts": ("prompts need", "prompts needed"),
    "sequences": ("sequences need", "sequences needed"),
    "KV": ("their KV needs", "their KV needed"),
    "TPOT": ("sequences need", "sequences needed"),
}


class _Since:
    """Since when engines are missing, or too many. `engines`: that were needed, at least or at
    most since then.
    """

    __slots__ = ("engines", "since")

    def __init__(self, since: float, engines: float) -> None:
        self.since, self.engines = since, engines


class ScalingAdvice:
    """The advice of one pool."""

    def __init__(self) -> None:
        self._lack: dict[Role, _Since] = {}
        self._spare: dict[Role, _Since] = {}
        self._looked = -math.inf
        self._told: dict[Role, str] = {}

    def look(
        self,
        now: float,
        needed: Mapping[Role, Wanted],
        has: Callable[[Role], int],
        tpot: float | None,
    ) -> None:
        """Look at how many engines are needed, and how many there are. `tpot`: the SLO's, in
        seconds.
        """
        if not 0.0 <= now - self._looked <= _GAP_S:
            self._lack.clear()
            self._spare.clear()
        self._looked = now
        told = {}
        for role in Role:
            wanted, count = needed.get(role), has(role)
            if wanted is None or not count:
                self._lack.pop(role, None)
                self._spare.pop(role, None)
            elif self._lacks(role, wanted.engines, count, now):
                told[role] = _more(role, wanted, count, tpot)
            elif (most := self._spares(role, wanted.engines, count, now)) is not None:
                told[role] = _fewer(role, wanted, most, count)
        self._told = told

    def sentences(self) -> list[str]:
        """Return the advice, a sentence for each role that has too few engines or too many."""
        return list(self._told.values())

    def _lacks(self, role: Role, needed: float, count: int, now: float) -> bool:
        found = self._lack.get(role)
        is_told = role in self._told and found is not None
        margin = 0.0 if is_told else max(_LACK, _LACK_PART * count)
        if needed <= count + margin:
            self._lack.pop(role, None)
            return False
        if found is None:
            found = self._lack[role] = _Since(now, needed)
        return now - found.since >= MORE_S

    def _spares(self, role: Role, needed: float, count: int, now: float) -> float | None:
        """Return how many were needed at most while some were too many for long, None if none
        are.
        """
        found = self._spare.get(role)
        most = needed if found is None else max(found.engines, needed)
        if count < 2 or needed > count - (1.0 if role in self._told else _SPARE):
            self._spare.pop(role, None)
            return None
        if found is None:
            found = self._spare[role] = _Since(now, most)
        found.engines = most
        return most if now - found.since >= FEWER_S else None


def _more(role: Role, wanted: Wanted, count: int, tpot: float | None) -> str:
    more = max(math.ceil(wanted.engines - 0.1) - count, 1)
    engines = _engines(role, "one more" if more == 1 else f"{more} more", more)
    begin = f"the load needs {engines}"
    if wanted.because == "TPOT" and tpot is not None:
        begin = f"{engines} would keep TPOT under {1000 * tpot:g} ms"
    need = _NEED[wanted.because][0]
    return f"{begin}: {need} {wanted.engines:.1f} engines, there {_are(count)}"


def _fewer(role: Role, wanted: Wanted, most: float, count: int) -> str:
    fewer = min(max(math.floor(count - most - _SPARE + 1.0), 1), count - 1)
    engines = _engines(role, "one" if fewer == 1 else f"{fewer}", fewer)
    need = _NEED[wanted.because][1]
    return (
        f"{engines} fewer would do: for {FEWER_S / 60:g} minutes {need} {most:.1f} engines at "
        f"most, there {_are(count)}"
    )


def _engines(role: Role, number: str, count: int) -> str:
    engines = "engine" if count == 1 else "engines"
    return (
        f"{number} {engines} of role any"
        if role is Role.ANY
        else f"{number} {role.value} {engines}"
    )


def _are(count: int) -> str:
    return f"is {count}" if count == 1 else f"are {count}"
