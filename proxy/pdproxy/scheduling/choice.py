"""The engines that may serve a request, among all of a pool or those of one revision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product

from pdproxy.scheduling.compatibility import Compatibility, prefill_and_decode
from pdproxy.scheduling.eligibility import Eligibility
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.placement import Candidates
from pdproxy.scheduling.policy import Ask, Policy

SPLIT = (Role.PREFILL, Role.DECODE)
"""The roles of the two engines that share a prompt."""


def spared(ask: Ask, engines: Sequence[LedgerEngine]) -> Sequence[LedgerEngine]:
    """Return those of some engines that may serve a request whole, by what it asks."""
    return (
        [engine for engine in engines if engine.role is not Role.DECODE]
        if ask.spares_decode
        else engines
    )


class Choice:
    """Finds the engines that may serve a request whole, and those that may share it. `alone`: the
    roles that may serve whole.

    `engines`: those among which it looks; they may change before a call of `changed`. `faulty`:
    whether engines between which KV does not move are better than none for a request.
    """

    def __init__(
        self,
        engines: Collection[LedgerEngine],
        policies: Mapping[Role, Policy],
        alone: Sequence[Role],
        compatibility: Compatibility,
        faulty: Callable[[Ask], bool] = lambda _: False,
    ) -> None:
        self._engines = engines
        self._faulty = faulty
        self._alone = alone
        self.eligibility = Eligibility(engines, policies)
        self._compatibility = compatibility
        self._known: dict[tuple[str | None, bool, bool], Candidates] = {}
        self._alone_roles = self._with_engines()

    def changed(self) -> None:
        """Forget what was found: an engine came up, went down or changed."""
        self._known.clear()
        self.eligibility.changed()
        self._alone_roles = self._with_engines()

    def _with_engines(self) -> list[Role]:
        """Return the roles that may serve whole and have an engine that is up."""
        return [
            role
            for role in self._alone
            if any(role in engine.uses and engine.available for engine in self._engines)
        ]

    # -- where the policies of the roles choose

    def each(
        self,
        roles: tuple[Role, ...],
        ask: Ask,
        without: Collection[str],
        *,
        plain: bool,
        bounded: bool,
    ) -> tuple[LedgerEngine, ...] | None:
        """Return one engine for each role, all compatible, none of them full or in `without`, None
        if there are none.

        `plain`: no breaker is open, and `without` is empty. `bounded`: engines may be full or
        crowded.
        """
        engines = self._best_of_each(roles, ask) if plain else None
        if engines is None or (
            bounded and any(engine.full or engine.crowded for engine in engines)
        ):
            ranked = [self.eligibility.ranked(role, ask, without) for role in roles]
            if bounded:
                ranked = [[engine for engine in engines if not engine.full] for engines in ranked]
            engines = self._compatibility.first(roles, ranked)
            if engines is None and self._faulty(ask):
                engines = next(
                    (both for both in product(*ranked) if _may_be_tried(roles, both)), None
                )
        return engines

    def _best_of_each(self, roles: tuple[Role, ...], ask: Ask) -> tuple[LedgerEngine, ...] | None:
        """Return the best engine of each role, None if a role has none that serves the model, or if
        they are not compatible.
        """
        chosen: list[LedgerEngine] = []
        # all roles choose, also behind one that has none: turns move on in the same way
        for role in roles:
            choose = self.eligibility.best_of(role, ask.model)
            if choose is not None:
                chosen.append(choose(ask))
        engines = tuple(chosen)
        return (
            engines
            if len(engines) == len(roles) and self._compatibility.compatible(roles, engines)
            else None
        )

    def alone(self, ask: Ask, without: Collection[str], *, plain: bool) -> LedgerEngine | None:
        """Return the engine that serves a request whole, of the first role that may and has one,
        None if there is none. `plain`: as above.
        """
        if plain and not ask.spares_decode:
            choosers = [self.eligibility.best_of(role, ask.model) for role in self._alone_roles]
            if choosers and None not in choosers:
                # All roles choose, as they do where all are ranked: turns move on in the same way.
                engine, *_ = [choose(ask) for choose in choosers if choose is not None]
                if not engine.crowded:
                    return engine
        ranked = [spared(ask, self.eligibility.ranked(role, ask, without)) for role in self._alone]
        # First engines that serve the model; of these the ones whose breaker is not open; of these
        # the ones whose breaker leaves a place; of these the ones with room.
        return min(
            (engines[0] for engines in ranked if engines),
            key=lambda n: (
                ask.model is not None and not n.serves(ask.model),
                not n.usable(ask.now),
                not n.takes(ask.now),
                n.crowded,
            ),
            default=None,
        )

    # -- where a placement chooses

    def of(
        self,
        ask: Ask,
        split: bool,
        without: Collection[str],
        avoid: Collection[str] = (),
        *,
        cached: bool,
    ) -> Candidates | None:
        """Return the engines outside of `without` and `avoid`, with those if others can't serve the
        request, None if none can.

        `cached`: all engines that are up may get any number of requests, so that what was found
        before still holds.
        """
        if cached and not without and not avoid:
            known = self._known.get((ask.model, split, ask.spares_decode))
            if known is not None:
                return known
        for excluded in (*levels(without, avoid), *([()] if without else ())):
            if (found := self.outside_of(excluded, ask, split, cached=cached)) is not None:
                return found
        # Nobody can serve it whole: engines between which KV did not move are better than no
        # answer.
        tried = replace(self._candidates(ask, split, (), cached=False), compatible=_are_possible)
        return (
            tried if any(_are_possible(p, d) for p in tried.prefill for d in tried.decode) else None
        )

    def outside_of(
        self, excluded: Collection[str], ask: Ask, split: bool, *, cached: bool
    ) -> Candidates | None:
        """Return the engines outside of `excluded` alone, None if they can't serve the request.
        `cached`: as above.
        """
        found = self._candidates(ask, split, excluded, cached and not excluded)
        return found if found.can_serve else None

    def _candidates(
        self, ask: Ask, split: bool, without: Collection[str], cached: bool
    ) -> Candidates:
        key = (ask.model, split, ask.spares_decode)
        if cached and (known := self._known.get(key)) is not None:
            return known
        ranked = self.eligibility.eligible
        whole: dict[LedgerEngine, None] = {}
        for role in self._alone:
            whole.update(dict.fromkeys(spared(ask, ranked(role, ask, without))))
        serving = [engine for engine in whole if ask.model is None or engine.serves(ask.model)]
        fitting = serving or [*whole]  # of one role all breakers may be open, and not of another
        prefill: tuple[LedgerEngine, ...] = ()
        decode: tuple[LedgerEngine, ...] = ()
        if split:
            prefill, decode = (
                tuple(engine for engine in ranked(role, ask, without) if not engine.full)
                for role in SPLIT
            )
        now = ask.now
        found = Candidates(
            tuple(
                [n for n in fitting if n.takes(now)]
                or [n for n in fitting if n.usable(now)]
                or fitting
            ),
            prefill,
            decode,
            self._may_pair,
        )
        if cached and serving:  # a client can name any number of models
            self._known[key] = found
        return found

    def _may_pair(self, prefill: LedgerEngine, decode: LedgerEngine) -> bool:
        return self._compatibility.compatible(SPLIT, (prefill, decode))


def levels(without: Collection[str], avoid: Collection[str]) -> list[Collection[str]]:
    """Return which engines are left out of the choices for a request, one after the other: `avoid`
    is there to be tried without, too.
    """
    return [(*without, *avoid), without] if avoid else [without]


def _are_possible(prefill: LedgerEngine, decode: LedgerEngine) -> bool:
    return prefill_and_decode(prefill, decode) is None


def _may_be_tried(roles: tuple[Role, ...], engines: tuple[LedgerEngine, ...]) -> bool:
    """Return whether engines may serve one request although KV may not move between them: nobody
    else can serve it.
    """
    return roles == SPLIT and _are_possible(*engines)
