"""Engines that register: each reports again and again where other engines reach it, and is gone
when its reports stop.

Owns who has registered which engine. Only engines of the registry are used: a heartbeat can't add
one. Nothing on the wire proves who a sender is, so these rules limit what a stranger can do:

- The sender that registers an engine first owns the registration while it sends: each heartbeat
  within `timeout` seconds of the one before. Equal heartbeats count if they come over its
  connection or from its IP address: a lost connection is made again.
- Heartbeats of others with other contents change nothing. From the owner's IP address, they may
  come from the engine's next process: until one of the two falls silent, the engine takes part in
  no KV transfer, because the proxy can't know which is right. From another IP address they are only
  reported.
- So a stranger on another machine can register an engine only while the engine itself does not. Who
  can reach the port before the engines do, or can forge their IP address, can direct prompts' KV to
  itself: the port belongs to a network that nobody else reaches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock, Timer
from pdproxy.observe.description import Label, counter
from pdproxy.observe.events import Event, NodeChanged, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.transfer.peers import Peer
from pdproxy.wire.registrations import Registration, place

logger = logging.getLogger("pdproxy.fleet")

MAX_UNKNOWN = 64
"""Addresses of no engine that are remembered, to name them. Further ones are only counted."""
MAX_NAMED = 4
"""How many of them are named in `/ready`."""
NOT_REGISTERED = "has not registered"
_ROLES = {Role.PREFILL: "P", Role.DECODE: "D"}


ReadRegistration = Callable[[Registration], tuple[Peer, ...] | str]
"""How a contract reads a registration: it returns the engine's ranks, or why the registration can't
be used, as what follows an engine's name.
"""
CheckPeers = Callable[[tuple[Peer, ...] | str, str], tuple[Peer, ...] | str]
REGISTRATION_RESULTS = (
    ("known", "it registers an engine of the pool, or keeps it registered"),
    ("unknown", "its address is no engine's of the pool"),
    ("contested", "it contradicts the heartbeats of another sender, and is ignored"),
    ("unreadable", "it is no heartbeat"),
    ("expired", "no heartbeat: an engine sent none in registration.timeout"),
)
REGISTRATIONS = counter(
    "pdproxy_registrations_total",
    "heartbeats",
    "Heartbeats by which engines register, by what pdproxy did with them",
    Label("result", REGISTRATION_RESULTS),
)


class Registered(msgspec.Struct, array_like=True):
    """What is known of an engine that registers.

    `found`: its ranks, or why it takes part in no KV transfer, as what follows its name. `at`: when
    this became known, in monotonic seconds. `registration`: its last one, None if it is not
    registered; `address`: the sender's IP address; `has_rival`: whether another process there
    registers it, too.
    """

    url: str
    found: tuple[Peer, ...] | str
    at: float
    registration: Registration | None = None
    address: str = ""
    has_rival: bool = False


@dataclass(slots=True)
class _Owned:
    """One engine's registration, and who sends it."""

    registration: Registration
    connection: bytes
    address: str
    timer: Timer
    rival: Timer | None = None
    """Set while another process on the owner's machine registers the engine, too."""
    stranger: str | None = None
    """The last other IP address that registered the engine with other contents."""


@dataclass(slots=True)
class _Unknown:
    role: str
    address: str
    timer: Timer


@dataclass(slots=True)
class _Entry:
    """One engine of the registry. `known`: what was found last; its `at` is 0 until anything was
    heard of the engine.
    """

    engine: Engine
    known: Registered
    owned: _Owned | None = None


class KnownRegistrations(Protocol):
    """What is known of registrations: an observer."""

    only: tuple[type[Event], ...]

    @property
    def complete(self) -> bool:
        """Whether all is known that there is to know."""

    @property
    def count(self) -> int:
        """How many engines are registered and can be used."""

    def shortcomings(self) -> Sequence[str]:
        """Return what is wrong with registrations, a sentence each."""

    def notify(self, event: Event) -> None:
        """An engine that restarted has a new run, whose peers come from its registration."""


class Registrations:
    """The registrations of one pool's engines.

    `read`: how the contract reads one. `checked` returns the ranks of an engine, or why they may
    not be used. `timeout`: seconds without a heartbeat after which an engine is gone.
    """

    only: tuple[type[Event], ...] = (NodeChanged,)
    complete = True
    """See `KnownRegistrations`."""

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
    ) -> None:
        self._checked = checked
        self._ledger = ledger
        self._read = read
        self._observers = observers
        self._clock = clock
        self._timeout = timeout
        self._entries: dict[str, _Entry] = {}
        """By the address that an engine registers, `host:port`."""
        self.changed: Callable[[Registered], None] = lambda _: None
        """Called when something else is known of an engine."""
        self._unknown: dict[str, _Unknown] = {}
        engines.watch(self)

    def __repr__(self) -> str:
        return f"<Registrations {self.count} of {len(self._entries)}>"

    @property
    def count(self) -> int:
        """How many engines are registered and can be used."""
        return sum(not isinstance(one.found, str) for one in self.known())

    def known(self) -> list[Registered]:
        """Return what is known of all engines that are expected to register."""
        return [entry.known for entry in self._entries.values()]

    def of(self, engine: Engine) -> Registered | None:
        """Return what is known of an engine, None if it is not expected to register."""
        entry = self._entries.get(engine.registered_as)
        return entry.known if entry is not None and entry.engine is engine else None

    def restore(self, known: Registered) -> None:
        """Go on from what was known before. What was heard since, or is newer, counts more."""
        entry = next((one for one in self._entries.values() if one.engine.url == known.url), None)
        if entry is None or known.at <= entry.known.at:
            return
        if entry.owned is not None:
            _cancel(entry.owned)
            entry.owned = None
        if known.registration is not None:
            entry.owned = _Owned(known.registration, b"", known.address, self._until_silent(entry))
            entry.owned.rival = self._until_alone(entry) if known.has_rival else None
        self._apply(entry, at=known.at)

    # -- engines

    def added(self, engine: Engine) -> None:
        """Expect one more engine. Aggregated engines take part in no KV transfer: they need not
        register.
        """
        if registers(engine):
            known = Registered(engine.url, NOT_REGISTERED, 0.0)
            entry = self._entries[engine.registered_as] = _Entry(engine, known)
            self._apply(entry)

    def removed(self, engine: Engine) -> None:
        """Forget an engine."""
        entry = self._entries.pop(engine.registered_as, None)
        if entry is not None and entry.owned is not None:
            _cancel(entry.owned)

    def notify(self, event: Event) -> None:
        """An engine that restarted has a new run, whose peers come from its registration."""
        if isinstance(event, NodeChanged) and event.up:
            for entry in self._entries.values():
                if entry.engine.url == event.node:
                    self._apply(entry)

    # -- heartbeats

    def receive(self, registration: Registration, connection: bytes, address: str) -> None:
        """Take a heartbeat. `connection`: which connection it came over; `address`: the sender's IP
        address.
        """
        where = place(registration.http_address)
        entry = self._entries.get(where) if where is not None else None
        if entry is None:
            self._seen("unknown")
            self._remember(where or registration.http_address, registration, address)
        else:
            self._take(entry, registration, connection, address)

    def _take(
        self, entry: _Entry, registration: Registration, connection: bytes, address: str
    ) -> None:
        """Take a heartbeat for an engine of the registry."""
        owned = entry.owned
        if owned is None:
            entry.owned = _Owned(registration, connection, address, self._until_silent(entry))
        elif registration == owned.registration and (
            connection == owned.connection or address == owned.address
        ):
            owned.connection, owned.address = connection, address
            owned.timer.cancel()
            owned.timer = self._until_silent(entry)
        else:
            self._contest(entry, owned, address)
            return
        self._seen("known")
        self._apply(entry, at=self._clock.now())

    def unreadable(self) -> None:
        """Count a message that is no heartbeat."""
        self._seen("unreadable")

    def _seen(self, result: str) -> None:
        self._observers.count(REGISTRATIONS, result)

    def _contest(self, entry: _Entry, owned: _Owned, address: str) -> None:
        """Take note of a heartbeat that contradicts the engine's registration."""
        self._seen("contested")
        if address != owned.address:
            owned.stranger = address
            return
        if owned.rival is not None:
            owned.rival.cancel()
        owned.rival = self._until_alone(entry)
        self._apply(entry, at=self._clock.now())

    def _until_silent(self, entry: _Entry) -> Timer:
        return self._clock.after(self._timeout, lambda: self._silent(entry))

    def _until_alone(self, entry: _Entry) -> Timer:
        return self._clock.after(self._timeout, lambda: self._alone_again(entry))

    def _alone_again(self, entry: _Entry) -> None:
        """The other process on the owner's machine is silent."""
        if entry.owned is not None and entry.owned.rival is not None:
            entry.owned.rival.cancel()
            entry.owned.rival = None
            self._apply(entry, at=self._clock.now())

    def _silent(self, entry: _Entry) -> None:
        """The engine's heartbeats have stopped: any sender may register it now."""
        if entry.owned is not None:
            _cancel(entry.owned)
        entry.owned = None
        self._seen("expired")
        self._apply(entry, at=self._clock.now())

    def _apply(self, entry: _Entry, *, at: float | None = None) -> None:
        """Write to the engine's run and to the ledger what is known now. `at`: since when; None: as
        before.
        """
        engine, owned, former = entry.engine, entry.owned, entry.known
        known = Registered(engine.url, self._judge(entry), former.at if at is None else at)
        if owned is not None:
            known.registration, known.address = owned.registration, owned.address
            known.has_rival = owned.rival is not None
        is_same = msgspec.structs.replace(known, at=former.at) == former
        entry.known = known
        changed = write_known(engine, self._ledger, known.found)
        if changed and not isinstance(known.found, str):
            logger.info("%s takes part in KV transfer: it has registered", engine.url)
        elif changed and (owned is not None or former.registration is not None):
            logger.warning("%s takes part in no KV transfer: it %s", engine.url, known.found)
        if not is_same:
            self.changed(known)

    def _judge(self, entry: _Entry) -> tuple[Peer, ...] | str:
        owned, expected = entry.owned, _ROLES[entry.engine.in_ledger.role]
        if owned is None:
            return NOT_REGISTERED
        if owned.registration.role != expected:
            role = entry.engine.in_ledger.role.value
            return (
                f'registers as "{owned.registration.role}", but is configured as {role}: that '
                f'needs "{expected}"'
            )
        if owned.rival is not None:
            return (
                "is registered by two processes with different contents: it is used once one of "
                "them is silent"
            )
        return self._checked(self._read(owned.registration), entry.engine.url)

    # -- what an operator asks

    def _remember(self, where: str, registration: Registration, address: str) -> None:
        known = self._unknown.get(where)
        if known is None and len(self._unknown) >= MAX_UNKNOWN:
            return
        if known is not None:
            known.timer.cancel()
        timer = self._clock.after(self._timeout, lambda: self._forget_unknown(where))
        self._unknown[where] = _Unknown(registration.role, address, timer)

    def _forget_unknown(self, where: str) -> None:
        self._unknown.pop(where, None)

    def shortcomings(self) -> list[str]:
        """Return what is wrong with registrations, a sentence each."""
        found = [
            f"{entry.engine.in_ledger.role.value} {entry.engine.url} {entry.known.found}"
            + (f" (expected from {where})" if entry.known.found == NOT_REGISTERED else "")
            for where, entry in self._entries.items()
            if isinstance(entry.known.found, str)
        ]
        found += [
            f"{entry.engine.url}: a sender at {entry.owned.stranger} registers it, too, and is "
            f"ignored"
            for entry in self._entries.values()
            if entry.owned is not None and entry.owned.stranger is not None
        ]
        for where, unknown in list(self._unknown.items())[:MAX_NAMED]:
            found.append(
                f'{where} registers as "{unknown.role}" from '
                f"{unknown.address or 'an unknown address'}, but no engine of the "
                "pool is expected from there: is nodes[].facts.registered_as missing?"
            )
        if len(self._unknown) > MAX_NAMED:
            found.append(
                f"{len(self._unknown) - MAX_NAMED} or more other addresses register that are no "
                f"engine's"
            )
        return found


def registers(engine: Engine) -> bool:
    """Return whether an engine is expected to register."""
    return engine.in_ledger.role in _ROLES


def write_known(engine: Engine, ledger: Ledger, found: tuple[Peer, ...] | str) -> bool:
    """Write to an engine's run and to the ledger what is known of it: see `Registered.found`.
    Return whether that changes in which transfers the engine takes part.
    """
    peers = engine.run.peers
    if isinstance(found, str):
        peers.forget()
        return ledger.mark_kv(engine.url, found)
    if found[0].ranks != peers.ranks:
        peers.forget()
        peers.ranks = found[0].ranks
    for peer in found:
        peers.learn(peer)
    return ledger.mark_kv(engine.url, None, found[0].mode, found[0].tp_size)


def _cancel(owned: _Owned) -> None:
    """Cancel the timers of a registration."""
    owned.timer.cancel()
    if owned.rival is not None:
        owned.rival.cancel()


def of_url(url: str, registered_as: str | None) -> str:
    """Return the address from which an engine is expected: as configured, else the place of its
    URL.
    """
    return place(registered_as or url) or url
