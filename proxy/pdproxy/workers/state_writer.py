"""The scheduler process's side of engines' states: it publishes them, and hears what workers have
noted.

Owns when each state has changed last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.outliers import Outliers
from pdproxy.workers.calls import told
from pdproxy.workers.engine_states import TOPIC, EngineState, Following, StatesAtWorker
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_links import SchedulerLinks


class StateWriter:
    """The states of the engines of the pool with number `pool`, a watcher of them. `probe`: has an
    engine probed soon.
    """

    def __init__(
        self,
        links: SchedulerLinks,
        pool: int,
        engines: EngineRegistry,
        ledger: Ledger,
        auditor: Auditor,
        outliers: Outliers,
        observers: Observers,
        now: Callable[[], float],
        probe: Callable[[Engine], None],
    ) -> None:
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
        self._topic = links.publisher.topic(f"{TOPIC} {pool}", self._state, engines.keys)
        self._topic.restore_by(EngineState, self._take)
        links.greets.append(lambda client: StatesOfWorker(self, client, pool))
        engines.watch(self)
        engines.when_forgotten(self._forgotten)

    def __repr__(self) -> str:
        return f"<StateWriter of {len(self._engines)} engines>"

    def added(self, engine: Engine) -> None:
        """Take over what workers know of it."""
        self._topic.found(engine.url)

    def removed(self, engine: Engine) -> None:
        """Forget an engine. Workers are told how it is until its last request is over."""
        self._at.pop(engine.url, None)
        self._audited.pop(engine.url, None)

    def _forgotten(self, url: str) -> None:
        self._at.pop(url, None)  # it was asked until now
        self._topic.gone(url)

    # -- telling

    def _changed(self, url: str) -> None:
        if url in self._engines.known:  # else it is forgotten
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

    def wanted(self, url: str) -> None:
        """See `StatesOfWorker`."""
        if (engine := self._engines.get(url)) is not None:
            self._probe(engine)

    def noted(self, url: str, stalled: str | None, ejected: Sequence[str]) -> None:
        """See `StatesOfWorker.note`."""
        engine = self._engines.get(url)
        if engine is not None and stalled is not None:
            self._following.stalled(engine, stalled)
        for other in ejected:
            self._ledger.eject(url, other)
        self._topic.changed(url)

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


class StatesOfWorker:
    """What one worker calls."""

    def __init__(self, writer: StateWriter, client: SchedulerClient, pool: int) -> None:
        self._writer = writer
        self._client = client
        self._pool = pool
        client.serve(StatesOfWorker, self, pool)

    @told
    def note(self, number: int, url: str, stalled: str | None, ejected: Sequence[str]) -> None:
        """The worker has noted something of an engine by itself. `number`: increasing. `stalled`:
        why the engine stands still, None if it was not that; `ejected`: engines with which it is
        not paired.
        """
        self._writer.noted(url, stalled, ejected)
        self._client.tell(StatesAtWorker.heard, self._pool, number)

    @told
    def wanted(self, url: str) -> None:
        """An engine is to be probed soon."""
        self._writer.wanted(url)
