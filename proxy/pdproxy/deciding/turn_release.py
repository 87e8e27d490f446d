"""Releasing KV of finished turns that no prefill engine will pull: a decode engine would hold it
until its own time is over.

A prefill engine is asked for a completion that it refuses. It then reports to the decode engine
that nobody will read the KV, as a decode engine does for KV of a prefill engine
(`serving.kv.release`). If that fails, the decode engine frees it after its time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from pdproxy.fleet.contacts import FIRST_CONTACT, Contacts
from pdproxy.fleet.engine import Engine
from pdproxy.kit.errors import (
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    OverloadedError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.ids import mint
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import Label, counter
from pdproxy.observe.events import DeadlinePassed, Observers, TurnReleased
from pdproxy.scheduling.engine_states import EngineStates
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.kept_turn import TurnRecord
from pdproxy.transfer.turns import DecodeHandle, TurnRules
from pdproxy.wire.route import Route

AT_ONCE = 8
"""Releases that run at the same time."""
LEAST_WAITING = 1024
"""Releases that may wait at least, or as many as turns may be kept: an orderly stop releases all.
One more is left to the decode engine's own time.
"""
_REFUSED = 400
"""The status of a refusal by the handler that releases KV; 401 and 404 come from before it."""
TURN_RELEASES = counter(
    "pdproxy_turn_releases_total",
    "turns",
    "Releases of such KV that is not used",
    Label(
        "result",
        (
            ("released", "the decode engine has a report that nobody reads the KV"),
            ("left", "it has none: it frees the KV later"),
        ),
    ),
    of=TurnReleased,
)


class TurnReleases:
    """All releases of one pool."""

    def __init__(
        self,
        rules: TurnRules,
        states: EngineStates,
        engines: Mapping[str, Engine],
        deadlines: Deadlines,
        observers: Observers,
        now: Callable[[], float],
        max_kept: int = 0,
    ) -> None:
        self._rules = rules
        self._most = max(LEAST_WAITING, max_kept)
        self._states = states
        self._engines = engines
        self._deadlines = deadlines
        self._observers = observers
        self._now = now
        self._tasks = TaskOwner("turns")
        self._waiting: deque[tuple[TurnRecord, DecodeHandle]] = deque()
        self._running = 0
        self.contacts = Contacts(engines)
        """Pairs of which the prefill engine has pulled from the decode engine. Before that, its
        report may not come at once.
        """

    def __repr__(self) -> str:
        return f"<TurnReleases {self._running} running, {len(self._waiting)} waiting>"

    @property
    def named(self) -> set[str]:
        """The URLs of engines whose blocks are to be released."""
        return {record.decode for record, _ in self._waiting}

    @property
    def pending(self) -> int:
        """How many have not ended."""
        return self._running + len(self._waiting)

    def release(self, record: TurnRecord, handle: DecodeHandle) -> None:
        """Release a turn's blocks in the background."""
        if len(self._waiting) >= self._most:
            self._observers.notify(TurnReleased("left"))
            return
        self._waiting.append((record, handle))
        if self._running < AT_ONCE:
            self._running += 1
            self._tasks.spawn(self._run(), "release")

    async def settle(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for all of them. Return how many were given up."""
        await self._tasks.settle(timeout)
        left = self.pending
        self._waiting.clear()
        return left

    async def _run(self) -> None:
        try:
            while self._waiting:
                record, handle = self._waiting.popleft()
                released = False
                try:
                    released = await self._released(record, handle)
                finally:
                    self._observers.notify(TurnReleased("released" if released else "left"))
        finally:
            self._running -= 1

    async def _released(self, record: TurnRecord, handle: DecodeHandle) -> bool:
        engine = self._engines.get(record.decode)
        if engine is None or engine.in_ledger.run_number != record.decode_run:
            return True  # the run that held the blocks is over
        readers = self._states.releasing.readers_of(engine.in_ledger, record.model, self._now())
        if not readers:
            return False
        decode = record.decode_run
        reader = next(
            (one for one in readers if self.contacts.met(one.run_number, decode)), readers[0]
        )
        run = reader.run_number
        body = self._rules.release_body(record.model, handle)
        if await self._ask(reader.url, record, body) != _REFUSED:
            return False
        if not self.contacts.met(run, decode):
            # The report waits for a step after the handshake, and an idle engine has none: a second
            # request causes one.
            await asyncio.sleep(FIRST_CONTACT)
            if await self._ask(reader.url, record, body) == _REFUSED:
                self.contacts.add(run, decode)
        return True

    async def _ask(self, url: str, record: TurnRecord, body: bytes) -> int:
        """Return the status of the answer, 0 for none."""
        if (engine := self._engines.get(url)) is None:
            return 0
        headers = ((b"x-request-id", b"release-" + mint().encode()), *record.authorization)
        client = engine.client
        try:
            answer = await client.whole(
                client.request(Route.COMPLETIONS.path, headers, body),
                self._deadlines.release,
                Wait.RELEASE,
            )
        except (EngineError, OverloadedError) as error:
            if (
                isinstance(error, EngineTimeoutError | EngineUnreachableError)
                and error.wait is not None
            ):
                self._observers.notify(DeadlinePassed(error.wait.value, url))
            drop_traceback(error)  # its frames refer to the request, which refers to it
            return 0
        return answer.status
