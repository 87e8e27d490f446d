"""Which revision of a pool's engines serves a request while there are several: in a rolling update.

Engines of two revisions never share a prompt. A revision gets nothing until it is complete: until
its engines can do alone what those of the pool do together. Complete revisions take turns, by what
their engines can do; then the policies or the placement of the pool choose among the engines of
one. What was found of engines is kept until `changed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pdproxy.kit.text import truncate
from pdproxy.scheduling.choice import SPLIT, Choice
from pdproxy.scheduling.compatibility import Compatibility
from pdproxy.scheduling.ledger_engine import ENCODE, PREFILL, LedgerEngine, Role
from pdproxy.scheduling.policy import Ask, Cached, Policy
from pdproxy.scheduling.session import stable_hash

LEAD = 32
"""How many requests more than its part a revision may have had before one that had better go there,
for its KV or its conversation, goes to another revision.
"""
_MOST_MODELS = 1024
"""Models of which it is kept how many requests revisions are owed: clients load adapters."""
_HASHES = 1 << 56
_WHOLE = (Role.AGGREGATED, Role.ANY)
"""The roles of engines that are there to serve whole."""

T = TypeVar("T")
Fits = Callable[[LedgerEngine, float], bool]
Find = Callable[[Choice, Fits | None], T | None]
"""Returns what was found for a request, None if that is nothing. All its engines must fit at the
time of the request.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Revision:
    """The engines of a revision, without encoders. `name` None: those without a revision."""

    name: str | None
    engines: tuple[LedgerEngine, ...]
    choice: Choice


@dataclass(slots=True)
class _Shares:
    """The revisions that may serve a model. `working`: the engines of each, with how much of them
    is there for prefill, and how much for decode; `shares`: each one's part of the requests,
    1 in all.

    `waiting`: what the others lack, by their names. `owed`: how many requests each should have had
    more, by the kind of the requests and its name.
    """

    complete: list[_Revision]
    working: list[dict[LedgerEngine, tuple[float, float]]]
    waiting: dict[str | None, str]
    shares: list[float] = field(init=False)
    owed: dict[Hashable, dict[str | None, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shares = self.without(())

    def without(self, engines: Collection[LedgerEngine]) -> list[float]:
        """Return the shares while some engines can't be used."""
        return shares_of(
            [
                [work for engine, work in working.items() if engine not in engines]
                for working in self.working
            ]
        )


class Revisions:
    """The revisions of a pool. `engines`: all of the pool, by URL; they may change before a call of
    `changed`. `cached`: what is known of their caches; None: nothing.
    """

    def __init__(
        self,
        engines: Mapping[str, LedgerEngine],
        policies: Mapping[Role, Policy],
        alone: Sequence[Role],
        compatibility: Compatibility,
        cached: Cached | None,
    ) -> None:
        self._engines = engines
        self._policies = policies
        self._alone = alone
        self._compatibility = compatibility
        self._cached = cached
        self.several = False
        """Whether the engines are of several revisions. Read only."""
        self._all: list[_Revision] = []
        self._by_model: dict[str | None, _Shares] = {}
        self._by_engines: dict[tuple[LedgerEngine, ...], _Shares] = {}
        self._owed: dict[str | None, dict[Hashable, dict[str | None, float]]] = {}
        """By model: see `_Shares.owed`. Kept when engines change."""

    def changed(self) -> None:
        """Forget what was found: an engine came up, went down or changed."""
        for known in (self._all, self._by_model, self._by_engines):
            known.clear()
        names = {engine.revision for engine in self._engines.values() if engine.role is not ENCODE}
        self.several = len(names) > 1
        if not self.several or len(self._owed) > _MOST_MODELS:
            self._owed.clear()

    # -- whose turn it is

    def find(
        self,
        kind: Hashable,
        ask: Ask,
        find: Find[T],
        *,
        fits: Sequence[Fits | None] = (None,),
        unusable: Collection[LedgerEngine] = (),
        near: LedgerEngine | None = None,
    ) -> T | None:
        """Return what is found in a complete revision: in that whose turn it is, or in another one
        if there is nothing. None: nothing in any, or none is complete.

        `kind`: of the request; each has turns of its own. `fits`: what engines must be like, from
        the best to what may be. `unusable`: engines whose breaker is open. `near`: an engine whose
        revision is better than others.
        """
        found_shares = self._shares(ask.model)
        if not found_shares.complete:
            return None
        revisions, shares = found_shares.complete, found_shares.shares
        if unusable:
            shares = found_shares.without(unusable)
        owed = found_shares.owed.setdefault(kind, {})
        order = self._order(revisions, shares, owed, ask, near)
        for must in fits:
            for place, at in enumerate(order):
                found = find(revisions[at].choice, must)
                if found is not None:
                    if len(order) > 1:
                        # What others could not take, they are not owed.
                        _take(owed, at, order[place:], revisions, shares)
                    return found
        return None

    def serve_whole(self, ask: Ask, without: Collection[str]) -> bool:
        """Return whether a complete revision has an engine in use that is there to serve whole,
        outside of `without`.
        """
        return any(
            engine.role in _WHOLE and engine.usable(ask.now) and engine.url not in without
            for working in self._shares(ask.model).working
            for engine in working
        )

    def find_in_any(self, find: Find[T]) -> T | None:
        """Return what is found in any revision, complete or not, whatever its engines are like."""
        for revision in self._revisions():
            if (found := find(revision.choice, None)) is not None:
                return found
        return None

    def _order(
        self,
        revisions: Sequence[_Revision],
        shares: Sequence[float],
        owed: Mapping[str | None, float],
        ask: Ask,
        near: LedgerEngine | None,
    ) -> list[int]:
        """Return the places of revisions with a share, first the one whose turn it is."""
        order = [at for at, share in enumerate(shares) if share > 0]
        if len(order) < 2:
            return order
        order.sort(key=lambda at: owed.get(revisions[at].name, 0.0) + shares[at], reverse=True)
        best = self._better(revisions, shares, order, ask, near)
        if best is not None and best != order[0] and owed.get(revisions[best].name, 0.0) > -LEAD:
            order.remove(best)
            order.insert(0, best)
        return order

    def _better(
        self,
        revisions: Sequence[_Revision],
        shares: Sequence[float],
        order: Sequence[int],
        ask: Ask,
        near: LedgerEngine | None,
    ) -> int | None:
        """Return which revision had better have a request: that of its KV, that of its
        conversation, or the only one that has most of the prompt in a cache. None: it makes no
        difference.
        """
        if near is not None:
            return next((at for at in order if revisions[at].name == near.revision), None)
        if (session := ask.session) is not None:
            # As engines have sessions by `Session`, here with weights: each revision has its part
            # of all sessions, and a new one takes over no others.
            def score(at: int) -> float:
                key = stable_hash(f"{revisions[at].name}\0{session}")
                return shares[at] / -math.log((key + 1) / (_HASHES + 1))

            return max(order, key=score)
        if self._cached is None or not (known := self._cached(ask)):
            return None
        most = max(known.values())
        found = {
            engine.revision
            for url, tokens in known.items()
            if tokens == most and (engine := self._engines.get(url)) is not None
        }
        if len(found) != 1:
            return None
        return next((at for at in order if revisions[at].name in found), None)

    # -- which revisions may serve

    def _revisions(self) -> list[_Revision]:
        if not self._all:
            by_name: dict[str | None, list[LedgerEngine]] = {}
            for engine in self._engines.values():
                if engine.role is not ENCODE:
                    by_name.setdefault(engine.revision, []).append(engine)
            self._all = [
                _Revision(
                    name,
                    tuple(engines),
                    Choice(engines, self._policies, self._alone, self._compatibility),
                )
                for name, engines in by_name.items()
            ]
        return self._all

    def _shares(self, model: str | None) -> _Shares:
        """Return what is known for a model. Without any revision if no engine lists the model."""
        if (known := self._by_model.get(model)) is not None:
            return known
        every = self._engines.values()
        serving = tuple(n for n in every if n.available and (model is None or n.serves(model)))
        shares = self._by_engines.get(serving)
        if shares is None:
            prefills = any(
                PREFILL in n.uses and (model is None or n.serves(model))
                for n in every  # also those that are down: the others are not meant to do without
            )
            shares = self._by_engines[serving] = self._look(serving, prefills=prefills)
            if serving:
                shares.owed = self._owed.setdefault(model, {})
        if serving:  # a client can name any number of models
            self._by_model[model] = shares
        return shares

    def _look(self, serving: Collection[LedgerEngine], *, prefills: bool) -> _Shares:
        """Look which revisions are complete. `prefills`: whether prompts are to be split."""
        complete: list[_Revision] = []
        working: list[dict[LedgerEngine, tuple[float, float]]] = []
        waiting: dict[str | None, str] = {}
        encoders = {engine.revision for engine in serving if engine.role is ENCODE}
        up = frozenset(serving)
        for revision in self._revisions():
            engines = [engine for engine in revision.engines if engine in up]
            works = self._paired(engines) if prefills else self._whole(engines, (0.0, 1.0))
            if not works:
                waiting[revision.name] = _lack(engines, prefills=prefills)
            elif encoders and not encoders & {revision.name, None}:
                waiting[revision.name] = "no encoder engine that is up"
            else:
                complete.append(revision)
                working.append(works)
        return _Shares(complete, working, waiting)

    def _whole(
        self, engines: Iterable[LedgerEngine], work: tuple[float, float]
    ) -> dict[LedgerEngine, tuple[float, float]]:
        """Return those of some engines that may serve requests whole, each with `work`."""
        alone = self._alone
        return {engine: work for engine in engines if not engine.uses.isdisjoint(alone)}

    def _paired(self, engines: Sequence[LedgerEngine]) -> dict[LedgerEngine, tuple[float, float]]:
        """Return those of some engines that have another one to share a prompt with, or are there
        to serve whole: how much of each is there for prefill, and how much for decode.
        """
        both = (0.5, 0.5)
        found = self._whole([engine for engine in engines if engine.role in _WHOLE], both)
        some = [[engine for engine in engines if role in engine.uses] for role in SPLIT]
        for at, (role, own, others) in enumerate(zip(SPLIT, some, some[::-1], strict=True)):
            for engine in own:
                pairs = ((engine, other) if at == 0 else (other, engine) for other in others)
                if any(self._compatibility.compatible(SPLIT, pair) for pair in pairs):
                    work = (1.0, 0.0) if role is PREFILL else (0.0, 1.0)
                    found.setdefault(engine, both if engine.role is Role.ANY else work)
        return found

    # -- what an operator is shown

    def shares(self) -> dict[str, float]:
        """Return the parts of the pool's requests that revisions should get, by name: 0 of those
        that get none. "": engines without a revision. Empty while there are not several.
        """
        if not self.several:
            return {}
        found = self._shares(None)
        parts = dict.fromkeys([revision.name for revision in self._revisions()], 0.0)
        parts |= {one.name: share for one, share in zip(found.complete, found.shares, strict=True)}
        return {name or "": share for name, share in parts.items()}

    def waiting(self) -> dict[str | None, str]:
        """Return why revisions get no requests, by name, a sentence each. None: engines without a
        revision.
        """
        if not self.several:
            return {}
        told = {}
        for revision in self._revisions():
            name, models = revision.name, _models_of(revision.engines)
            lacks: dict[str, list[str]] = {}
            for model in models:
                shares = self._shares(model)
                lack = shares.waiting.get(name) if shares.complete else None
                if lack is not None:
                    lacks.setdefault(lack, []).append(model)
            sentences = []
            for lack, of in lacks.items():
                these = "" if of == models else f" for {truncate(', '.join(of))}"
                sentences.append(
                    f"engines without a revision get no requests{these}: they have {lack}"
                    if name is None
                    else f"revision {truncate(name)} gets no requests{these}: it has {lack}"
                )
            if sentences:
                told[name] = "; ".join(sentences)
        return told

    def shortcomings(self) -> list[str]:
        """Return which revisions get no requests, or that none is complete, so that no prompt is
        split: their label may have another value for each role, or for each engine.
        """
        found = [*self.waiting().values()]
        if not self.several or (shares := self._shares(None)).complete:
            return found
        up = [engine for engine in self._engines.values() if engine.available]
        if not shares.waiting or any(all(role not in n.uses for n in up) for role in SPLIT):
            return found
        name, lack = next(iter(shares.waiting.items()))
        has = (
            "engines without a revision have" if name is None else f"revision {truncate(name)} has"
        )
        said = f"none of {len(shares.waiting)} revisions is complete: {has} {lack}"
        return [*found, f"no prompt is split, since {said}"]


def shares_of(work: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return the parts of the requests, 1 in all, that each of some revisions gets: the part that
    it has of the engines for prefill, or of those for decode, whichever is less.

    `work`: for each engine of each, how much of it is for prefill, and for decode. What no engine
    is for is not counted.
    """
    sums = [(sum(one for one, _ in of), sum(other for _, other in of)) for of in work]
    totals = [sum(one) for one in zip(*sums, strict=True)]
    least = [
        min((some / total for some, total in zip(of, totals, strict=True) if total), default=0.0)
        for of in sums
    ]
    every = sum(least)
    return [one / every for one in least] if every else [0.0] * len(least)


def _lack(engines: Sequence[LedgerEngine], *, prefills: bool) -> str:
    """Return what engines of a revision that is not complete lack."""
    if not prefills:
        return "no engine that is up and serves whole requests"
    for role in SPLIT:
        if not any(role in engine.uses for engine in engines):
            return f"no {role.value} engine that is up"
    return "no prefill engine that can be paired with a decode engine"


def _take(
    owed: dict[str | None, float],
    taken: int,
    able: Sequence[int],
    revisions: Sequence[_Revision],
    shares: Sequence[float],
) -> None:
    """Note that a revision gets a request that any of `able` could have had."""
    for at in able:
        name = revisions[at].name
        owed[name] = owed.get(name, 0.0) + shares[at]
    owed[revisions[taken].name] -= sum(shares[at] for at in able)


def _models_of(engines: Iterable[LedgerEngine]) -> list[str]:
    """Return the names of the models of some engines, without adapters."""
    found = {
        model
        for engine in engines
        if engine.evidence is not None
        for model in engine.evidence.models - engine.evidence.adapters
    }
    return sorted(found)
