"""Who registers which engine: heartbeats, silence, restarts, and senders that are not the
engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.registration import MAX_UNKNOWN, REGISTRATIONS, Registrations, of_url
from pdproxy.observe.description import Description, Samples
from pdproxy.observe.events import Event, NodeChanged, Observers
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.transfer import moriio, p2p_nccl
from pdproxy.transfer.peers import Peer
from pdproxy.wire.registrations import Registration
from tests.fakes.clock import ManualClock
from tests.fakes.registry import unused_client

P, D, A = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"
TIMEOUT = 5.0


class Stage:
    """A prefill, a decode and an aggregated engine that are up, and the registrations."""

    def __init__(self, read: Any = p2p_nccl.registered, clock: ManualClock | None = None) -> None:
        self.results: Counter[str] = Counter()
        self.clock = clock or ManualClock()
        self.ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
        self.engines = EngineRegistry(self.ledger)
        self.known = Registrations(
            self.engines, self.ledger, read, Observers([self]), self.clock, timeout=TIMEOUT
        )
        for url, role in ((P, Role.PREFILL), (D, Role.DECODE), (A, Role.AGGREGATED)):
            self.engines.add(
                EngineSpec(url, role), unused_client(url), registered_as=of_url(url, None)
            )
            self.up(url)

    def notify(self, event: Event) -> None:
        raise AssertionError(event)

    def counters_of(self, kind: type[Event]) -> list[Callable[[Event], None]]:
        raise AssertionError(kind)

    def count(self, metric: Description, *labels: str, by: float = 1) -> None:
        assert (metric, by) == (REGISTRATIONS, 1)
        self.results[labels[0]] += 1

    def show(self, metric: Description, read: Callable[[], Samples]) -> None:
        raise AssertionError(metric)

    def up(self, url: str, started: float = 1.0) -> None:
        """Have an engine probed."""
        engine = self.engines[url].in_ledger
        if self.ledger.mark_up(url, Evidence(frozenset("m"), "1", 16, (), 0, started)):
            self.known.notify(NodeChanged(url, engine.role.value, up=True, reason=""))

    def not_ready(self, url: str) -> str | None:
        """Why the ledger does not pair an engine."""
        return self.engines[url].in_ledger.kv_not_ready

    def peer(self, url: str) -> Peer:
        """What is known of an engine's first rank."""
        return self.engines[url].run.peers.get(0)


def beat(url: str = P, role: str = "P", zmq: str = "10.0.0.1:21001", **more: Any) -> Registration:
    """A heartbeat."""
    return Registration(
        role=role,  # type: ignore[arg-type]
        http_address=url.removeprefix("http://"),
        zmq_address=zmq,
        **more,
    )


async def test_an_engine_is_used_from_its_first_heartbeat_until_it_falls_silent() -> None:
    stage = Stage()
    assert stage.not_ready(P) == "has not registered"
    stage.known.receive(beat(), b"1", "10.0.0.1")
    assert stage.not_ready(P) is None
    assert stage.peer(P) == Peer(host="10.0.0.1", address="10.0.0.1:21001")
    for _ in range(3):
        await stage.clock.advance(3)
        stage.known.receive(beat(), b"1", "10.0.0.1")
    assert stage.not_ready(P) is None
    await stage.clock.advance(TIMEOUT + 0.1)
    assert stage.not_ready(P) == "has not registered"
    assert stage.peer(P).address is None
    assert stage.results == {"known": 4, "expired": 1}
    assert (
        f"prefill {P} has not registered (expected from 10.0.0.1:8000)"
        in stage.known.shortcomings()
    )


async def test_aggregated_engines_need_not_register() -> None:
    stage = Stage()
    assert stage.not_ready(A) is None
    assert not any(A in text for text in stage.known.shortcomings())


async def test_a_restart_keeps_what_the_engines_next_process_has_registered() -> None:
    stage = Stage()
    stage.known.receive(beat(), b"1", "10.0.0.1")
    run = stage.engines[P].run
    stage.up(P, started=2.0)
    assert stage.engines[P].run is not run
    assert stage.peer(P).address == "10.0.0.1:21001"


async def test_a_stranger_on_another_machine_changes_nothing() -> None:
    """Neither with another address nor with the same one, as long as the engine's own heartbeats
    come.
    """
    stage = Stage()
    stage.known.receive(beat(), b"1", "10.0.0.1")
    for _ in range(4):
        await stage.clock.advance(3)
        stage.known.receive(beat(zmq="6.6.6.6:1"), b"evil", "6.6.6.6")
        stage.known.receive(beat(), b"evil", "6.6.6.6")
        stage.known.receive(beat(), b"1", "10.0.0.1")
        assert stage.not_ready(P) is None
        assert stage.peer(P).address == "10.0.0.1:21001"
    assert stage.results["contested"] == 8
    assert [text for text in stage.known.shortcomings() if P in text] == [
        f"{P}: a sender at 6.6.6.6 registers it, too, and is ignored"
    ]


async def test_a_stranger_can_not_keep_a_dead_engine_registered() -> None:
    stage = Stage()
    stage.known.receive(beat(), b"1", "10.0.0.1")
    await stage.clock.advance(3)
    stage.known.receive(beat(), b"evil", "6.6.6.6")
    await stage.clock.advance(3)
    assert stage.results["expired"] == 1


async def test_a_connection_that_was_made_again_counts() -> None:
    stage = Stage()
    stage.known.receive(beat(), b"1", "10.0.0.1")
    await stage.clock.advance(4)
    stage.known.receive(beat(), b"2", "10.0.0.1")
    await stage.clock.advance(4)
    assert stage.not_ready(P) is None
    assert stage.results == {"known": 2}


async def test_the_next_process_on_the_same_machine_takes_over_once_the_last_one_is_silent() -> (
    None
):
    stage = Stage()
    stage.known.receive(beat(), b"1", "10.0.0.1")
    stage.known.receive(beat(zmq="10.0.0.1:21002"), b"2", "10.0.0.1")
    assert stage.not_ready(P) is not None
    assert "two processes" in (stage.not_ready(P) or "")
    assert stage.peer(P).address is None
    await stage.clock.advance(3)
    stage.known.receive(beat(zmq="10.0.0.1:21002"), b"2", "10.0.0.1")
    assert "two processes" in (stage.not_ready(P) or "")
    await stage.clock.advance(2.1)
    stage.known.receive(beat(zmq="10.0.0.1:21002"), b"2", "10.0.0.1")
    assert stage.not_ready(P) is None
    assert stage.peer(P).address == "10.0.0.1:21002"


async def test_the_owner_goes_on_once_the_other_process_is_silent() -> None:
    stage = Stage()
    stage.known.receive(beat(), b"1", "10.0.0.1")
    stage.known.receive(beat(zmq="10.0.0.1:21002"), b"2", "10.0.0.1")
    for _ in range(2):
        await stage.clock.advance(2.6)
        stage.known.receive(beat(), b"1", "10.0.0.1")
    assert stage.not_ready(P) is None
    assert stage.peer(P).address == "10.0.0.1:21001"


async def test_a_role_that_contradicts_the_settings() -> None:
    stage = Stage()
    stage.known.receive(beat(role="D"), b"1", "10.0.0.1")
    assert stage.not_ready(P) == 'registers as "D", but is configured as prefill: that needs "P"'
    stage.known.receive(beat(D, "D", "10.0.0.2:1"), b"2", "10.0.0.2")
    assert stage.not_ready(D) is None


async def test_another_connectors_engine() -> None:
    stage = Stage()
    stage.known.receive(beat(transfer_mode="READ", dp_size=1, tp_size=1), b"1", "10.0.0.1")
    assert "P2pNcclConnector" in (stage.not_ready(P) or "")
    stage = Stage(moriio.registered)
    stage.known.receive(beat(), b"1", "10.0.0.1")
    assert "MoRIIOConnector" in (stage.not_ready(P) or "")


async def test_modes_must_be_those_of_the_other_engine_and_ranks_are_as_registered() -> None:
    stage = Stage(moriio.registered)
    address = "host:10.0.0.1,handshake:6301,notify:61005"
    stage.known.receive(
        beat(zmq=address, dp_size=2, tp_size=8, transfer_mode="READ"), b"1", "10.0.0.1"
    )
    stage.known.receive(
        beat(D, "D", address, dp_size=1, tp_size=4, transfer_mode="WRITE"), b"2", "10.0.0.2"
    )
    peers = stage.engines[P].run.peers
    assert (peers.ranks, peers.missing) == (2, ())
    assert peers.get(1) == Peer(1, 2, host="10.0.0.1", address=address, tp_size=8, mode="READ")
    assert stage.ledger.shortcomings(0.0) == [
        f"{P} and {D} are not paired: different transfer modes (READ / WRITE)"
    ]
    await stage.clock.advance(TIMEOUT + 1)
    stage.known.receive(
        beat(D, "D", address, dp_size=1, tp_size=4, transfer_mode="READ"), b"2", "10.0.0.2"
    )
    stage.known.receive(beat(zmq=address, tp_size=8, transfer_mode="READ"), b"1", "10.0.0.1")
    assert peers.ranks == 1
    assert stage.ledger.shortcomings(0.0) == []


async def test_unknown_addresses_are_named_and_bounded() -> None:
    stage = Stage()
    for number in range(500):
        stage.known.receive(beat(f"10.9.9.9:{number + 1}"), b"1", "10.9.9.9")
    assert stage.results == {"unknown": 500}
    assert len(stage.known._unknown) == MAX_UNKNOWN
    said = [text for text in stage.known.shortcomings() if "10.9.9.9" in text]
    assert len(said) == 4
    assert "is nodes[].facts.registered_as missing?" in said[0]
    assert (
        stage.known.shortcomings()[-1] == "60 or more other addresses register that are no engine's"
    )
    await stage.clock.advance(TIMEOUT + 1)
    assert stage.known._unknown == {}


async def test_engines_come_and_go() -> None:
    stage = Stage()
    stage.known.receive(beat(), b"1", "10.0.0.1")
    stage.engines.remove(P)
    stage.known.receive(beat(), b"1", "10.0.0.1")
    assert stage.results == {"known": 1, "unknown": 1}
    await stage.clock.advance(TIMEOUT + 1)
    assert stage.results["expired"] == 0
    stage.engines.add(
        EngineSpec(P, Role.PREFILL), unused_client(P), registered_as=of_url(P, "proxied:1")
    )
    assert stage.not_ready(P) == "has not registered"
    stage.known.receive(beat("proxied:1/v1"), b"1", "10.0.0.1")
    assert stage.not_ready(P) is None


@pytest.mark.parametrize("given_as", [None, "10.0.0.1:8000", "HTTP://10.0.0.1:8000/"])
def test_the_address_that_is_expected(given_as: str | None) -> None:
    assert of_url(P, given_as) == "10.0.0.1:8000"


_SENDERS = st.sampled_from(
    [(b"1", "10.0.0.1"), (b"2", "10.0.0.1"), (b"3", "6.6.6.6"), (b"4", "6.6.6.6")]
)
_BEATS = st.tuples(
    st.sampled_from([P, D, A, "http://9.9.9.9:1"]),
    st.sampled_from("PD"),
    st.sampled_from(["10.0.0.1:21001", "6.6.6.6:1", "a___b:1", "nonsense"]),
    _SENDERS,
    st.floats(0, 7),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_BEATS, max_size=25))
async def test_no_sequence_of_heartbeats_breaks_it(
    beats: list[tuple[str, str, str, tuple[bytes, str], float]],
) -> None:
    """An engine is ready only with an address of its own kind; all that is kept is bounded, and
    silence ends all of it.
    """
    stage = Stage()
    for url, role, zmq, (connection, address), pause in beats:
        stage.known.receive(beat(url, role, zmq), connection, address)
        for one in (P, D):
            if stage.not_ready(one) is None:
                assert stage.peer(one).address in ("10.0.0.1:21001", "6.6.6.6:1")
            else:
                assert stage.peer(one).address is None
        assert len(stage.known.shortcomings()) < 20
        await stage.clock.advance(pause)
    await stage.clock.advance(2 * TIMEOUT + 1)
    assert stage.not_ready(P) == stage.not_ready(D) == "has not registered"
    assert stage.clock.pending() == []


async def test_the_log_says_once_what_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pdproxy.fleet")
    stage = Stage()
    for _ in range(3):
        stage.known.receive(beat(), b"1", "10.0.0.1")
    await stage.clock.advance(TIMEOUT + 1)
    stage.known.receive(beat(role="D"), b"1", "10.0.0.1")
    assert [record.getMessage() for record in caplog.records] == [
        f"{P} takes part in KV transfer: it has registered",
        f"{P} takes part in no KV transfer: it has not registered",
        (
            f'{P} takes part in no KV transfer: it registers as "D", but is configured as prefill: '
            f'that needs "P"'
        ),
    ]
