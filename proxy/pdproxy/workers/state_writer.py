"""The scheduler process's side of engines' states: it tells workers what has changed.

Owns which engines each worker has to be told of. For a worker that does not read, that is a set of
engines and no queue: it is told their last states once it reads again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.stalls import Stalls
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

AGAIN = 0.1
"""Seconds until a worker that does not read is looked at again."""
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
        stalls: Stalls,
        outliers: Outliers,
        observers: Observers,
        now: Callable[[], float],
        probe: Callable[[Engine], None],
    ) -> None:
        self._links = links
        self._topic = topic
        self._engines = engines
        self._ledger = ledger
        self._outliers = outliers
        self._now = now
        self._probe = probe
        self._following = Following(engines, ledger, auditor, stalls, observers, now, self._changed)
        self._at: dict[str, float] = {}
        """When an engine's state has changed last, here or at the process before."""
        self._audited: dict[str, float] = {}
        """Of when the account of an engine's audit is that a worker had."""
        self._held: dict[str, EngineState] = {}
        """What workers know of engines that are not here yet."""
        self._due: dict[str, None] = {}
        self._behind: dict[SchedulerClient, dict[str, None]] = {}
        """Workers that do not read, and the engines that they have to be told of."""
        links.hears[topic] = self._heard
        links.greets.append(self._greet)
        links.leaves.append(self._left)
        engines.watch(self)
        engines.when_forgotten(self._post)

    def __repr__(self) -> str:
        return f"<StateWriter of {len(self._engines)} engines, {len(self._behind)} workers behind>"

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
        self._post(engine.url)

    # -- telling

    def _changed(self, url: str) -> None:
        self._at[url] = self._now()
        self._post(url)

    def _post(self, url: str) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._tell)
        self._due[url] = None

    def _tell(self) -> None:
        urls, self._due = self._due, {}
        body = self._told(urls) if len(urls) <= AT_ONCE else None
        for client in self._links.clients:
            if client in self._behind or client.is_behind or body is None:
                self._tell_later(client, urls)
            else:
                client.say(self._topic, body)

    def _greet(self, client: SchedulerClient) -> None:
        self._tell_later(client, dict.fromkeys(self._engines))

    def _tell_later(self, client: SchedulerClient, urls: Mapping[str, None]) -> None:
        if client in self._behind:
            self._behind[client].update(urls)
        else:
            self._behind[client] = dict(urls)
            self._catch_up(client)

    def _catch_up(self, client: SchedulerClient) -> None:
        """Tell a worker of some of the engines that it has to be told of, if it reads."""
        urls = self._behind.get(client)
        if urls is None:
            return  # it has left
        if not client.is_behind:
            some = [*islice(urls, AT_ONCE)]
            client.say(self._topic, self._told(some))
            for url in some:
                del urls[url]
        if urls:  # in the next turn it shows whether it reads
            pause = AGAIN if client.is_behind else 0.0
            asyncio.get_running_loop().call_later(pause, self._catch_up, client)
        else:
            del self._behind[client]

    def _left(self, client: SchedulerClient) -> None:
        self._behind.pop(client, None)

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
            self._post(url)

    def _take_note(self, note: Note) -> None:
        engine = self._engines.get(note.url)
        if engine is not None and note.stalled is not None:
            self._following.stalled(engine, note.stalled)
        for other in note.ejected:
            self._ledger.eject(note.url, other)
        self._post(note.url)
