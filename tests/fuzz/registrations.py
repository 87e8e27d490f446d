"""What must hold for any messages that come to the socket at which engines register, in any order
and from any senders.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.registration import MAX_NAMED, MAX_UNKNOWN, Registrations, of_url
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.transfer.contract import Dispatch
from pdproxy.transfer.peer_ids import addressed_id
from pdproxy.transfer.registry import ENTRIES
from pdproxy.wire.registrations import decode
from tests.fakes.clock import ManualClock
from tests.fakes.registry import unused_client

URLS = {"http://10.0.0.1:8000": Role.PREFILL, "http://10.0.0.2:8000": Role.DECODE}
SENDERS = [(b"1", "10.0.0.1"), (b"2", "10.0.0.2"), (b"3", "10.0.0.2"), (b"4", "6.6.6.6")]
BEATS = {
    "p2p": {"type": "P", "http_address": "10.0.0.1:8000", "zmq_address": "10.0.0.1:21001"},
    "moriio": {
        "type": "D",
        "http_address": "10.0.0.2:8000",
        "zmq_address": "host:10.0.0.2,handshake:6301,notify:61005",
        "dp_size": 2,
        "tp_size": 8,
        "transfer_mode": "READ",
    },
}


def recorded() -> dict[str, bytes]:
    """vLLM's own messages, behind a sender's number."""
    return {name: b"\x00" + msgspec.msgpack.encode(message) for name, message in BEATS.items()}


async def check_registrations(data: bytes, cuts: Sequence[int]) -> None:
    """Cut the bytes into messages, each behind a byte for its sender; all connectors' engines get
    them.
    """
    at = sorted({0, len(data), *(cut for cut in cuts if 0 < cut < len(data))})
    messages = [data[start:stop] for start, stop in pairwise(at)]
    for entry in ENTRIES:
        if entry.registered is None:
            continue
        ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
        engines = EngineRegistry(ledger)
        clock = ManualClock()
        known = Registrations(engines, ledger, entry.registered, Observers([]), clock, timeout=5)
        for url, role in URLS.items():
            engines.add(EngineSpec(url, role), unused_client(url), registered_as=of_url(url, None))
            ledger.mark_up(url, Evidence(frozenset("m"), "1", 16, (), 0, 1.0))
        for message in messages:
            registration = decode(message[1:])
            if registration is not None:
                known.receive(registration, *SENDERS[message[0] % len(SENDERS)])
            await clock.advance(message[0] / 64)
            ledger_engines = {engine.url: engine for engine in ledger.engines}
            ready = [url for url in URLS if ledger_engines[url].kv_not_ready is None]
            assert known.count == len(ready)
            for url in ready:
                peers = engines[url].run.peers
                assert not peers.missing
                assert peers.ranks <= 4096
            if len(ready) == len(URLS):
                peer = {url: engines[url].run.peers.take_turn() for url in URLS}
                both = Dispatch("0" * 32, prefill_peer=peer[ready[0]], decode_peer=peer[ready[1]])
                name = addressed_id("0" * 32, both)
                assert name.isascii()
                assert name.isprintable()
                assert len(name) < 1024
            assert len(known.shortcomings()) <= 2 * len(URLS) + MAX_NAMED + 1
            assert len(known._unknown) <= MAX_UNKNOWN
        await clock.advance(11)
        assert known.count == 0
        assert clock.pending() == []
