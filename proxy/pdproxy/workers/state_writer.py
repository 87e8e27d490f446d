"""The scheduler process's side of engines' states: it publishes them, and hears what workers have
noted.

Owns when each state has changed last.
"""

from __future__ import annotations

from collections.abc import Callable

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
    decode_said,
    encode,
)
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_links import SchedulerLinks


class StateWriter:
    """The states of one pool's engines, a watcher of them. `topic`: theirs; `probe`: has an engine
    probed soon.
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
        self._name = topic
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
        self._topic = links.publisher.topic(topic, self._state, engines.keys)
        self._topic.restore_by(EngineState, self._take)
        links.hears[topic] = self._heard
        engines.watch(self)
        engines.when_forgotten(self._topic.gone)

    def __repr__(self) -> str:
        return f"<StateWriter of {len(self._engines)} engines>"

    def added(self, engine: Engine) -> None:
        """Take over what workers know of it."""
        self._topic.found(engine.url)

    def removed(self, engine: Engine) -> None:
        """Forget an engine. Workers are told how it is until its last request is over."""
        self._at.pop(engine.url, None)
        self._audited.pop(engine.url, None)

    # -- telling

    def _changed(self, url: str) -> None:
        self._at[url] = self._now()
        self._topic.changed(url)

    def _state(self, url: str) -> EngineState | None:
        """Return what is known of an engine, None before it was probed."""
        leaving = (one for one in self._engines.leaving if one.url == url)
        engine = self._engines.get(url) or next(leaving, None)
        if engine is None or not engine.in_ledger.probed:
            return None
        known, audit = engine.in_ledger, engine.audit
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
        for note in said.notes:
            self._take_note(note)
        if said.notes:
            client.say(self._name, encode(said.notes[-1].number))
        for url in said.wanted:
            if (engine := self._engines.get(url)) is not None:
                self._probe(engine)

    def _take(self, url: str, state: EngineState) -> None:
        """Take over what a worker knows of an engine, if that is newer."""
        engine = self._engines[url]
        if state.account is not None and state.at > self._audited.get(url, -1.0):
            # legs of workers go on, and so must the audit
            self._audited[url] = state.at
            self._following.follow_audit(engine, state)
        if state.at > self._at.get(url, -1.0):
            self._following.follow(engine, state, None)
            self._at[url] = state.at
            if state.left_out is not None:
                self._outliers.follow(url, *state.left_out)
            self._topic.changed(url)

    def _take_note(self, note: Note) -> None:
        engine = self._engines.get(note.url)
        if engine is not None and note.stalled is not None:
            self._following.stalled(engine, note.stalled)
        for other in note.ejected:
            self._ledger.eject(note.url, other)
        self._topic.changed(note.url)
