"""The engines from which a placement chooses for a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pdproxy.scheduling.compatibility import Compatibility, prefill_and_decode
from pdproxy.scheduling.eligibility import Eligibility
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.placement import Candidates
from pdproxy.scheduling.policy import Ask

_SPLIT = (Role.PREFILL, Role.DECODE)


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
    """

    def __init__(
        self, alone: Sequence[Role], eligibility: Eligibility, compatibility: Compatibility
    ) -> None:
        self._alone = alone
        self._eligibility = eligibility
        self._compatibility = compatibility
        self._known: dict[tuple[str | None, bool, bool], Candidates] = {}

    def changed(self) -> None:
        """Forget what was found: an engine came up, went down or changed."""
        self._known.clear()

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
        levels: list[Collection[str]] = [(*without, *avoid)] if avoid else []
        if without:
            levels.append(without)
        for excluded in (*levels, ()):
            candidates = self._candidates(ask, split, excluded, cached and not excluded)
            if candidates.whole or any(
                self._may_pair(prefill, decode)
                for prefill in candidates.prefill
                for decode in candidates.decode
            ):
                return candidates
        # Nobody can serve it whole: engines between which KV did not move are better than no
        # answer.
        found = self._candidates(ask, split, (), cached=False)
        found = replace(found, compatible=_are_possible)
        return (
            found if any(_are_possible(p, d) for p in found.prefill for d in found.decode) else None
        )

    def _candidates(
        self, ask: Ask, split: bool, without: Collection[str], cached: bool
    ) -> Candidates:
        key = (ask.model, split, ask.spares_decode)
        if cached and (known := self._known.get(key)) is not None:
            return known
        ranked = self._eligibility.eligible
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
                for role in _SPLIT
            )
        found = Candidates(
            tuple([n for n in fitting if n.takes(ask.now)] or fitting),
            prefill,
            decode,
            self._may_pair,
        )
        if cached and serving:  # a client can name any number of models
            self._known[key] = found
        return found

    def _may_pair(self, prefill: LedgerEngine, decode: LedgerEngine) -> bool:
        return self._compatibility.compatible(_SPLIT, (prefill, decode))


def _are_possible(prefill: LedgerEngine, decode: LedgerEngine) -> bool:
    return prefill_and_decode(prefill, decode) is None
