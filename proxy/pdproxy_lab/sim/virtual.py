"""Engines in virtual time: the same cores, their steps and transfers in one heap of events, no
sockets and no waiting.

Owns the clock. A run takes only its computing time, and equal inputs give equal runs.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pdproxy_lab.sim import virtual_link
from pdproxy_lab.sim.active import Step
from pdproxy_lab.sim.connector import PeerCommand, ProxyNotice
from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.cpu import CpuConnector, FindReceiver, Received, SendPart
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.lmcache_pd import (
    Cancel,
    LMCachePD,
    Offer,
    ReceiverHandshake,
    ReceivingRank,
    Write,
)
from pdproxy_lab.sim.memory import Page
from pdproxy_lab.sim.mooncake import LONGER_THAN_PREFILL, Mooncake, Receive
from pdproxy_lab.sim.nixl import Greeting, Handshake, PeerNotice, Pull, SideChannelPeer
from pdproxy_lab.sim.nixl_link import pusher, take_push
from pdproxy_lab.sim.nixl_push import Push, Register
from pdproxy_lab.sim.receiving_line import ReceivingLine
from pdproxy_lab.sim.request import EngineDeadError, EngineOutput, EngineRequest
from pdproxy_lab.sim.stats import Stats
from pdproxy_lab.sim.storage import MemoryStorage

Listener = Callable[[EngineOutput, float], None]
"""Gets an output and the time at which it appeared."""


@dataclass(slots=True)
class VirtualEngine:
    """One engine and the listeners of its requests."""

    facts: SimFacts
    stats: Stats
    core: Core
    line: ReceivingLine
    dead: bool = False
    step: Step | None = None
    listeners: dict[str, Listener] = field(default_factory=dict)
    notices: list[tuple[float, ProxyNotice]] = field(default_factory=list)
    """What it sent to the proxy, and when."""


class VirtualCluster:
    """Engines that reach each other by host and port, in virtual time (seconds from 0)."""

    def __init__(self, *, chance: int = 0) -> None:
        self.now = 0.0
        self.engines: list[VirtualEngine] = []
        self._chance = random.Random(chance)
        self._storage = MemoryStorage()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def add(self, facts: SimFacts) -> VirtualEngine:
        """Add an engine; its side channel's port is its number."""
        stats = Stats()
        name = f"engine-{len(self.engines)}"
        chance = random.Random(self._chance.getrandbits(64))
        core = Core(facts, name, len(self.engines) + 1, chance, stats, self._storage)
        virtual_link.addressed(core, len(self.engines) + 1)
        engine = VirtualEngine(facts, stats, core, ReceivingLine(facts.hardware))
        self.engines.append(engine)
        return engine

    def at(self, time: float, what: Callable[[], None]) -> None:
        """Call something at a time; calls for equal times run in the order of `at`."""
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), self._count, what))

    def submit(self, engine: VirtualEngine, request: EngineRequest, listener: Listener) -> None:
        """Start a request now.

        Raises:
            EngineDeadError: the engine's core has died.
        """
        if engine.dead:
            raise EngineDeadError
        engine.listeners[request.id] = listener
        engine.core.add(request, self.now)
        self._turn(engine)

    def abort(self, engine: VirtualEngine, request_id: str) -> None:
        """End a request now."""
        engine.listeners.pop(request_id, None)
        self._guarded(engine, lambda: engine.core.abort(request_id, self.now))
        self._turn(engine)

    def run(self, until: float = float("inf"), max_events: int = 50_000_000) -> None:
        """Run until no events are left, or until a time.

        Raises:
            RuntimeError: more events than `max_events`: an endless loop.
        """
        for _ in range(max_events):
            if not self._events or self._events[0][0] > until:
                self.now = max(self.now, until) if until != float("inf") else self.now
                return
            self.now, _, what = heapq.heappop(self._events)
            what()
        raise RuntimeError(f"more than {max_events} events")

    def _turn(self, engine: VirtualEngine) -> None:
        """Begin a step if none is running; carry out the engine's commands, and plan when it must
        be woken.
        """
        if engine.dead:
            return
        if engine.step is None:
            self._guarded(engine, lambda: self._begin(engine))
        while engine.core.commands:
            self._carry_out(engine, engine.core.commands.popleft())
        timer = engine.core.next_timer()
        if timer is not None and engine.step is None:
            self.at(max(timer, self.now), lambda: self._woken(engine, timer))

    def _begin(self, engine: VirtualEngine) -> None:
        step = engine.step = engine.core.begin(self.now)
        if step is not None:
            self.at(self.now + step.seconds, lambda: self._finished(engine))

    def _woken(self, engine: VirtualEngine, timer: float) -> None:
        if engine.core.next_timer() == timer and engine.step is None:
            self._turn(engine)

    def _finished(self, engine: VirtualEngine) -> None:
        step, engine.step = engine.step, None
        if engine.dead or step is None:
            return
        outputs: list[EngineOutput] = []
        self._guarded(engine, lambda: outputs.extend(engine.core.finish(step, self.now)))
        for output in outputs:
            listener = engine.listeners.get(output.request_id)
            if output.finish_reason is not None:
                engine.listeners.pop(output.request_id, None)
            if listener is not None:
                listener(output, self.now)
        self._turn(engine)

    def _guarded(self, engine: VirtualEngine, what: Callable[[], None]) -> None:
        try:
            what()
        except EngineDeadError:
            engine.dead = True
            listeners, engine.listeners = engine.listeners, {}
            for request_id, listener in listeners.items():
                listener(EngineOutput(request_id=request_id, finish_reason="error"), self.now)

    def _carry_out(self, engine: VirtualEngine, command: Any) -> None:
        match command:
            case ProxyNotice():
                engine.notices.append((self.now, command))
            case ReceiverHandshake() | Offer() | Write() | Cancel():
                self._push_chunks(engine, command)
            case Register() | Push():
                self._push(engine, command)
            case FindReceiver() | SendPart() | Received():
                self._push_part(engine, command)
            case Receive():
                self._receive(engine, command)
            case PeerCommand():
                virtual_link.perform(engine, command, self.engines, self._in, self._turn)
            case _:
                self._move(engine, command)

    def _in(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def _move(self, engine: VirtualEngine, command: Handshake | Pull | PeerNotice) -> None:
        peer = self._listening(command.peer)
        match command:
            case Handshake():
                sizes = command.tp_size, command.pp_size
                found = peer.core.nixl.greet(peer.core.agent, *sizes) if peer is not None else None
                wait = 0.0 if found is not None else engine.facts.handshake_timeout
                self.at(self.now + wait, lambda: self._handshaken(engine, command.peer, found))
            case Pull() if engine.core.nixl.declines(command, self.now):
                engine.core.never_received(command.request_id, self.now)
                self._turn(engine)
            case Pull():
                taken = engine.line.add(self.now, command.tokens)
                self.at(self.now + taken, lambda: self._pulled(engine, command))
            case PeerNotice():
                if peer is None or peer.core.engine_id != command.peer.engine_id:
                    engine.stats.failed_notifications += command.kind == "release"
                else:
                    peer.core.nixl.notified(command.kind, command.request_ids, self.now)
                    self.at(self.now, lambda: self._turn(peer))

    def _handshaken(
        self, engine: VirtualEngine, peer: SideChannelPeer, found: Greeting | None
    ) -> None:
        engine.core.handshaken(peer, found, self.now)
        self._turn(engine)

    def _pulled(self, engine: VirtualEngine, pull: Pull) -> None:
        if engine.dead:
            return
        peer = self._listening(pull.peer)
        if peer is None or peer.core.engine_id != pull.peer.engine_id:
            engine.core.load_failed(pull.request_id, self.now)
        else:
            engine.core.loaded(pull, [peer.core.pool.pages[block] for block in pull.blocks])
        self._turn(engine)

    def _listening(self, peer: SideChannelPeer) -> VirtualEngine | None:
        engines: Iterable[VirtualEngine] = (
            self.engines[peer.port - 1 : peer.port] if peer.port > 0 else ()
        )
        return next((engine for engine in engines if not engine.dead), None)

    # -- Mooncake: `bootstrap` of a request is the number of an engine, which is up as long as the
    # cluster

    def _receive(self, engine: VirtualEngine, command: Receive) -> None:
        mine = _mooncake(engine)
        if command.engine_id not in mine.workers and command.bootstrap.isdigit():
            found = self._listening(SideChannelPeer("", int(command.bootstrap), ""))
            mine.bootstrapped({} if found is None else {found.core.engine_id: command.bootstrap})
        address = mine.workers.get(command.engine_id)
        if address is None:
            self.at(self.now, lambda: self._sent(engine, command, None))
            return
        peer = self._listening(SideChannelPeer("", int(address), ""))
        if peer is None or peer.core.engine_id != command.engine_id:  # ZMQ does not report it
            wait = engine.facts.mooncake.abort_request_timeout + LONGER_THAN_PREFILL
            self.at(self.now + wait, lambda: self._sent(engine, command, None))
            return

        def given(pages: tuple[Page, ...] | None) -> None:
            taken = peer.facts.hardware.transfer_s(command.tokens) if pages else 0.0
            self.at(self.now + taken, lambda: self._given(engine, peer, command, pages))

        _mooncake(peer).asked(command.transfer_id, command.blocks, self.now, given)
        self.at(self.now, lambda: self._turn(peer))

    def _given(
        self,
        engine: VirtualEngine,
        peer: VirtualEngine,
        command: Receive,
        pages: tuple[Page, ...] | None,
    ) -> None:
        if pages is not None and not peer.dead:
            _mooncake(peer).sent(command.transfer_id, self.now, whole=not (engine.dead and pages))
            self._turn(peer)
        self._sent(engine, command, pages)

    def _sent(
        self, engine: VirtualEngine, command: Receive, pages: tuple[Page, ...] | None
    ) -> None:
        if engine.dead:
            return
        engine.stats.failed_receives += pages is None
        if command.blocks and pages is None:
            engine.core.load_failed(command.request_id, self.now)
        elif command.blocks and pages is not None:
            engine.core.loaded(command, pages)
        self._turn(engine)

    # -- what is pushed

    def _push(self, engine: VirtualEngine, command: Register | Push) -> None:
        taken = 0.0
        if isinstance(command, Push):
            taken = engine.facts.hardware.transfer_s(len(command.blocks) * engine.facts.block_size)
        self.at(self.now + taken, lambda: self._arrived(engine, command))

    def _arrived(self, engine: VirtualEngine, command: Register | Push) -> None:
        peer = self._listening(command.peer)
        here = peer is not None and (peer.core.engine_id, peer.core.agent) == (
            command.peer.engine_id,
            command.agent,
        )
        if engine.dead:
            return
        if isinstance(command, Push):
            if peer is not None and here:
                pages = [engine.core.pool.pages[block] for block in command.blocks]
                take_push(peer.core, command.remote_request_id, command.remote_blocks, pages)
                tokens = len(command.blocks) * engine.facts.block_size
                engine.stats.transfers.observe(engine.facts.hardware.transfer_s(tokens))
                engine.stats.transferred_bytes.observe(
                    tokens * engine.facts.hardware.kv_bytes_per_token
                )
            pusher(engine.core).pushed(command, whole=here)
        elif peer is not None and here:
            pusher(peer.core).take(command.registration, command.reached)
        else:
            engine.stats.failed_notifications += 1
        self._turn(engine)
        if peer is not None:
            self._turn(peer)

    def _push_chunks(
        self, engine: VirtualEngine, command: ReceiverHandshake | Offer | Write | Cancel
    ) -> None:
        found = self._receiving(command.receiver)
        if found is None:
            return  # here an engine that waits for a receiver waits forever
        mine, (peer, theirs) = _pd(engine), found
        buffer = theirs.buffers[command.receiver.rank]
        match command:
            case ReceiverHandshake():
                self.at(
                    self.now,
                    lambda: self._after(
                        engine, lambda: mine.receiver_found(command.receiver, peer.core.engine_id)
                    ),
                )
            case Offer():
                buffer.offer(
                    command.batch,
                    self.now,
                    lambda allocation: self.at(
                        self.now,
                        lambda: self._after(engine, lambda: mine.offered(command, allocation)),
                    ),
                )
                self.at(self.now, lambda: self._turn(peer))
            case Write():

                def over() -> None:
                    buffer.write(command.keys, command.pages)
                    mine.written(command, whole=True)

                taken = engine.facts.hardware.transfer_s(command.tokens)
                self.at(self.now + taken, lambda: self._after(engine, over))
            case Cancel():
                buffer.cancel(command.request, command.keys, self.now)

    # -- parts that are pushed to host memory

    def _push_part(
        self, engine: VirtualEngine, command: FindReceiver | SendPart | Received
    ) -> None:
        if isinstance(command, Received):
            engine.core.received(command.request_id, command.pages, command.tokens)
            self.at(self.now, lambda: self._turn(engine))
            return
        mine = _cpu(engine)
        peer = next((one for one in self.engines if _listens(one, engine.facts.cpu.cpu_port)), None)
        match command:
            case FindReceiver() if peer is not None:
                self.at(
                    self.now, lambda: self._after(engine, lambda: mine.found(peer.core.engine_id))
                )
            case SendPart() if peer is not None and peer.core.engine_id == command.engine_id:

                def taken() -> None:
                    self.at(
                        self.now,
                        lambda: self._after(engine, lambda: mine.sent(command.part, whole=True)),
                    )

                def offered() -> None:
                    _cpu(peer).offer(command.part, taken)
                    self._turn(peer)

                after = engine.facts.hardware.transfer_s(command.part.stop - command.part.start)
                self.at(self.now + after, offered)
            case SendPart():
                mine.sent(command.part, whole=False)

    def _after(self, engine: VirtualEngine, what: Callable[[], None]) -> None:
        if not engine.dead:
            what()
            self._turn(engine)

    def _receiving(self, receiver: ReceivingRank) -> tuple[VirtualEngine, LMCachePD] | None:
        """Return the engine with the receiver's ports: those of its facts, none of which may be
        0.
        """
        for engine in self.engines:
            facts, place = engine.facts, receiver.rank
            ports = (
                facts.lmcache.pd_peer_init_port + place,
                facts.lmcache.pd_peer_alloc_port + place,
            )
            pushed_to = (
                facts.connector == "lmcache-pd" and facts.role == "decode" and not engine.dead
            )
            if (
                pushed_to
                and ports == (receiver.init_port, receiver.alloc_port)
                and place < facts.pd_ranks
            ):
                return engine, _pd(engine)
        return None


def _listens(engine: VirtualEngine, port: int) -> bool:
    facts = engine.facts
    return (
        facts.connector == "cpu"
        and facts.role == "decode"
        and facts.cpu.cpu_port == port
        and not engine.dead
    )


def _cpu(engine: VirtualEngine) -> CpuConnector:
    assert isinstance(engine.core.connector, CpuConnector)
    return engine.core.connector


def _pd(engine: VirtualEngine) -> LMCachePD:
    assert isinstance(engine.core.connector, LMCachePD)
    return engine.core.connector


def _mooncake(engine: VirtualEngine) -> Mooncake:
    assert isinstance(engine.core.connector, Mooncake)
    return engine.core.connector
