"""Which pool serves a model: by the names at its engines, the operator's aliases, and patterns. For
proxies with several pools.

Owns that rule. Pools whose engines list a name, or that have an alias of it, share its requests by
their weights; else the pool with the longest pattern that fits gets them. A conversation stays in
its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log
from typing import Generic, NamedTuple, TypeVar

from pdproxy.kit.errors import ModelNotFoundError
from pdproxy.scheduling.ledger_engine import LedgerEngine

MAX_KEPT = 4096
"""Names whose pools are remembered."""
MAX_SHOWN = 100
"""Names in the error for an unknown one."""
T = TypeVar("T")


@dataclass(slots=True)
class PoolModels:
    """What decides which requests a pool gets. `nodes` returns its engines; the rest is as in its
    settings.
    """

    engines: Callable[[], Sequence[LedgerEngine]]
    models: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    name: str = ""

    def lists(self, model: str) -> bool:
        """Return whether an engine of the pool lists a name, also one that is down now."""
        return any(engine.serves(model) for engine in self.engines())

    def is_seen(self) -> bool:
        """Return whether any engine of the pool has ever answered."""
        return any(engine.evidence is not None for engine in self.engines())

    def serves_now(self, model: str, now: float) -> bool:
        """Return whether an engine that lists a name is in use now (monotonic seconds), and needs
        no other one to answer.

        Without such an engine, those of a model that none lists count.
        """
        answering = [
            engine for engine in self.engines() if engine.usable(now) and not engine.for_others
        ]
        return any(engine.serves(model) for engine in answering) or (
            bool(answering) and not self.lists(model)
        )

    def fit(self, model: str) -> int:
        """Return the length of the longest of `models` that fits a name, one more for the name
        itself; -1 if none does.
        """
        return max((fit(pattern, model) for pattern in self.models), default=-1)


def fit(pattern: str, model: str) -> int:
    """Return how well a pattern with one `*` at most fits a name: its length, one more for the name
    itself; -1 if it does not.
    """
    if pattern == model:
        return len(pattern) + 1
    begin, star, end = pattern.partition("*")
    fits = (
        star
        and len(model) >= len(begin) + len(end)
        and model.startswith(begin)
        and model.endswith(end)
    )
    return len(begin) + len(end) if fits else -1


class PoolChoice(NamedTuple):
    """A pool by its number, and the name by which its engines know the model; None: the request
    names none.
    """

    pool: int
    model: str | None


class Models:
    """The pools by the names of models. What the engines list may change with them: `changed` is
    called then.

    `chance`: from 0 to 1; `now`: the clock of engines' breakers, in monotonic seconds.
    """

    def __init__(
        self, pools: list[PoolModels], chance: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self.pools = pools
        self._chance = chance
        self._now = now
        self._known: dict[str, list[PoolChoice]] = {}

    def __repr__(self) -> str:
        return f"<Models of {len(self.pools)} pools>"

    @property
    def is_of_use(self) -> bool:
        """Whether there is anything to choose, or a name to replace."""
        return len(self.pools) > 1 or any(pool.aliases for pool in self.pools)

    def changed(self) -> None:
        """Look again for all names."""
        self._known.clear()

    def knows(self, name: str) -> bool:
        """Return whether a name is an alias."""
        return any(name in pool.aliases for pool in self.pools)

    def aliases(self) -> Iterator[tuple[int, str, str]]:
        """Return the number of a pool, another name of a model there, and the model's own."""
        for at, pool in enumerate(self.pools):
            for name, real in pool.aliases.items():
                yield at, name, real

    def choose(
        self, model: str | None, session: str | None, pools: Collection[str] | None = None
    ) -> PoolChoice:
        """Return the pool that gets a request. `session`: what the requests of one conversation
        have in common, None: nothing.

        `pools`: the names of those that may be chosen, None: all. If none of them serves the model,
        another one is returned.

        Raises:
            ModelNotFoundError: there are several pools, and none has the model.
        """
        if not model:  # vLLM takes an empty name for its model, too
            return PoolChoice(0, model)
        found = self._known.get(model)
        if found is None:
            found = self._find(model, pools)
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            self._known[model] = found
        if pools is not None:
            found = [one for one in found if self.pools[one.pool].name in pools] or found
        return found[0] if len(found) == 1 else self._among(found, session)

    def serving(self, model: str) -> list[int]:
        """Return the numbers of the pools that serve a model, also while nobody there is up: by
        engines, aliases or patterns.
        """
        return [one.pool for one in self._named(model)]

    def _named(self, model: str) -> list[PoolChoice]:
        found = []
        for at, pool in enumerate(self.pools):
            if pool.lists(model):
                found.append(PoolChoice(at, model))
            elif (real := pool.aliases.get(model)) is not None:
                found.append(PoolChoice(at, real))
        if not found:
            fits = [pool.fit(model) for pool in self.pools]
            found = [
                PoolChoice(at, model)
                for at, fit in enumerate(fits)
                if fit >= 0 and fit == max(fits)
            ]
        return found

    def _find(self, model: str, pools: Collection[str] | None) -> list[PoolChoice]:
        found = self._named(model)
        if not found and len(self.pools) == 1:
            return [PoolChoice(0, model)]  # its engines answer for themselves
        if not found:  # perhaps a pool that was never up has it: it answers that it is not
            found = [
                PoolChoice(at, model) for at, pool in enumerate(self.pools) if not pool.is_seen()
            ][:1]
        if not found:
            raise ModelNotFoundError(model, self._names(pools))
        return found

    def _among(self, found: list[PoolChoice], session: str | None) -> PoolChoice:
        now = self._now()
        serving = [
            one for one in found if self.pools[one.pool].serves_now(one.model or "", now)
        ] or found
        weights = [self.pools[one.pool].weight for one in serving]
        if not any(weights):
            return serving[0]
        if session is not None:
            # The highest score: where a pool comes, goes or changes its weight, only its own
            # conversations move.
            scores = [
                weight / -log(_part(session, one.pool))
                for one, weight in zip(serving, weights, strict=True)
            ]
            return serving[scores.index(max(scores))]
        left = sum(weights) * self._chance()
        for one, weight in zip(serving, weights, strict=True):
            left -= weight
            if left < 0:
                return one
        return next(
            one for one, weight in zip(reversed(serving), reversed(weights), strict=True) if weight
        )

    def _names(self, pools: Collection[str] | None) -> list[str]:
        """Return the names of models, without adapters, and the aliases. `pools`: of these alone,
        None: of all.
        """
        shown = [pool for pool in self.pools if pools is None or pool.name in pools]
        evidences = [
            engine.evidence
            for pool in shown
            for engine in pool.engines()
            if engine.evidence is not None
        ]
        names = {name: None for one in evidences for name in sorted(one.models - one.adapters)}
        names |= dict.fromkeys(name for pool in shown for name in pool.aliases)
        return [*names][:MAX_SHOWN]


def _part(session: str, pool: int) -> float:
    """Return a number between 0 and 1 that is the same for a session and a pool in all
    processes.
    """
    name = session.encode(errors="surrogatepass")
    digest = blake2b(name, digest_size=6, person=b"pools", salt=pool.to_bytes(2)).digest()
    return (int.from_bytes(digest) + 0.5) / 2**48


class Routes(Generic[T]):
    """What serves the requests of each pool, in their order."""

    __slots__ = ("_models", "_targets")

    def __init__(self, models: Models, targets: Sequence[T]) -> None:
        self._models = models
        self._targets = targets

    def of(
        self, model: str | None, session: str | None, pools: Collection[str] | None = None
    ) -> tuple[T, str | None]:
        """Return what serves a request, and the name by which engines know its model. See
        `Models.choose`.
        """
        choice = self._models.choose(model, session, pools)
        return self._targets[choice.pool], choice.model
