"""The engines of a request's candidates as loads, and which of them are worth a look. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from pdproxy.scheduling.auto.loads import PredictedLoad
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.placement import Candidates

ALL = 4
"""Up to so many engines that may serve the whole request are all looked at; otherwise the best ones
by each order.
"""
_CACHED = 2
_TURNS = 8
_prefill_order = attrgetter("prefill_order")
_decode_order = attrgetter("decode_order")


Group = tuple[frozenset[str], str | None]
"""What engines have in common among which there is one demand: their models and their revision."""


def models_of(engine: LedgerEngine) -> frozenset[str]:
    """Return the names of the models that an engine serves, without adapters."""
    evidence = engine.evidence
    return frozenset() if evidence is None else evidence.models - evidence.adapters


class EnginesView:
    """The engines of a `Candidates`: one at least."""

    __slots__ = (
        "_by_url",
        "_decode",
        "_prefill",
        "_prefills",
        "_turn",
        "_whole",
        "all",
        "decode",
        "fixed_prefill",
        "free",
        "group",
        "measured",
        "serve_whole",
        "version",
        "whole",
    )

    def __init__(
        self, candidates: Candidates, load_of: Callable[[LedgerEngine], PredictedLoad]
    ) -> None:
        self.whole = [load_of(engine) for engine in candidates.whole]
        self.serve_whole = frozenset(self.whole)
        self.decode = [load_of(engine) for engine in candidates.decode]
        prefill = [load_of(engine) for engine in candidates.prefill]
        self.fixed_prefill = [load for load in prefill if load.engine.role is not Role.ANY]
        """Those that are for prefill by the settings."""
        self.free = [load for load in prefill if load.engine.role is Role.ANY]
        """Those that may be kept for prefill."""
        self.all = list(dict.fromkeys((*self.whole, *prefill, *self.decode)))
        first = self.all[0].engine
        self.group: Group = models_of(first), first.revision
        """Of the first of them; the others are of the same, or the request names no model, or no
        revision is complete.
        """
        self._by_url = {load.url: load for load in self.all}
        self.measured = False
        """Whether enough is known of all of them for predictions."""
        self._turn = 0
        self.version = -1
        """Of the decision which engines are kept."""
        self._whole: list[PredictedLoad] = []
        self._prefill: list[PredictedLoad] = []
        self._prefills: frozenset[PredictedLoad] = frozenset()
        """The same, to find one."""
        self._decode: list[PredictedLoad] = []

    def sort_roles(self, version: int) -> None:
        """Note which engines are kept now."""
        self.version = version
        self._prefill = [*self.fixed_prefill, *(load for load in self.free if load.kept)]
        if not self._prefill and not self.whole:
            self._prefill = self.free
        self._prefills = frozenset(self._prefill)
        self._decode = [load for load in self.decode if not load.kept] or self.decode
        self._whole = [load for load in self.whole if not load.kept] or self.whole

    def cached(self, known: Mapping[str, int]) -> list[PredictedLoad]:
        """Return those with most of a prompt; where these are many, those with the least to do
        first.

        `known`: tokens in their caches, by URL; one at least.
        """
        by_url, most = self._by_url, max(known.values())
        found = [by_url[url] for url, tokens in known.items() if tokens == most and url in by_url]
        if len(found) > _CACHED:
            found.sort(key=_prefill_order)
        return found

    def worth_whole(self, cached: Sequence[PredictedLoad]) -> Iterable[PredictedLoad]:
        """Return engines for the whole request, if they are not kept. `cached`: see there."""
        loads = self._whole
        if len(loads) <= ALL:
            return loads
        worth = {min(loads, key=_prefill_order): None, min(loads, key=_decode_order): None}
        for load in cached[:_CACHED]:
            worth[load] = None
        self._turn += 1
        if not self._turn % _TURNS:  # in turn, each engine is looked at: an order may be wrong
            worth[loads[self._turn // _TURNS % len(loads)]] = None
        return worth

    def worth_prefill(self, cached: Sequence[PredictedLoad]) -> Sequence[PredictedLoad]:
        """Return engines that may prefill for another one."""
        loads = self._prefill
        if len(loads) <= ALL // 2:
            return loads
        worth = [min(loads, key=_prefill_order)]
        if cached:
            more = [load for load in cached if load in self._prefills][:_CACHED]
            worth += [load for load in more if load is not worth[0]]
        return worth

    def worth_decode(self) -> Sequence[PredictedLoad]:
        """Return engines that may decode for another one."""
        loads = self._decode
        return loads if len(loads) <= ALL // 2 else [min(loads, key=_decode_order)]

    def pairs(
        self, compatible: Callable[[LedgerEngine, LedgerEngine], bool]
    ) -> Iterator[tuple[PredictedLoad, PredictedLoad]]:
        """Yield the engines that may share the work, those with the least to do first."""
        for prefill in sorted(self._prefill, key=_prefill_order):
            for decode in sorted(self._decode, key=_decode_order):
                if prefill is not decode and compatible(prefill.engine, decode.engine):
                    yield prefill, decode
