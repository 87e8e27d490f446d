"""A worker's side of engines' states: a view of what the scheduler process knows.

The rest of this worker reads the ledger and the registry, as in the process that writes the states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import structs

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.events import Event, LegFailed, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.workers.engine_states import TOPIC, EngineState, Following, StatesAtWorker
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.state_writer import StatesOfWorker

WISH_EVERY = 1.0
"""Seconds between two wishes to have an engine probed."""


class StateView:
    """The view of the engines of the pool with number `pool`, a watcher of them.

    An observer: an engine to which a leg has failed is to be probed at once.
    """

    only = (LegFailed,)

    def __init__(
        self,
        link: SchedulerLink,
        pool: int,
        engines: EngineRegistry,
        ledger: Ledger,
        auditor: Auditor,
        observers: Observers,
        now: Callable[[], float],
    ) -> None:
        self._link = link
        self._pool = pool
        self._engines = engines
        self._now = now
        self._following = Following(engines, ledger, auditor, observers, now, self._noted)
        self._told = link.subscriber.subscribe(f"{TOPIC} {pool}", EngineState, self._follow)
        """Also of engines that this worker does not have yet."""
        self._told.retained = self._now_known
        self._told.counts = lambda url: url not in self._numbers
        self._numbers: dict[str, int] = {}
        """The number of the last note of an engine, until the scheduler process has heard it."""
        self._number = 0
        self._wished: dict[str, float] = {}
        link.serve(StatesAtWorker, self, pool)
        engines.watch(self)
        observers.add(self)

    def __repr__(self) -> str:
        return f"<StateView of {len(self._told.values)} engines>"

    def added(self, engine: Engine) -> None:
        """Have an engine be as it was told before."""
        if engine.url in self._told.values:
            # behind other watchers, which have to know the engine first
            asyncio.get_running_loop().call_soon(self._added, engine)

    def _added(self, engine: Engine) -> None:
        state = self._told.values.get(engine.url)
        if state is not None and self._engines.get(engine.url) is engine:
            self._take(engine, state, None)

    def removed(self, engine: Engine) -> None:
        """Note nothing of it any more. One that comes again is another engine, unless only its
        settings have changed.
        """
        if engine.url != self._engines.replaced:
            self._told.values.pop(engine.url, None)
        self._numbers.pop(engine.url, None)
        self._wished.pop(engine.url, None)

    def notify(self, event: Event) -> None:
        """Have an engine probed soon to which a leg has failed."""
        if isinstance(event, LegFailed) and event.node in self._engines:
            now = self._now()
            if now - self._wished.get(event.node, -WISH_EVERY) >= WISH_EVERY:
                self._wished[event.node] = now
                self._link.tell(StatesOfWorker.wanted, self._pool, event.node)

    # -- what the scheduler process says

    def heard(self, number: int) -> None:
        """See `StatesAtWorker`."""
        self._numbers = {url: one for url, one in self._numbers.items() if one > number}

    def _follow(self, url: str, state: EngineState) -> None:
        if (engine := self._engines.get(url)) is not None:
            self._take(engine, state, self._told.values.get(url))
        else:
            self._following.follow_leaving(state)

    def _take(self, engine: Engine, state: EngineState, before: EngineState | None) -> None:
        self._following.follow(engine, state, before)
        self._following.follow_audit(engine, state)

    # -- what this worker says

    def _noted(self, url: str) -> None:
        """Something of an engine was noted by this worker itself."""
        engine = self._engines.get(url)
        if engine is None:
            return
        self._number += 1
        self._numbers[url] = self._number
        told = self._told.values.get(url)
        known = engine.in_ledger
        stalled = known.stalled if told is None or told.stalled is None else None
        ejected = known.ejected.difference(() if told is None else told.ejected)
        note, number = StatesOfWorker.note, self._number
        self._link.tell(note, self._pool, number, url, stalled, sorted(ejected))

    def _now_known(self) -> dict[str, EngineState]:
        """Return what is known, for a new scheduler process: also what nobody has heard."""
        known = {url: self._with_notes(state) for url, state in self._told.values.items()}
        self._numbers.clear()
        self._wished.clear()
        return known

    def _with_notes(self, state: EngineState) -> EngineState:
        engine = self._engines.get(state.url)
        if engine is None or state.url not in self._numbers:
            return state
        known = engine.in_ledger
        return structs.replace(
            state,
            at=self._now(),
            evidence=known.evidence,
            down=known.down_because,
            down_since=known.down_since,
            stalled=known.stalled,
            ejected=sorted(known.ejected),
        )
