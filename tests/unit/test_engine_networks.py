"""Where engines may be: which addresses are refused, in which spellings, and that nothing connects
to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.fleet.kv_sources import KvEventSources, PublisherAddress
from pdproxy.kit.addresses import read_network
from pdproxy.kit.clock import Clock
from pdproxy.kit.engine_networks import FORBIDDEN, USUAL, EngineNetworks
from pdproxy.kit.errors import EngineError, EngineUnreachableError
from pdproxy.settings.crosscheck import crosscheck
from pdproxy.settings.dns import Dns
from pdproxy.settings.engines import ConfiguredEngine, EngineSettings, Facts
from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.kv import EngineKvEvents, ReceiverSettings
from pdproxy.settings.limits import Deadlines
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.transfer import moriio, p2p_nccl
from pdproxy.transfer.contract import Handle
from pdproxy.transfer.peers import Peer
from pdproxy.upstream.addresses import Resolve, by_system
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.passthrough import PassthroughLegs
from pdproxy.upstream.resolver import Resolver
from pdproxy.wire.registrations import Registration

FAR = EngineNetworks([read_network("10.0.0.0/8")])
"""Networks without the loopback, on which tests listen."""


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("10.1.2.3", True),
        ("192.168.0.1", True),
        ("fd00::1", True),
        ("2001:db8::1", True),
        ("engine", True),
        ("169.254.169.254", False),
        ("10.0.0.1 @169.254.169.254", False),
        ("10.0.0.1 :0;169.254.169.254", False),
        ("[fe80::1%eth0]", False),
        ("fd00:ec2::254", False),
        ("fd20:ce::254", False),
        ("100.100.100.200", False),
        ("168.63.129.16", False),
        ("0.0.0.0", False),
        ("::", False),
        ("239.1.2.3", False),
        ("ff02::1", False),
        ("255.255.255.255", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::169.254.169.254", False),
        ("2002:a9fe:a9fe::1", False),
        ("::169.254.169.254", False),
        ("::ffff:0:169.254.169.254", False),
        ("2001:0:a00:1:0:ffff:5601:5601", False),
        ("fe80::5efe:10.1.2.3", False),
        ("2001:db8::5efe:169.254.169.254", False),
        ("2001:db8::200:5efe:169.254.169.254", False),
        ("::5efe:169.254.169.254", False),
        ("2001:db8::5efe:10.1.2.3", True),
        ("169.254.169.254.", False),
        ("2852039166.", False),
        ("\u2460\u2465\u2468.254.169.254", False),
        ("169\u3002254.169.254", False),
        ("engine.", True),
        ("m\u00fcnchen", True),
        ("\u00fc" * 300, True),
        ("2852039166", False),
        ("0xa9fea9fe", False),
        ("0251.0376.0251.0376", False),
        ("169.254.43518", False),
        ("64:ff9b:1:a9fe:a9:fe00::", False),
        ("64:ff9b:1:a9fe:a9:fe00:101:101", False),
        ("64:ff9b:1:a02:3:400::", True),
        ("64:ff9b:1:a9:fe:a9fe::", False),
        ("64:ff9b:1:1:a9:fea9:fe00:0", False),
        ("64:ff9b:1::169.254.169.254", False),
        ("64:ff9b:1::10.1.2.3", True),
        ("[169.254.169.254]", False),
        ("10.1.2.3:1;169.254.169.254", False),
        ("1\0", False),
        ("", False),
    ],
)
def test_addresses_at_which_no_engine_is(host: str, allowed: bool) -> None:
    """Also as only the system reads them, and inside other addresses."""
    assert (USUAL.why_not(host) is None) == allowed
    assert (USUAL.why_not_named(host) is None) == allowed


@given(st.sampled_from(FORBIDDEN), st.integers(0, 2**128 - 1))
def test_a_setting_allows_them(forbidden: Any, number: int) -> None:
    network = forbidden[0]
    address = str(network[number % network.num_addresses])
    assert USUAL.why_not(address) is not None
    assert EngineNetworks([network]).why_not(address) is None
    assert FAR.why_not(address) is not None


def test_named_networks_are_all_that_there_are() -> None:
    assert FAR.why_not("10.255.0.1") is None
    assert FAR.why_not("::ffff:10.255.0.1") is None
    assert FAR.why_not("2001:db8::5efe:10.255.0.1"), "any network can come before such an end"
    assert FAR.why_not("64:ff9b:1::10.255.0.1") is None
    assert FAR.why_not("64:ff9b:1:b00:0:ff01::10.255.0.1"), (
        "with prefixes of 56 bits it is another one"
    )
    assert FAR.why_not("127.0.0.1") == "not in engines.networks"
    assert FAR.why_not("name") is None, "it is looked at when it resolves"
    assert FAR.why_not_named("name"), "somebody else resolves it"
    assert (
        FAR.why_not_named("localhost")
        == FAR.why_not_named("localhost.")
        == "not in engines.networks"
    )


# -- the settings


def _refused(engine: ConfiguredEngine, networks: tuple[str, ...] = ()) -> list[str]:
    found = Mistakes()
    settings = Settings(pools=(Pool(nodes=(engine,)),), engines=EngineSettings(networks=networks))
    crosscheck(settings, found, need_engines=False)
    try:
        found.raise_any()
    except SettingsError as error:
        return list(error.mistakes)
    return []


BAD = "169.254.169.254"


@pytest.mark.parametrize(
    ("key", "engine"),
    [
        ("url", ConfiguredEngine(url=f"http://{BAD}:80", role="aggregated")),
        ("url", ConfiguredEngine(url="http://2852039166:80", role="aggregated")),
        (
            "facts.remote_host",
            ConfiguredEngine(url="http://e:1", role="prefill", facts=Facts(remote_host=BAD)),
        ),
        (
            "facts.bootstrap",
            ConfiguredEngine(
                url="http://e:1", role="prefill", facts=Facts(bootstrap=f"http://{BAD}:1")
            ),
        ),
        (
            "receiver.host",
            ConfiguredEngine(url="http://e:1", role="decode", receiver=ReceiverSettings(host=BAD)),
        ),
        (
            "facts.kv_events.endpoint",
            ConfiguredEngine(
                url="http://e:1",
                role="decode",
                facts=Facts(kv_events=EngineKvEvents(endpoint=f"tcp://{BAD}:1")),
            ),
        ),
        (
            "facts.kv_events.replay_endpoint",
            ConfiguredEngine(
                url="http://e:1",
                role="decode",
                facts=Facts(kv_events=EngineKvEvents(replay_endpoint=f"tcp://{BAD}:1")),
            ),
        ),
    ],
)
def test_settings_that_name_such_an_address(key: str, engine: ConfiguredEngine) -> None:
    """Each is named with the setting that allows it, which does."""
    (line,) = [one for one in _refused(engine) if "engines.networks" in one]
    assert line.startswith(f"pools[0].nodes[0].{key}: ")
    assert not [one for one in _refused(engine, ("169.254.0.0/16",)) if "engines.networks" in one]


NAME = "evil.example.com"


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("facts.remote_host", lambda host: {"facts": Facts(remote_host=host)}),
        ("facts.bootstrap", lambda host: {"facts": Facts(bootstrap=f"http://{host}:1")}),
        ("receiver.host", lambda host: {"receiver": ReceiverSettings(host=host)}),
    ],
)
def test_names_that_other_engines_resolve(key: str, more: Any) -> None:
    """Nobody knows where they lead: with networks, only the name of the engine's own URL may be
    there.
    """
    other, own = (
        ConfiguredEngine(url="http://e:1", role="any", **more(host)) for host in (NAME, "E")
    )
    named = ("10.0.0.0/8",)
    (line,) = [one for one in _refused(other, named) if "engines.networks" in one]
    assert line.startswith(f"pools[0].nodes[0].{key}: {NAME} is a name")
    for engine, networks in ((own, named), (other, ())):
        assert not [one for one in _refused(engine, networks) if "engines.networks" in one]


def test_a_wrong_network() -> None:
    (line,) = _refused(ConfiguredEngine(url="http://e:1", role="aggregated"), ("10.0.0.0/40",))
    assert line.startswith('engines.networks: "10.0.0.0/40": expected networks or addresses')


# -- connections


@asynccontextmanager
async def machine() -> AsyncIterator[tuple[int, list[int]]]:
    """A machine that counts connections, and answers each request."""
    count = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count[0] += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        )
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], count


def client(url: str, networks: EngineNetworks, resolve: Resolve = by_system) -> EngineClient:
    budget = AnswerBudget(1 << 20, 1 << 20)
    return EngineClient(
        url,
        connect_timeout=2,
        keepalive=1,
        clock=Clock(),
        budget=budget,
        resolve=resolve,
        networks=networks,
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_nothing_connects_to_another_address(host: str) -> None:
    """Neither legs, nor probes, nor passed requests, whether a name leads there or the address
    itself; and with it they do.
    """
    async with machine() as (port, count):
        url = f"http://{host}:{port}"
        near = EngineNetworks([read_network("127.0.0.0/8")])
        for networks, connections in ((FAR, 0), (near, 3)):
            admin = EngineAdmin(deadlines=Deadlines(probe=5), networks=networks)
            legs = PassthroughLegs(
                deadlines=Deadlines(connect=5),
                budget=AnswerBudget(1 << 20, 1 << 20),
                networks=networks,
            )
            one = client(url, networks)
            if connections:
                await admin.healthy(url)
                (await legs.send("GET", url, "/health", (), b"")).close()
                (await one.ask(one.request("/x", (), b"{}"))).close()
            else:
                with pytest.raises(EngineError, match=r"not in engines\.networks"):
                    await admin.healthy(url)
                with pytest.raises(EngineUnreachableError, match=r"not in engines\.networks"):
                    await legs.send("GET", url, "/health", (), b"")
                with pytest.raises(
                    EngineUnreachableError, match=r"127\.0\.0\.1 is not in engines\.networks"
                ):
                    await one.ask(one.request("/x", (), b"{}"))
            await admin.close()
            await legs.close()
            one.close()
            await asyncio.sleep(0.05 if connections else 0)
            assert count[0] == connections


async def test_a_name_that_changes_its_mind() -> None:
    """A name may lead to an engine when it is looked at, and elsewhere when it is connected to:
    each connection is looked at.
    """
    answers = iter([["10.0.0.1"], ["169.254.169.254"]])

    async def resolve(host: str, port: int) -> list[str]:
        return next(answers)

    one = client("http://engine:1", USUAL, resolve)
    await one._addresses.in_turn()
    one._addresses._known = ["169.254.169.254"]
    with pytest.raises(EngineUnreachableError, match=r"169\.254\.169\.254 is link-local"):
        await one._connect_to("169.254.169.254", 1)
    one.close()


def test_answers_of_name_servers() -> None:
    """An address at which no engine may be is no engine's, in any spelling."""
    usable = Resolver(Dns())._usable
    assert [usable(text) for text in ("10.0.0.1", "::ffff:10.0.0.1", "fd00::1")] == [
        "10.0.0.1",
        "10.0.0.1",
        "fd00::1",
    ]
    assert [usable(text) for text in (BAD, "::", "0.0.0.0", "ff02::1", "fd00:ec2::254", "x")] == [
        None
    ] * 6
    assert Resolver(Dns(), FAR)._usable("192.168.0.1") is None


# -- what engines name


def _handle(host: object) -> Handle:
    params = msgspec.json.encode({"do_remote_prefill": True, "remote_host": host})
    return Handle(params, None, 1, "r", None)


def hosts(networks: EngineNetworks = USUAL, kv_host: str | None = None) -> HandleHosts:
    return HandleHosts(networks, lambda url: cast("Any", SimpleNamespace(url=url, kv_host=kv_host)))


@pytest.mark.parametrize(
    ("networks", "kv_host", "host", "allowed"),
    [
        (USUAL, None, "10.0.0.1", True),
        (USUAL, None, "localhost", True),
        (USUAL, None, "engine-3.internal", True),
        (USUAL, None, BAD, False),
        (USUAL, None, "2852039166", False),
        (USUAL, None, "0.0.0.0", False),
        (USUAL, "10.0.0.9", "0.0.0.0", True),  # the settings' host replaces it
        (FAR, None, "10.0.0.1", True),
        (FAR, None, "192.168.0.1", False),
        (FAR, None, "other", False),
        (FAR, None, "e", True),  # the host of its own URL
        (FAR, "10.0.0.9", "other", True),
    ],
)
def test_which_hosts_a_handle_may_name(
    networks: EngineNetworks, kv_host: str | None, host: str, allowed: bool
) -> None:
    looked = hosts(networks, kv_host)
    for _ in range(2):  # the second time it is known
        found = looked.checked(_handle(host), "http://e:1")
        assert isinstance(found, Handle) == allowed
        if not allowed:
            assert isinstance(found, str)
            assert found.startswith(f"it names the host '{host}': ")
    peers = looked.of_peers((Peer(host=host),), "http://e:1")
    assert isinstance(peers, tuple) == allowed


@pytest.mark.parametrize(
    ("several", "allowed"),
    [
        (None, True),
        ([], True),
        (["10.0.0.1", "10.0.0.2"], True),
        (["10.0.0.1", BAD], False),
        ([2852039166], False),  # vLLM makes texts of them
        (2852039166, False),
        (BAD, False),
        (["10.0.0.1"] * 257, False),
    ],
)
@pytest.mark.parametrize("kv_host", [None, "10.0.0.9"])
def test_a_handle_that_names_several_hosts(
    several: Any, allowed: bool, kv_host: str | None
) -> None:
    """MoRIIO's ranks on several machines. No setting replaces these hosts."""
    params = msgspec.json.encode({"remote_host": "10.0.0.1", "remote_hosts": several})
    found = hosts(USUAL, kv_host).checked(Handle(params, None, 1, "r", None), "http://e:1")
    assert isinstance(found, Handle) == allowed


@pytest.mark.parametrize("several", [b"[" * 100_000 + b"]" * 100_000, b'"\xff"'])
def test_hosts_that_cannot_be_read(several: bytes) -> None:
    handle = Handle(b'{"remote_hosts":%b}' % several, None, 1, "r", None)
    assert "can't be read" in str(hosts().checked(handle, "http://e:1"))


@pytest.mark.parametrize(
    ("registered", "address", "more"),
    [
        (p2p_nccl.registered, "{}:21001", {}),
        (moriio.registered, "host:{},handshake:6301,notify:61005", {"transfer_mode": "READ"}),
    ],
)
def test_what_engines_register(registered: Any, address: str, more: dict[str, Any]) -> None:
    """The host in it is the one that other engines connect to."""
    for host, allowed in (("10.0.0.1", True), (BAD, False)):
        beat = Registration(
            role="P", http_address="10.0.0.1:1", zmq_address=address.format(host), **more
        )
        assert isinstance(hosts().of_peers(registered(beat), "http://e:1"), tuple) == allowed


@pytest.mark.parametrize(
    ("publishes", "found", "connected"),
    [
        ("tcp://127.0.0.1:5557", [], "tcp://127.0.0.1:5557"),
        (f"tcp://{BAD}:80", [], None),
        ("tcp://engine:5557", ["fd00::1", "10.0.0.1"], "tcp://10.0.0.1:5557"),
        ("tcp://engine:5557", [BAD, "10.0.0.1"], "tcp://10.0.0.1:5557"),
        ("tcp://engine:80", [BAD], None),
    ],
)
async def test_where_engines_say_that_they_publish(
    publishes: str, found: list[str], connected: str | None
) -> None:
    """ZMQ gets addresses that were looked at: a name would be resolved again, where nobody
    looks.
    """

    async def resolved(host: str, port: int) -> list[str]:
        return found

    sources = KvEventSources.__new__(KvEventSources)
    sources._networks, sources._resolved = USUAL, resolved
    for address in (
        PublisherAddress(publishes, None, "t"),
        PublisherAddress("tcp://10.0.0.1:1", publishes, "t"),
    ):
        allowed = await sources._allowed(address)
        if connected is None:
            assert isinstance(allowed, str)
            assert "link-local" in allowed
        else:
            assert isinstance(allowed, PublisherAddress)
            assert connected in (allowed.publishes, allowed.replays)


def test_handles_without_a_host_are_not_looked_at() -> None:
    looked = hosts()
    assert looked.checked("no handle", "http://e:1") == "no handle"
    empty = Handle(b"", None, 1, "r", None)
    assert looked.checked(empty, "http://e:1") is empty
    assert isinstance(looked.checked(_handle(None), "http://e:1"), Handle)
    for params in (b"null", b'"a text"', b'{"remote_host":5}'):
        assert isinstance(looked.checked(Handle(params, None, 1, "r", None), "http://e:1"), Handle)


def test_hosts_that_are_remembered_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may name another one each time."""
    monkeypatch.setattr("pdproxy.fleet.handle_hosts.MAX_KNOWN", 3)
    looked = hosts()
    for number in range(10):
        looked.why_not(f"10.0.0.{number}", "http://e:1")
        assert looked.why_not(str(number) * 256, "http://e:1")
    assert len(looked._known) <= 3
    assert not [host for host in looked._known if len(host) > 255]
