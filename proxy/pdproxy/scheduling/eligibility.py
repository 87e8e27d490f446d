"""Which engines of a role may serve a request."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import Ask, Best, Policy

_FOR_OTHERS = (Role.ENCODE, Role.PREFILL)
"""What engines do for other engines: they get no model that none of them lists."""


class Eligibility:
    """Finds the engines that may serve a request, and has the role's policy rank them.

    `nodes` is the ledger's view of its engines: it may change before a call of `changed`.
    """

    def __init__(self, engines: Collection[LedgerEngine], policies: Mapping[Role, Policy]) -> None:
        self._engines = engines
        self._policies = policies
        self._best: dict[tuple[Role, str | None], Best] = {}
        self._sets: list[tuple[Role, list[LedgerEngine], Best]] = []

    def best_of(self, role: Role, model: str | None) -> Best | None:
        """Return what chooses among the engines of a role that are up and serve a model, None if
        there are none.

        For requests that exclude no engine, while no breaker was opened.
        """
        return self._best.get((role, model)) or self._prepare(role, model)

    def ranked(self, role: Role, ask: Ask, without: Collection[str]) -> list[LedgerEngine]:
        """Return the engines of a role that may serve a request, best first.

        A model that no engine serves, not even one of `without` or one that stands still, matches
        all engines that answer clients: an engine's own 404 is the answer. Engines whose breaker is
        open, or leaves them no place, are used only if there are no others, and those whose
        cooldown is over before these: they are better than no answer. Those with room in their
        window come first.
        """
        eligible = self.eligible(role, ask, without)
        if len(eligible) < 2:
            return eligible
        ranked = self._policies[role].rank(ask, eligible)
        return (
            sorted(ranked, key=_is_crowded) if any(engine.crowded for engine in ranked) else ranked
        )

    def eligible(self, role: Role, ask: Ask, without: Collection[str]) -> list[LedgerEngine]:
        """As `ranked`, in no order."""
        up = [engine for engine in self._engines if role in engine.uses and engine.available]
        serving = [engine for engine in up if ask.model is None or engine.serves(ask.model)]
        known = serving or (
            up if role not in _FOR_OTHERS and not self._may_serve_later(ask.model) else []
        )
        fitting = [engine for engine in known if engine.url not in without] if without else known
        now = ask.now
        return (
            [n for n in fitting if n.takes(now)] or [n for n in fitting if n.usable(now)] or fitting
        )

    def _may_serve_later(self, model: str | None) -> bool:
        """Return whether an engine that answers clients serves a model once it moves again."""
        if model is None:
            return False
        stalled = [
            engine for engine in self._engines if engine.stalled is not None and engine.returns
        ]
        return any(engine.serves(model) and engine.role not in _FOR_OTHERS for engine in stalled)

    def changed(self) -> None:
        """Forget all preparations: an engine came up, went down or changed."""
        self._best.clear()
        self._sets.clear()
        for policy in self._policies.values():
            policy.engines_changed()

    def _prepare(self, role: Role, model: str | None) -> Best | None:
        engines = [
            engine
            for engine in self._engines
            if role in engine.uses and engine.available and (model is None or engine.serves(model))
        ]
        if not engines:
            return None  # not remembered: a client can name any number of models
        # Hundreds of adapters are mostly served by the same engines, and each set costs time
        # whenever a load changes.
        best = next(
            (best for whose, same, best in self._sets if whose is role and same == engines), None
        )
        if best is None:
            best = (
                self._policies[role].best_of(engines) if len(engines) > 1 else lambda _: engines[0]
            )
            self._sets.append((role, engines, best))
        self._best[role, model] = best
        return best


def _is_crowded(engine: LedgerEngine) -> bool:
    return engine.crowded
