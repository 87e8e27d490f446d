"""A worker's part of the changes that operators ask for: it makes those of all, in the parent's
order, and asks for its own.

Owns which changes this worker has made, and how one that is not in force is undone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.membership import ADMIN
from pdproxy.kit.errors import PdproxyError
from pdproxy.kit.frames import frames
from pdproxy.observe.events import Event, MemberChanged
from pdproxy.web.admin.changes import (
    Change,
    ChangeOutcome,
    decode_change,
    decode_outcome,
    encode_change,
    encode_outcome,
    refused,
)
from pdproxy.web.admin.service import AdminService
from pdproxy.web.admin.shapes import EngineChanged
from pdproxy.workers.changes import (
    CHANGE,
    CHANGED,
    GONE,
    LOST,
    MAKE,
    OUTCOME,
    UNDO,
    WAITED,
    decode_numbers,
)
from pdproxy.workers.journal import ChangeJournal, Past
from pdproxy.workers.links import Message

logger = logging.getLogger("pdproxy.admin")

PATIENCE = 5.0
"""Seconds for all workers to make a change. One that has not answered then makes it later, or its
successor does.
"""
MAX_UNDO = 1024
"""Changes that could still be undone: those that have not been answered by all, and some more."""
KINDS = (MAKE, UNDO, WAITED, OUTCOME, LOST)


@dataclass(slots=True)
class AskedChange:
    """A change that this worker has asked for: what came of it, by the workers' numbers, and who
    has not answered.
    """

    outcomes: dict[int, ChangeOutcome] = field(default_factory=dict)
    waited: set[int] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def silent(self) -> list[int]:
        """The workers that have neither answered nor ended."""
        return sorted(self.waited or ())


class FollowedChanges:
    """`send` sends the parent a message. `journal`: the changes until this process began. An
    observer.

    Those that come before `start` wait for it.
    """

    def __init__(self, send: Callable[[Message], None], journal: ChangeJournal) -> None:
        self._send = send
        self._past = journal.past()
        self._early: list[Message] = []
        self._service: AdminService | None = None
        self._registries: list[EngineRegistry] = []
        self._made = self._past.last
        """The number of the last change that was made here."""
        self._undo: dict[int, Change] = {}
        """How to undo what the changes with these numbers have done here."""
        self._left_out: dict[str, str] = {}
        """Why engines of the journal are missing here, by their URLs."""
        self._asked: dict[int, AskedChange] = {}
        self._last = 0

    def __repr__(self) -> str:
        return f"<FollowedChanges up to {self._made}>"

    def shortcomings(self) -> list[str]:
        """Return which engines are missing here, a sentence each."""
        return [
            f"{url}, which the admin API has added, can't be used: {why}"
            for url, why in self._left_out.items()
        ]

    def start(self, service: AdminService, registries: list[EngineRegistry], level: str) -> None:
        """Make the changes that this worker has to make so far, and all others from now on.

        `registries`: those of all pools. `level`: the log level of the settings.
        """
        self._service = service
        self._make_past(service, level)
        for registry in registries:
            registry.watch(self)
        self._registries = registries
        early, self._early = self._early, []
        for message in early:
            self.received(message)

    def received(self, message: Message) -> None:
        """Process a message of the parent, of one of `KINDS`."""
        if message.kind in (MAKE, UNDO) and self._service is None:
            self._early.append(message)
        elif message.kind == MAKE:
            change = decode_change(message.body)
            outcome = self._make(message.number, change)
            self._send(Message(CHANGED, message.number, body=encode_outcome(outcome)))
        elif message.kind == UNDO:
            if (undo := self._undo.pop(message.number, None)) is not None:
                self._do(undo)
        elif (asked := self._asked.get(message.number)) is not None:  # else it came too late
            self._answered(asked, message)

    @staticmethod
    def _answered(asked: AskedChange, message: Message) -> None:
        if message.kind == WAITED:
            asked.waited = set(decode_numbers(message.body))
            return
        assert asked.waited is not None  # links keep the order of messages
        if message.kind == OUTCOME:
            asked.outcomes[message.worker] = decode_outcome(message.body)
        asked.waited.discard(message.worker)
        if not asked.waited:
            asked.done.set()

    async def ask(self, change: Change) -> AskedChange:
        """Have all workers make a change. Return what came of it within `PATIENCE`."""
        self._last += 1
        number = self._last
        asked = self._asked[number] = AskedChange()
        self._send(Message(CHANGE, number, body=encode_change(change)))
        try:
            async with asyncio.timeout(PATIENCE):
                await asked.done.wait()
        except TimeoutError:
            pass
        finally:
            del self._asked[number]
        return asked

    # -- making changes

    def _make_past(self, service: AdminService, level: str) -> None:
        engines, others, undecided, _ = self._past
        self._past = Past([], [], [], 0)
        while engines:  # one may name another as a source that comes later
            found = [(change, self._do(change)) for change in engines]
            missing = [change for change, outcome in found if not outcome.accepted]
            if len(missing) == len(engines):
                self._left_out = {change.engine: outcome.message for change, outcome in found}
                logger.error("%s", "; ".join(self.shortcomings()))
                break
            engines = missing
        for change in others:
            # else the settings were changed behind it
            if change.kind != "log_level" or change.instead_of == level:
                self._do(change)
        for number, change in undecided:
            self._make(number, change)

    def _make(self, number: int, change: Change) -> ChangeOutcome:
        assert self._service is not None
        had = change.kind == "add" and change.engine in self._service.added()
        outcome = self._do(change)
        self._made = number
        if outcome.accepted:
            self._left_out.pop(outcome.url, None)
            self._undo = {
                key: undo for key, undo in self._undo.items() if undo.engine != outcome.url
            }
            if change.kind == "add" and not had:
                self._undo[number] = Change(
                    "remove", outcome.url, at_once=outcome.result == "added"
                )
                if len(self._undo) > MAX_UNDO:
                    del self._undo[next(iter(self._undo))]
        return outcome

    def _do(self, change: Change) -> ChangeOutcome:
        assert self._service is not None
        url = self._service.named(change).engine
        try:
            status, answer = self._service.do(change)
        except PdproxyError as error:
            return refused(error, url)
        except Exception as error:  # the others may have made it
            logger.error("a change failed in pdproxy itself: %s", frames(error))  # noqa: TRY400
            return refused(PdproxyError(type(error).__name__), url)
        if not isinstance(answer, EngineChanged):
            return ChangeOutcome(status, level=answer)
        return ChangeOutcome(status, url, changed=answer)

    # -- what happens to engines

    only = (MemberChanged,)

    def notify(self, event: Event) -> None:
        """Tell the parent that another source has an engine serve again: the drain that operators
        asked for is over.

        It was about to be removed, and came back into the settings or a source.
        """
        if (
            not isinstance(event, MemberChanged)
            or event.change not in ("undrained", "replaced")
            or event.by == ADMIN
        ):
            return
        if self._service is not None and not self._service.is_drained(event.node):
            self._send(Message(GONE, self._made, body=event.node.encode()))

    def added(self, engine: Engine) -> None:
        """Nothing is to be done."""

    def removed(self, engine: Engine) -> None:
        """Tell the parent that an engine has left: what was done to it does not hold for a later
        one of its name.
        """
        if not any(registry.replaced == engine.url for registry in self._registries):
            self._undo = {
                key: undo for key, undo in self._undo.items() if undo.engine != engine.url
            }
            self._send(Message(GONE, self._made, body=engine.url.encode()))
