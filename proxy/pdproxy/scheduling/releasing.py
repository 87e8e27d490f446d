"""The engines through which KV is released that nobody will read. No lease: a release is no
load.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdproxy.scheduling.breakers import Breakers
from pdproxy.scheduling.compatibility import prefill_and_decode
from pdproxy.scheduling.eligibility import Eligibility
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import Ask


class ReleaserChoice:
    """Chooses them. `engines`: all engines by URL. Those that are being drained are used if there
    are no others.
    """

    def __init__(
        self, engines: Mapping[str, LedgerEngine], eligibility: Eligibility, breakers: Breakers
    ) -> None:
        self._engines = engines
        self._eligibility = eligibility
        self._breakers = breakers

    def through(
        self, prefill: str, model: str | None, now: float, *, prefer_not: str | None = None
    ) -> LedgerEngine | None:
        """Return the decode engine through which a prefill engine's handle is released."""
        # None: it was removed, and its labels are not known any more
        made_by = self._engines.get(prefill)
        found = [
            [
                engine
                for engine in engines
                if engine.url != prefill
                and (
                    engine.spec.has_source(prefill)
                    if made_by is None
                    else engine.spec.takes_from(made_by.spec)
                )
            ]
            for engines in self._ranked(Role.DECODE, model, now)
        ]
        ranked = next((engines for engines in found if engines), [])
        others = [engine for engine in ranked if engine.url != prefer_not]
        return next(iter(self._tried(others, now) or ranked), None)

    def readers_of(self, decode: LedgerEngine, model: str | None, now: float) -> list[LedgerEngine]:
        """Return the prefill engines that may pull KV of a decode engine, best first."""
        for engines in self._ranked(Role.PREFILL, model, now):
            if found := [
                engine for engine in engines if prefill_and_decode(engine, decode) is None
            ]:
                return self._tried(found, now)
        return []

    def _ranked(
        self, role: Role, model: str | None, now: float
    ) -> tuple[list[LedgerEngine], list[LedgerEngine]]:
        """Return the engines of a role that may get requests, best first, and those that are being
        drained.
        """
        draining = [
            engine
            for engine in self._engines.values()
            if engine.draining is not None
            and engine.up
            and role in engine.uses
            and (model is None or engine.serves(model))
        ]
        return self._eligibility.ranked(role, Ask(model, 0, now), ()), draining

    def _tried(self, engines: list[LedgerEngine], now: float) -> list[LedgerEngine]:
        """Return the engines without half-open ones, if there are others: those get one request,
        and releases hold no lease.
        """
        if not self._breakers.opened:
            return engines
        return [engine for engine in engines if not engine.half_open(now)] or engines
