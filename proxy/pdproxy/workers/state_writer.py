"""The scheduler process's side of engines' states: it tells workers what has changed, and hears
what they have noted.

Owns when each state has changed last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.outliers import Outliers
from pdproxy.workers.engine_states import (
    EngineState,
    Following,
    Note,
    Said,
    Told,
    decode_said,
    encode,
)
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.telling import Telling

AT_ONCE = 64
"""Engines of which one message tells."""
HELD_FOR = 5.0
"""Seconds for which a state that a worker has of an engine is kept, until this process finds the
engine: sources of engines answer later.
"""


class StateWriter:
    """The states of one pool's engines, a watcher of them. `topic`: of the messages; `probe`: has
    an engine probed soon.
    """

    def __init__(
        self,
        links: SchedulerLinks,
        topic: str,
        engines: EngineRegistry,
        ledger: Ledger,
        auditor: Auditor,
        outliers: Outliers,
        observers: Observers,
        now: Callable[[], float],
        probe: Callable[[Engine], None],
    ) -> None:
        self._topic = topic
        self._engines = engines
        self._ledger = ledger
        self._outliers = outliers
        self._now = now
        self._probe = probe
        self._following = Following(engines, ledger, auditor, observers, now, self._changed)
        self._at: dict[str, float] = {}
        """When an engine's state has changed last, here or at the process before."""
        self._audited: dict[str, float] = {}
        """Of when the account of an engine's audit is that a worker had."""
        self._held: dict[str, EngineState] = {}
        """What workers know of engines that are not here yet."""
        self._telling = Telling(links, topic, engines, self._told, AT_ONCE)
        links.hears[topic] = self._heard
        engines.watch(self)
        engines.when_forgotten(self._telling.post)

    def __repr__(self) -> str:
        return f"<StateWriter of {len(self._engines)} engines>"

    def added(self, engine: Engine) -> None:
        """Take over what workers know of it."""
        if engine.url in self._held:  # behind other watchers, which have to know the engine first
            asyncio.get_running_loop().call_soon(self._added, engine)

    def _added(self, engine: Engine) -> None:
        state = self._held.pop(engine.url, None)
        if state is not None and self._engines.get(engine.url) is engine:
            self._take(engine, state)

    def removed(self, engine: Engine) -> None:
        """Forget an engine. Workers forget it, too."""
        self._at.pop(engine.url, None)
        self._audited.pop(engine.url, None)
        self._telling.post(engine.url)

    # -- telling

    def _changed(self, url: str) -> None:
        self._at[url] = self._now()
        self._telling.post(url)

    def _told(self, urls: Iterable[str]) -> bytes:
        told = Told()
        leaving = {engine.url: engine for engine in self._engines.leaving}
        for url in urls:
            engine = self._engines.get(url) or leaving.get(url)
            if engine is None:
                told.gone.append(url)
            elif engine.in_ledger.probed:
                told.states.append(self._state(engine))
        return encode(told)

    def _state(self, engine: Engine) -> EngineState:
        known, url, audit = engine.in_ledger, engine.url, engine.audit
        return EngineState(
            url,
            self._at.get(url, 0.0),
            known.evidence,
            known.down_because,
            known.down_since,
            known.stalled,
            known.asleep,
            sorted(known.ejected),
            self._ledger.breakers.state(known),
            self._outliers.left_out(url),
            engine.kv_expired,
            audit.account,
            audit.blind,
        )

    # -- hearing

    def _heard(self, client: SchedulerClient, body: bytes) -> None:
        """Take what a worker says."""
        said: Said = decode_said(body)
        for state in said.holds:
            if (engine := self._engines.get(state.url)) is not None:
                self._take(engine, state)
            elif self._is_newer(state, self._held):
                self._held[state.url] = state
                asyncio.get_running_loop().call_later(HELD_FOR, self._held.pop, state.url, None)
        for note in said.notes:
            self._take_note(note)
        if said.notes:
            client.say(self._topic, encode(Told(heard=said.notes[-1].number)))
        for url in said.wanted:
            if (engine := self._engines.get(url)) is not None:
                self._probe(engine)

    @staticmethod
    def _is_newer(state: EngineState, held: dict[str, EngineState]) -> bool:
        return state.url not in held or state.at > held[state.url].at

    def _take(self, engine: Engine, state: EngineState) -> None:
        """Take over what a worker knows of an engine, if that is newer."""
        url = state.url
        if state.account is not None and state.at > self._audited.get(url, -1.0):
            # legs of workers go on, and so must the audit
            self._audited[url] = state.at
            self._following.follow_audit(engine, state)
        if state.at > self._at.get(url, -1.0):
            self._following.follow(engine, state, None)
            self._at[url] = state.at
            if state.left_out is not None:
                self._outliers.follow(url, *state.left_out)
            self._telling.post(url)

    def _take_note(self, note: Note) -> None:
        engine = self._engines.get(note.url)
        if engine is not None and note.stalled is not None:
            self._following.stalled(engine, note.stalled)
        for other in note.ejected:
            self._ledger.eject(note.url, other)
        self._telling.post(note.url)
