"""Which engines may serve one request together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations, product

from pdproxy.scheduling.ledger_engine import LedgerEngine, Role


def prefill_and_decode(prefill: LedgerEngine, decode: LedgerEngine) -> str | None:
    """Return why a decode engine may not take a prefill engine's KV, None if it may."""
    if prefill is decode:
        return "the same engine"
    if not decode.spec.takes_from(prefill.spec):
        return "not configured as a pair"
    if prefill.evidence is None or decode.evidence is None:
        return "not probed yet"
    for engine in (prefill, decode):
        if engine.kv_not_ready is not None:
            return f"{engine.url} {engine.kv_not_ready}"
    if prefill.kv_mode != decode.kv_mode:
        return f"different transfer modes ({prefill.kv_mode} / {decode.kv_mode})"
    one, other = prefill.kv_tp_size, decode.kv_tp_size
    if one is not None and other is not None and one % other and other % one:
        return f"tensor-parallel sizes {one} / {other}: one must be a multiple of the other"
    if decode.url in prefill.ejected:
        return "ejected: they counted different prompt lengths for one request"
    return prefill.evidence.difference(decode.evidence)


def may_share(prefill: LedgerEngine, decode: LedgerEngine) -> str | None:
    """Return why no prompt is split between two engines now, None if one may be: they may work
    together, and KV moves.
    """
    if (why := prefill_and_decode(prefill, decode)) is not None:
        return why
    fault = None if prefill.transfers is None else prefill.transfers.apart(prefill.url, decode.url)
    return None if fault is None else fault.why


_RULES: dict[tuple[Role, Role], Callable[[LedgerEngine, LedgerEngine], str | None]] = {
    (Role.PREFILL, Role.DECODE): may_share,
}
"""The rule for two roles. Engines of two roles without a rule exchange nothing, and are always
compatible.
"""


def _may_work_together(one: tuple[Role, LedgerEngine], other: tuple[Role, LedgerEngine]) -> bool:
    """Return whether two engines may serve one request in these roles."""
    (a, first), (b, second) = one, other
    if (rule := _RULES.get((a, b))) is not None:
        return rule(first, second) is None
    if (rule := _RULES.get((b, a))) is not None:
        return rule(second, first) is None
    return first is not second


_MOST_SETS = 256
"""Sets of engines of which it is known who has no partner there: requests leave engines out."""


class Compatibility:
    """Remembers which engines are compatible, until `changed`: every request asks."""

    def __init__(self) -> None:
        self._known: dict[tuple[Role, ...], dict[tuple[LedgerEngine, ...], bool]] = {}
        self._without: dict[Hashable, set[LedgerEngine]] = {}
        """By the roles and the engines among which partners were looked for: those that have none
        there.
        """

    def compatible(self, roles: tuple[Role, ...], engines: tuple[LedgerEngine, ...]) -> bool:
        """Return whether every two of these engines may serve one request, each in its role."""
        try:
            known = self._known[roles]
        except KeyError:
            known = self._known[roles] = {}
        compatible = known.get(engines)
        if compatible is None:
            pairs = combinations(zip(roles, engines, strict=True), 2)
            compatible = known[engines] = all(_may_work_together(*pair) for pair in pairs)
        return compatible

    def first(
        self, roles: tuple[Role, ...], ranked: Sequence[Sequence[LedgerEngine]]
    ) -> tuple[LedgerEngine, ...] | None:
        """Return one engine of each ranking, all compatible, None if there are none.

        The first ranking counts most: its best engine that has compatible partners is taken. An
        engine that has none is looked at once: all pairs of hundreds of engines take long.
        """
        if not ranked:
            return ()
        first, *others = ranked
        without: set[LedgerEngine] | None = None
        for engine in first:
            if without is not None and engine in without:
                continue
            for engines in product([engine], *others):
                if self.compatible(roles, engines):
                    return engines
            if without is None:
                without = self._without_partners(roles, others)
            without.add(engine)
        return None

    def _without_partners(
        self, roles: tuple[Role, ...], others: Sequence[Sequence[LedgerEngine]]
    ) -> set[LedgerEngine]:
        if len(self._without) >= _MOST_SETS:
            self._without.clear()
        return self._without.setdefault((roles, *map(frozenset, others)), set())

    def changed(self) -> None:
        """Forget everything: an engine came up, went down or changed, or KV moves no more between
        some, or again.
        """
        self._known.clear()
        self._without.clear()
