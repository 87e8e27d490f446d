"""The engines that serve a request while those of the pool are of several revisions.

First the complete revisions are asked, those whose turn it is first. Where none of them can serve
the request, all engines are: as if there were no revisions, since any answer is better than none.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from pdproxy.scheduling.breakers import Breakers
from pdproxy.scheduling.choice import Choice, levels
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.placement import Placed, Placement
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.revisions import Find, Fits, Revisions

T = TypeVar("T")
_WHATEVER: Sequence[Fits | None] = (None,)


class RevisionChoice:
    """Chooses them. `choice`: among all engines; `engines`: these, by URL.

    `near`, of the methods: the URL of an engine whose revision had better serve the request, None:
    it makes no difference. An attempt behind another one had better go where that one was.
    """

    def __init__(
        self,
        revisions: Revisions,
        choice: Choice,
        engines: Mapping[str, LedgerEngine],
        breakers: Breakers,
    ) -> None:
        self._revisions = revisions
        self._choice = choice
        self._engines = engines
        self._breakers = breakers

    def each(
        self,
        roles: tuple[Role, ...],
        ask: Ask,
        without: Collection[str],
        *,
        plain: bool,
        bounded: bool,
        near: str | None,
    ) -> tuple[LedgerEngine, ...] | None:
        """See `Choice.each`."""

        now = ask.now

        def find(choice: Choice, fits: Fits | None) -> tuple[LedgerEngine, ...] | None:
            found = choice.each(roles, ask, without, plain=plain, bounded=bounded)
            return found if found and (fits is None or all(fits(n, now) for n in found)) else None

        found = self._in_turn(roles, ask, find, without, near, bounded=bounded)
        if found is not None or self._revisions.serve_whole(ask, without):
            return found
        found = self._choice.each(roles, ask, without, plain=plain, bounded=bounded)
        # The engines of a role whose breaker is closed may all be of one revision, and those of the
        # other role of another one.
        return self._revisions.find_in_any(find) if found is None else found

    def alone(self, ask: Ask, without: Collection[str], *, plain: bool) -> LedgerEngine | None:
        """See `Choice.alone`."""

        def find(choice: Choice, fits: Fits | None) -> LedgerEngine | None:
            found = choice.alone(ask, without, plain=plain)
            return found if found and (fits is None or fits(found, ask.now)) else None

        found = self._in_turn(Role.AGGREGATED, ask, find, without, None, bounded=True)
        return self._choice.alone(ask, without, plain=plain) if found is None else found

    def place(
        self,
        placement: Placement,
        ask: Ask,
        split: bool,
        without: Collection[str],
        avoid: Collection[str],
        *,
        cached: bool,
        near: str | None,
    ) -> Placed | None:
        """Return what a placement chooses: see `Ledger.place`. `cached`: see `Choice.of`."""
        refused = False

        def chosen(choice: Choice, fits: Fits | None, without: Collection[str]) -> Placed | None:
            nonlocal refused
            found = choice.outside_of(without, ask, split, cached=cached)
            if found is None:
                return None
            if fits is _usable:
                found = found.only(lambda engine: engine.usable(ask.now))
                if not found.can_serve:
                    return None
            elif fits is not None and not all(fits(engine, ask.now) for engine in found.engines):
                return None
            placed = placement.place(ask, found)
            refused = refused or placed is None
            return placed

        for excluded in levels(without, avoid):

            def find(
                choice: Choice, fits: Fits | None, excluded: Collection[str] = excluded
            ) -> Placed | None:
                return chosen(choice, fits, excluded)

            kind = Role.DECODE if split else Role.AGGREGATED
            placed = self._in_turn(kind, ask, find, without, near, bounded=not cached)
            if placed is not None or refused:  # the placement would not have it served now
                return placed
        found = self._choice.of(ask, split, without, avoid, cached=cached)
        if found is None:
            found = self._revisions.find_in_any(
                lambda choice, _: choice.of(ask, split, without, avoid, cached=False)
            )
        return None if found is None else placement.place(ask, found)

    def _in_turn(
        self,
        kind: Hashable,
        ask: Ask,
        find: Find[T],
        without: Collection[str],
        near: str | None,
        *,
        bounded: bool,
    ) -> T | None:
        """Return what is found in a complete revision. Engines that can take the request now come
        first, and none counts whose breaker is open.
        """
        fits = _WHATEVER
        unusable: Collection[LedgerEngine] = ()
        if opened := self._breakers.opened:
            unusable = [engine for engine in opened if not engine.usable(ask.now)]
        if opened or bounded:
            fits = (_takes, _usable)
        url = near if near is not None else next(iter(without), None)
        beside = None if url is None else self._engines.get(url)
        return self._revisions.find(kind, ask, find, fits=fits, unusable=unusable, near=beside)


def _takes(engine: LedgerEngine, now: float) -> bool:
    return engine.takes(now) and not engine.crowded


def _usable(engine: LedgerEngine, now: float) -> bool:
    return engine.usable(now)
