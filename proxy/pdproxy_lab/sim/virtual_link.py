"""What engines that register send each other, in virtual time: see `registered_link` for the same
over sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from pdproxy_lab.sim.connector import PeerCommand
from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.moriio import Moriio, Read, Report, WriteBlocks, Written
from pdproxy_lab.sim.moriio_params import MessageAddress
from pdproxy_lab.sim.p2p_nccl import P2pNccl, Put

HOST = "virtual"
"""The host of all engines. An engine's port is its number, from 1."""


class _Engine(Protocol):
    facts: SimFacts
    core: Core
    dead: bool


_E = TypeVar("_E", bound=_Engine)


def addressed(core: Core, number: int) -> None:
    """Give an engine its address."""
    if isinstance(core.connector, Moriio):
        core.connector.address = MessageAddress(HOST, number)


def perform(
    engine: _E,
    command: PeerCommand,
    engines: Sequence[_E],
    later: Callable[[float, Callable[[], None]], None],
    turn: Callable[[_E], None],
) -> None:
    """Carry out a command. `later(seconds, what)` calls something at a time from now; `turn` lets
    an engine go on.
    """
    mine = engine.core.connector

    def at(place: MessageAddress) -> _E | None:
        found = (
            engines[place.port - 1]
            if 0 < place.port <= len(engines) and place.host == HOST
            else None
        )
        return None if found is None or found.dead else found

    def after(seconds: float, what: Callable[[], None], *also: _E | None) -> None:
        def due() -> None:
            if not engine.dead:
                what()
                for one in (engine, *also):
                    if one is not None:
                        turn(one)

        later(seconds, due)

    match command:
        case Put(host, port, key, pages, tokens):
            peer = at(MessageAddress(host, port))
            if peer is None:
                return  # it waits for ever
            assert isinstance(mine, P2pNccl)
            theirs, sender = peer.core.connector, mine
            assert isinstance(theirs, P2pNccl)
            put_there = partial(theirs.put, key, pages)

            def put() -> None:
                put_there()
                sender.sent()

            after(engine.facts.hardware.transfer_s(tokens), put, peer)
        case Read(place, request_id, transfer_id, blocks, tokens):
            assert isinstance(mine, Moriio)
            peer = at(place)

            def read() -> None:
                connector = None if peer is None or peer.dead else peer.core.connector
                assert connector is None or isinstance(connector, Moriio)
                mine.was_read(request_id, None if connector is None else connector.pages_at(blocks))
                if connector is not None:
                    connector.reported("release", transfer_id, ())

            after(engine.facts.hardware.transfer_s(tokens), read, peer)
        case Report(place, kind, transfer_id, blocks, _):
            peer = at(place)
            if peer is not None:
                theirs = peer.core.connector
                assert isinstance(theirs, Moriio)
                after(0.0, lambda: theirs.reported(kind, transfer_id, blocks), peer)
        case WriteBlocks(place, transfer_id, blocks, pages):
            assert isinstance(mine, Moriio)
            peer = at(place)

            def write() -> None:
                if peer is not None and not peer.dead:
                    assert isinstance(peer.core.connector, Moriio)
                    peer.core.connector.written(transfer_id, blocks, pages)
                mine.wrote(transfer_id)

            after(
                engine.facts.hardware.transfer_s(len(pages) * engine.facts.block_size), write, peer
            )
        case Written(request_id, tokens):
            engine.core.written_by_peer(request_id, tokens)
            later(0.0, lambda: turn(engine))
