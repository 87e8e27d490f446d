"""Questions to name servers: what of their answers is used, and what a server may do wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pdproxy.settings.dns import Dns, DnsName, dns_name, server_of
from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.schema import source_kind
from pdproxy.upstream.resolver import DnsRecords, LookupFailedError, Resolver
from tests.fakes.name_server import NameServer, name_server

ENGINES = DnsName("dns", "engines.example", 8300)
SERVICE = DnsName("srv", "_vllm._tcp.example", None)


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with name_server() as made:
        yield made


def resolver(server: NameServer, timeout: float = 20.0) -> Resolver:
    return Resolver(Dns(servers=(server.address,), timeout=timeout))


async def test_addresses_of_both_families(server: NameServer) -> None:
    """With the time to live of each; what can be no engine's address is left out."""
    server.records = {
        ("engines.example", "A"): (30, ("10.0.0.2", "10.0.0.1", "0.0.0.0", "224.0.0.1")),
        ("engines.example", "AAAA"): (40, ("fd00::1", "::")),
    }
    found = await resolver(server).look_up(ENGINES)
    assert found == {
        "A": DnsRecords((("10.0.0.1", None), ("10.0.0.2", None)), 30),
        "AAAA": DnsRecords((("fd00::1", None),), 40),
    }


async def test_service_records(server: NameServer) -> None:
    """Each has a target with its port; a dot means that there is none."""
    key = ("_vllm._tcp.example", "SRV")
    server.records = {key: (20, ("0 5 8300 A.example.", "9 0 8301 b.example.", "0 0 0 c.example."))}
    assert await resolver(server).look_up(SERVICE) == {
        "SRV": DnsRecords((("a.example", 8300), ("b.example", 8301)), 20)
    }
    server.records = {key: (20, ("0 0 8300 .",))}
    found = (await resolver(server).look_up(SERVICE))["SRV"]
    assert isinstance(found, DnsRecords)
    assert found.places == ()


async def test_a_name_without_records_of_a_type(server: NameServer) -> None:
    """It is an empty answer, no failure; a name that does not exist is one."""
    server.records = {("engines.example", "A"): (30, ("10.0.0.1",))}
    found = await resolver(server).look_up(ENGINES)
    assert isinstance(found["AAAA"], DnsRecords)
    assert found["AAAA"].places == ()
    gone = await resolver(server).look_up(DnsName("dns", "other.example", 1))
    assert {str(one) for one in gone.values()} == {"no such name"}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("servfail", "the servers refuse, fail, or answer what can't be read"),
        ("refused", "the servers refuse, fail, or answer what can't be read"),
        ("nxdomain", "no such name"),
        ("silent", "no answer in 0.3 s"),
        ("other", "no answer in 0.3 s"),
        ("garbage", ""),
        ("short", ""),
    ],
)
async def test_a_server_that_fails(server: NameServer, fault: str, why: str) -> None:
    """Each way is a failure, in time, and says how."""
    server.records = {("engines.example", "A"): (30, ("10.0.0.1",))}
    server.fault = fault
    found = await resolver(server, timeout=0.3).look_up(ENGINES)
    failed = found["A"]
    assert isinstance(failed, LookupFailedError)
    assert why in str(failed)
    assert failed.late == str(failed).startswith("no answer")
    server.fault = ""
    assert isinstance((await resolver(server).look_up(ENGINES))["A"], DnsRecords)


async def test_a_long_answer_comes_over_tcp_and_has_a_bound(server: NameServer) -> None:
    texts = [f"10.0.{n // 250}.{n % 250 + 1}" for n in range(Dns.most)]
    server.records = {("engines.example", "A"): (30, texts)}
    server.fault = "truncated"
    found = (await resolver(server).look_up(ENGINES))["A"]
    assert isinstance(found, DnsRecords)
    assert len(found.places) == Dns.most
    assert server.over_tcp
    server.records = {("engines.example", "A"): (30, [*texts, "10.9.9.9"])}
    assert str((await resolver(server).look_up(ENGINES))["A"]) == "names 257 engines: 256 at most"


async def test_nobody_listens_there() -> None:
    async with name_server() as server:
        closed = server.address
    found = await Resolver(Dns(servers=(closed,), timeout=0.3)).look_up(ENGINES)
    assert all(isinstance(one, LookupFailedError) for one in found.values())


@pytest.mark.parametrize(
    ("url", "spelled"),
    [
        ("dns://Engines.Example:8300", "dns://engines.example:8300"),
        ("DNSS://engines:443/", "dnss://engines:443"),
        ("srv://_vllm._tcp.example.", "srv://_vllm._tcp.example."),
    ],
)
def test_one_spelling(url: str, spelled: str) -> None:
    assert source_kind(url) == "dns"
    assert dns_name(url, ("url",)).url == spelled
    assert dns_name(spelled, ("url",)).url == spelled


def test_urls_of_engines() -> None:
    """An address of IPv6 has its brackets; a target has its own port."""
    assert ENGINES.engine("fd00::1") == "http://[fd00::1]:8300"
    assert DnsName("dnss", "x", 443).engine("10.0.0.1") == "https://10.0.0.1:443"
    assert DnsName("srvs", "x", None).engine("a.example", 8300) == "https://a.example:8300"


@pytest.mark.parametrize(
    "url",
    [
        "dns://x", "dns://:1", "dns://1.2.3.4:5", "dns://[::1]:5", "srv://x:1", "dns://a b:1",
        "dns://x:1/v1", "srv://",
        "dns://-x:1", "dns://x:99999", "dns://u@x:1", "dns://x:1?a", "http://x:1",
        f"srv://{'a.' * 130}x", "dns://é:1",
    ],
)  # fmt: skip
def test_wrong_urls(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^url: "):
        dns_name(url, ("url",))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.2", ("10.0.0.2", 53)),
        ("10.0.0.2:5353", ("10.0.0.2", 5353)),
        ("fd00::2", ("fd00::2", 53)),
        ("[fd00::2]:54", ("fd00::2", 54)),
    ],
)
def test_name_servers(text: str, found: tuple[str, int]) -> None:
    assert server_of(text) == found


def test_wrong_servers_and_times() -> None:
    found = Mistakes()
    Dns(servers=("x", "1.2.3.4:0", "[::1"), min_ttl=9, max_ttl=8).check(found)
    with pytest.raises(SettingsError) as caught:
        found.raise_any()
    assert len(caught.value.mistakes) == 4
    assert caught.value.mistakes[0].startswith('dns.servers[0]: "x": expected an address')
    assert caught.value.mistakes[3] == "dns.min_ttl = 9 is more than dns.max_ttl = 8"
