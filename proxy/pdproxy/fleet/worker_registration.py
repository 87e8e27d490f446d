"""Registrations with several workers: each has all of them, made from the same messages in the same
order.

An engine's heartbeats come to any worker. It passes them on to all, itself included, and all take
them in one order. Who owns a registration depends on that order alone. That an engine is silent is
such a message, too: the process that leads sends it, with the number of heartbeats behind which it
holds. Otherwise two workers whose timers are a moment apart could believe different senders for as
long as both send. A worker that begins, or that was stopped, asks in the same order; the leader
answers with all that it knew at the question, and what has come behind the question is taken after
that. A process that leads in place of a dead one is answered by all others.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.registration import (
    CheckPeers,
    Owned,
    ReadRegistration,
    RegisteredEngine,
    Registrations,
    cancel,
)
from pdproxy.kit.clock import Clock
from pdproxy.kit.leading import Lead
from pdproxy.kit.siblings import ALL, STALE
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.wire.registrations import Registration, place

ASK_EVERY = 1.0
"""Seconds until a worker asks again that has got no answer, and until what a leader has not told is
looked at again.
"""
WINDOW = 0.1
"""Seconds in which so many heartbeats are passed on:"""
MAX_BEATS = 2
"""For an engine, from one IP address. An engine sends one in three seconds."""
MAX_SENDERS = 1024
"""Engines, and IP addresses at which there are any."""
MAX_KEPT = 16_384
"""Messages that are kept for an answer. With more the worker asks again."""


class _Beat(msgspec.Struct, array_like=True, frozen=True):
    where: str
    registration: Registration
    connection: bytes
    address: str


class _Silent(msgspec.Struct, array_like=True, frozen=True):
    """A sender is silent: the engine's owner, or with `rival` the other process. `after`: how many
    of its heartbeats had come.
    """

    where: str
    rival: bool
    after: int


class _Known(msgspec.Struct, array_like=True, frozen=True):
    """What is known of an engine. `owner`: its last heartbeat, None if it is not registered."""

    where: str
    beats: int
    contests: int
    owner: _Beat | None
    has_rival: bool = False
    stranger: str | None = None


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """A message. `asks`: the name of a question; `answers`: to which one `known` is the answer.

    `leads`: whether the sender of a question does. `begins`: it leads, and nobody has answered it.
    """

    sender: int
    beat: _Beat | None = None
    silent: _Silent | None = None
    asks: bytes = b""
    answers: bytes = b""
    known: list[_Known] = []
    leads: bool = False
    begins: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Told).decode


class WorkerRegistrations(Registrations):
    """The registrations of one pool in worker `number`. `pass_on`: sends a message to one worker,
    or to `ALL` in one order. `succeeds`: whether another process had that number before.

    `failed`: what is called if a heartbeat can't be processed.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        read: ReadRegistration,
        observers: Observers,
        clock: Clock,
        *,
        timeout: float,
        checked: CheckPeers = lambda peers, _: peers,
        number: int,
        lead: Lead,
        succeeds: bool = False,
        pass_on: Callable[[int, bytes], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        self._failed = failed
        self._number = number
        self._lead = lead
        self._succeeds = succeeds
        self._pass_on = pass_on
        self._process = os.urandom(8)
        """Part of the names of this process's connections: elsewhere a stranger's could have the
        same name.
        """
        self._sender = number
        """Who sent the message that is taken now; outside of one, this worker."""
        self._question = b""
        """The name of the question that is not answered."""
        self._kept: list[_Told] | None = None
        """What has come behind that question."""
        self._passed: Counter[tuple[str, str]] = Counter()
        self._window = 0
        self._started = False
        self._looked = -STALE
        super().__init__(engines, ledger, read, observers, clock, timeout=timeout, checked=checked)
        self.complete = False

    def start(self, tasks: TaskOwner) -> None:
        """Ask for what others know, and go on asking, in a task of this owner. Needs a running
        event loop.
        """
        self._started = True
        tasks.keep(self._follow, "registrations of all workers")

    def added(self, engine: Engine) -> None:
        """See `Registrations`."""
        super().added(engine)
        if self._started and not self._lead.leads:
            self._ask()

    # -- sending

    def receive(self, registration: Registration, connection: bytes, address: str) -> None:
        """Pass a heartbeat on to all workers. One that is of no engine concerns only this one."""
        where = place(registration.http_address)
        if where is None or where not in self._entries:
            super().receive(registration, connection, address)
            return
        window = int(self._clock.now() / WINDOW)
        if window != self._window:
            self._window = window
            self._passed.clear()
        sender = where, address
        is_new = sender not in self._passed
        if (is_new and len(self._passed) >= MAX_SENDERS) or self._passed[sender] >= MAX_BEATS:
            self._seen("not_passed")
            return
        self._passed[sender] += 1
        beat = _Beat(where, registration, self._process + connection, address)
        if not self._tell(ALL, _Told(self._number, beat=beat)):
            self._seen("not_passed")

    def _silent(self, entry: RegisteredEngine) -> None:
        """The owner's timer has ended. All workers hear it from the leader, in the order of
        heartbeats.
        """
        if entry.owned is not None:
            entry.owned.timer = self._clock.after(ASK_EVERY, lambda: self._silent(entry))
            self._tell_silent(_Silent(entry.engine.registered_as, rival=False, after=entry.beats))

    def _alone_again(self, entry: RegisteredEngine) -> None:
        """The timer of the other process has ended."""
        if entry.owned is not None:
            entry.owned.rival = self._clock.after(ASK_EVERY, lambda: self._alone_again(entry))
            self._tell_silent(_Silent(entry.engine.registered_as, rival=True, after=entry.contests))

    def _tell_silent(self, silent: _Silent) -> None:
        if self._lead.leads and self.complete:
            self._tell(ALL, _Told(self._number, silent=silent))

    def _tell(self, worker: int, told: _Told) -> bool:
        return self._pass_on(worker, _encode(told))

    # -- what others know

    async def _follow(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(ASK_EVERY)

    def look(self) -> None:
        """Ask what others know, if there is anything to ask. Call it every `ASK_EVERY` seconds."""
        now = self._clock.now()
        # this process begins, or stood still, and may have missed something
        if now - self._looked > STALE:
            self.complete = False
        self._looked = now
        if not self.complete or self._question:
            self._ask()

    def _ask(self) -> None:
        leads = self._lead.leads
        if leads and (self._question or not self._succeeds):  # nobody has answered, or knows more
            kept, self._kept, self._question, self.complete = self._kept or [], None, b"", True
            for one in kept:
                self._heard(one)
            if self._succeeds:  # who knows more than it, and was late, is to know the same
                self._tell(ALL, _Told(self._number, begins=True))
            return
        self._question, self._kept = os.urandom(8), None
        self._tell(ALL, _Told(self._number, asks=self._question, leads=leads))

    def _answer(self, told: _Told) -> None:
        known = []
        for where, entry in self._entries.items():
            owned = entry.owned
            beat = (
                None
                if owned is None
                else _Beat(where, owned.registration, owned.connection, owned.address)
            )
            has_rival = owned is not None and owned.rival is not None
            stranger = None if owned is None else owned.stranger
            known.append(_Known(where, entry.beats, entry.contests, beat, has_rival, stranger))
        self._tell(told.sender, _Told(self._number, answers=told.asks, known=known))

    def _follow_leader(self, known: list[_Known]) -> None:
        for one in known:
            entry = self._entries.get(one.where)
            if entry is None:
                continue
            entry.beats, entry.contests = one.beats, one.contests
            was_owned = entry.owned is not None
            if entry.owned is not None:
                cancel(entry.owned)
                entry.owned = None
            if (beat := one.owner) is not None:
                owned = Owned(
                    beat.registration, beat.connection, beat.address, self._until_silent(entry)
                )
                owned.stranger = one.stranger
                owned.rival = self._until_alone(entry) if one.has_rival else None
                entry.owned = owned
            self._apply(entry, owned=was_owned)

    # -- taking

    def received(self, body: bytes) -> None:
        """Take a message of a worker, perhaps of this one."""
        told = _decode(body)
        if told.begins:
            if not self._lead.leads:
                self.complete = False
                self._ask()
        elif told.asks:
            if told.asks == self._question:
                self._kept = []
            elif self.complete and told.sender != self._number and (self._lead.leads or told.leads):
                self._answer(told)
        elif told.answers:
            if told.answers == self._question:
                kept, self._kept, self._question = self._kept or [], None, b""
                self.complete = True
                self._follow_leader(told.known)
                for one in kept:
                    self._heard(one)
        elif self._kept is None:
            self._heard(told)
        elif len(self._kept) < MAX_KEPT:
            self._kept.append(told)
        else:
            self._ask()

    def _heard(self, told: _Told) -> None:
        self._sender = told.sender
        try:
            self._apply_message(told.beat, told.silent)
        except Exception as error:
            # what comes behind it, perhaps orders of the parent, must not be lost
            self._failed(error)
        finally:
            self._sender = self._number

    def _apply_message(self, beat: _Beat | None, silent: _Silent | None) -> None:
        if beat is not None and (entry := self._entries.get(beat.where)) is not None:
            self._take(entry, beat.registration, beat.connection, beat.address)
        elif (
            silent is not None
            and (entry := self._entries.get(silent.where)) is not None
            and entry.owned is not None
        ):
            if silent.rival and entry.contests == silent.after:
                super()._alone_again(entry)
            elif not silent.rival and entry.beats == silent.after:
                super()._silent(entry)

    def _seen(self, result: str) -> None:
        """Count what this worker has read, or has found to be silent: the others don't."""
        if self._sender == self._number:
            super()._seen(result)
