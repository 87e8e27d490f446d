"""The settings of KV events, and what is built of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdproxy.app.kv_events import ReadingKvEvents, build_kv_events
from pdproxy.app.share import ALONE
from pdproxy.app.sockets import BoundHere, kv_events_places, listener_at, places
from pdproxy.fleet.kv_sources import PublisherAddress, resolve
from pdproxy.kit.clock import Clock
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.observe.metrics import Metrics
from pdproxy.settings.crosscheck import checked_node
from pdproxy.settings.engines import ConfiguredEngine, Facts
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kv import EngineKvEvents, KvEvents
from pdproxy.settings.limits import Deadlines
from pdproxy.settings.pools import Pool, PoolPolicy
from pdproxy.settings.schema import Settings
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.wire.kv_events import EventPublisher
from pdproxy.workers.share import WorkersMemory
from tests.fakes.kv_index import PlainIndex
from tests.fakes.ports import free_port
from tests.fakes.registry import registry
from tests.unit.test_settings_transfer import checked, wrong

URL = "http://a:1"


def settings(own: KvEvents, node: EngineKvEvents | None = None, ranks: int = 1) -> Settings:
    facts = Facts(data_parallel_size=ranks, kv_events=node or EngineKvEvents())
    return Settings(
        pools=(
            Pool(kv_events=own, nodes=(ConfiguredEngine(url=URL, role="aggregated", facts=facts),)),
        )
    )


def test_they_are_off_by_default() -> None:
    assert not Pool().kv_events.enabled


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://10.0.0.1:5557", "tcp://[fd00::1]:1"])
def test_right_endpoints(endpoint: str) -> None:
    own = KvEvents(enabled=True, endpoint=endpoint, replay_endpoint=endpoint)
    assert checked(settings(own, EngineKvEvents(endpoint=endpoint))).pool.kv_events == own


@pytest.mark.parametrize(
    "endpoint", ["x", "tcp://", "tcp://*", "tcp://*:0", "http://a:1", "ipc:///tmp/x", "tcp://*:x"]
)
def test_wrong_endpoints_are_named(endpoint: str) -> None:
    text = wrong(settings(KvEvents(endpoint=endpoint)))
    assert text.startswith("pools[0].kv_events.endpoint: ")
    assert "expected tcp://host:port" in text
    text = wrong(settings(KvEvents(), EngineKvEvents(replay_endpoint=endpoint)))
    assert text.startswith("pools[0].nodes[0].facts.kv_events.replay_endpoint: ")


def test_each_rank_needs_a_port() -> None:
    node = EngineKvEvents(endpoint="tcp://*:65535")
    assert "leaves no port for each of 2 ranks" in wrong(settings(KvEvents(), node, ranks=2))
    assert "leaves no port for each of 2 ranks" in wrong(
        settings(KvEvents(endpoint="tcp://*:65535"), ranks=2)
    )
    checked(settings(KvEvents(), node))
    own = KvEvents(host="127.0.0.1", port=65535)
    assert wrong(settings(own, ranks=2)).startswith(
        "pools[0].kv_events.port = 65535 leaves no port"
    )


def test_an_engine_that_is_added_later_is_checked() -> None:
    node = ConfiguredEngine(
        url=URL, role="aggregated", facts=Facts(kv_events=EngineKvEvents(endpoint="x"))
    )
    with pytest.raises(SettingsError, match="expected tcp://host:port"):
        checked_node(node, Pool(), ())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (EventPublisher("tcp://*:5557"), PublisherAddress("tcp://e:5557", None, "")),
        (
            EventPublisher("tcp://*:5557", "tcp://*:5571", "t"),
            PublisherAddress("tcp://e:5557", "tcp://e:5571", "t"),
        ),
        (
            EventPublisher("tcp://10.0.0.1:41000"),
            PublisherAddress("tcp://10.0.0.1:41000", None, ""),
        ),
        (
            EventPublisher("tcp://proxy:7000", "tcp://10.0.0.1:5571"),
            PublisherAddress("tcp://proxy:7000", "tcp://10.0.0.1:5571", "", 7000),
        ),
        (EventPublisher("tcp://*:7000"), PublisherAddress("tcp://e:7000", None, "")),
        (EventPublisher("tcp://[fd00::1]:5"), PublisherAddress("tcp://[fd00::1]:5", None, "")),
    ],
)
def test_who_connects_to_whom(source: EventPublisher, expected: PublisherAddress) -> None:
    """An engine connects to an endpoint that names a host: here only to our own port, 7000."""
    assert resolve(source, "e", range(7000, 7001)) == expected


@pytest.mark.parametrize(
    "source",
    [EventPublisher("inproc://x"), EventPublisher("tcp://*:1", "ipc:///tmp/x"), EventPublisher("")],
)
def test_what_can_not_be_read_is_said(source: EventPublisher) -> None:
    found = resolve(source, "e", ())
    assert isinstance(found, str)
    assert "only tcp://host:port can be read" in found


def build(own: KvEvents, index: PlainIndex | None, ranks: int = 1) -> ReadingKvEvents | None:
    engines, _ = registry()
    process: Any = SimpleNamespace(
        share=ALONE,
        observers=Observers([]),
        metrics=Metrics(),
        clock=Clock(),
        tasks=TaskOwner("test"),
    )
    made, admin = settings(own, ranks=ranks), EngineAdmin(deadlines=Deadlines(probe=1))
    return build_kv_events(
        made, index, lambda _: EngineKvEvents(), engines, admin, process, BoundHere()
    )


async def test_nothing_is_built_while_they_are_off() -> None:
    assert build(KvEvents(), PlainIndex()) is None
    assert build(KvEvents(enabled=True), None) is None
    assert build(KvEvents(enabled=True), PlainIndex()) is not None


def built(own: KvEvents, ranks: int = 1) -> ReadingKvEvents:
    found = build(own, PlainIndex(), ranks)
    assert found is not None
    return found


async def test_a_port_per_rank_is_bound_and_one_that_is_taken_is_named() -> None:
    own = KvEvents(enabled=True, host="127.0.0.1", port=free_port())
    first, second = built(own), built(own)
    first.start()
    try:
        with pytest.raises(
            SettingsError, match=rf"can't bind pools\[0\].kv_events.host.* = 127.0.0.1:{own.port}"
        ):
            second.start()
    finally:
        first.stop()
        second.stop()
    assert len(built(own, ranks=3).sources.bound) == 3


@pytest.mark.parametrize(
    ("own", "policy", "ports"),
    [
        (
            KvEvents(enabled=True, host="127.0.0.1", port=7000),
            PoolPolicy(placement="auto"),
            [7000, 7001],
        ),
        (
            KvEvents(enabled=True, host="127.0.0.1", port=7000),
            PoolPolicy(prefill="prefix"),
            [7000, 7001],
        ),
        (KvEvents(enabled=True, host="127.0.0.1", port=7000), PoolPolicy(placement="split"), []),
        (KvEvents(host="127.0.0.1", port=7000), PoolPolicy(placement="auto"), []),
        (KvEvents(enabled=True), PoolPolicy(placement="auto"), []),
    ],
)
def test_workers_share_a_port_per_rank_where_events_are_read(
    own: KvEvents, policy: PoolPolicy, ports: list[int]
) -> None:
    made = settings(own, ranks=2)
    (pool,) = made.pools
    made = msgspec.structs.replace(
        made, pools=(msgspec.structs.replace(pool, policy=policy, connector="auto"),)
    )
    found = list(places(made))
    assert [place.port for place in found] == ports
    assert len({place.key for place in found}) == len(ports)


async def test_the_scheduler_process_takes_the_connections() -> None:
    """From the sockets that its parent has bound, one per rank. Workers read no events."""
    own = KvEvents(enabled=True, host="127.0.0.1", port=free_port())
    made = settings(own, ranks=2)
    engines, _ = registry()
    shared = WorkersMemory(2, 1)
    for place in kv_events_places(made):
        shared.pools[0].listeners[place.key] = listener_at(place)
    found = []
    try:
        for number in range(2):
            share = shared.of(number, lambda _: None)
            process: Any = SimpleNamespace(
                share=share,
                observers=Observers([]),
                metrics=Metrics(),
                clock=Clock(),
                tasks=TaskOwner("test"),
            )
            reading = build_kv_events(
                made,
                PlainIndex(),
                lambda _: EngineKvEvents(),
                engines,
                EngineAdmin(deadlines=Deadlines(probe=1)),
                process,
                share.pool(0).sockets,
            )
            if reading is not None:
                found.append((number, reading))
        ((number, reading),) = found
        assert number == 1
        reading.start()
        addresses = [socket.address for socket in reading.sources.bound.values()]
        assert addresses == [f"tcp://127.0.0.1:{own.port + at}" for at in range(2)]
    finally:
        for _, reading in found:
            reading.stop()
        for listener in shared.listeners():
            listener.close()
