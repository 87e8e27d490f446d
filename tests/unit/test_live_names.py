"""Names in DNS that change with the settings while a proxy runs: all of a change is used, or
none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.app.live import LiveSettings
from pdproxy.fleet import membership
from pdproxy.fleet.dns_source import DnsSource, LookUp
from pdproxy.fleet.member import MembershipError
from pdproxy.settings.dns import Dns, DnsName, dns_name
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.upstream.resolver import DnsRecords, LookupFailedError
from tests.fakes.tokenizer import Shelf
from tests.fakes.world import until
from tests.unit.test_live_settings import changed

D = ConfiguredEngine(url="http://d:8000", role="decode")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)


class Answers:
    """Answers of DNS that a test says: hosts by name. Without any the name does not exist."""

    def __init__(self, **hosts: str) -> None:
        self.hosts: dict[str, str] = hosts

    async def look_up(self, name: DnsName) -> dict[str, DnsRecords | LookupFailedError]:
        host = self.hosts.get(name.name)
        return {
            "A": LookupFailedError("no such name")
            if host is None
            else DnsRecords(((host, None),), 60)
        }


def _at(name: str, **fields: Any) -> ConfiguredEngine:
    return ConfiguredEngine(**{"url": f"dns://{name}:8000", "role": "decode", **fields})


def _followed(proxy: Proxy, look_up: LookUp) -> LiveSettings:
    """Have a proxy follow the names of its settings. Return what puts other settings in force."""
    proxy.sources.make = lambda url, settings: DnsSource(
        dns_name(url, ("url",)), look_up, settings.dns
    )
    proxy.sources.start()
    return LiveSettings(proxy, lambda _: None)


def _engines(proxy: Proxy) -> list[list[str]]:
    """The hosts of each pool's engines."""
    return [[url[7:-5] for url in parts.engines] for parts in proxy.pools]


async def test_names_follow_the_settings(tmp_path: Path) -> None:
    """One that is new is followed, one that went is given up, one with other settings has its
    engines use them: or nothing.
    """
    d, e = D, ConfiguredEngine(url="http://e:8000", role="decode")
    pools = (Pool(name="a", nodes=(d, _at("one"))), Pool(name="b", nodes=(e, _at("two"))))
    old = Settings(pools=pools)
    proxy = Proxy.build(old, Shelf())
    live = _followed(proxy, Answers(one="10.0.0.1", two="10.0.0.2", three="10.0.0.3").look_up)
    try:
        await until(lambda: _engines(proxy) == [["d", "10.0.0.1"], ["e", "10.0.0.2"]])
        labelled = changed(
            old, ("pools", 0, "nodes"), (d, _at("one", labels={"rack": "1"}), _at("three"))
        )
        broken = changed(
            labelled, ("pools", 1, "nodes"), (e, _at("two", api_key_file=str(tmp_path / "missing")))
        )
        f = ConfiguredEngine(url="http://f:8000", role="decode")
        more = changed(broken, ("pools", 0, "nodes"), (f, *broken.pools[0].nodes))
        with pytest.raises(SettingsError, match="missing"):
            live.use(old, more)
        await until(lambda: _engines(proxy) == [["d", "10.0.0.1"], ["e", "10.0.0.2"]])
        assert [source.name for source in proxy.sources.found] == [
            "dns://one:8000",
            "dns://two:8000",
        ]
        assert [source.template.labels for source in proxy.sources.found] == [{}, {}]
        member = proxy.membership.members["http://10.0.0.1:8000"]
        assert (member.settings.labels, member.drain) == ({}, None)

        new = changed(labelled, ("pools", 1, "nodes"), (e,))
        live.use(old, new)
        assert proxy.membership.members["http://10.0.0.1:8000"].settings.labels == {"rack": "1"}
        await until(lambda: _engines(proxy) == [["d", "10.0.0.1", "10.0.0.3"], ["e"]])
        assert [member.is_new for member in proxy.membership.members.values()] == [
            False,
            False,
            True,
        ]
        followed = [name for name, _ in proxy.tasks.failures() if "://" in name]
        assert followed == ["dns://one:8000", "dns://three:8000"]
        text = proxy.metrics.page().decode()
        assert 'pdproxy_dns_engines{source="dns://three:8000"}' in text
        assert "dns://two" not in text
    finally:
        await proxy.stop()


async def test_a_name_moves_to_another_pool() -> None:
    """Its engines come once they are gone from the first one, and one that another pool has keeps
    no other out.
    """
    d, e = D, ConfiguredEngine(url="http://e:8000", role="decode")
    old = Settings(
        pools=(Pool(name="a", nodes=(d, _at("one"), _at("two"))), Pool(name="b", nodes=(e,))),
        dns=Dns(min_ttl=0.01, max_ttl=0.01),
    )
    proxy = Proxy.build(old, Shelf())
    live = _followed(proxy, Answers(one="10.0.0.1", two="10.0.0.2").look_up)
    held = {"http://10.0.0.1:8000"}
    proxy.pools[0].engines.keep_known(lambda: held)
    try:
        await until(lambda: _engines(proxy)[0] == ["d", "10.0.0.1", "10.0.0.2"])
        moved = changed(old, ("pools", 0, "nodes"), (d,))
        live.use(old, changed(moved, ("pools", 1, "nodes"), (e, _at("one"), _at("two"))))
        await until(lambda: _engines(proxy) == [["d", "10.0.0.1"], ["e", "10.0.0.2"]])
        await until(lambda: proxy.readiness().details)
        assert (
            "dns://one:8000: http://10.0.0.1:8000 is an engine of pool a"
            in proxy.readiness().details
        )
        held.clear()
        await until(lambda: _engines(proxy) == [["d"], ["e", "10.0.0.2", "10.0.0.1"]])
    finally:
        await proxy.stop()


async def test_engines_of_a_name_and_of_the_file() -> None:
    """Named with the same settings in both, they serve on when one gives them up; with other ones
    the change is refused.
    """
    own = ConfiguredEngine(url="http://10.0.0.1:8000", role="decode")
    old = Settings(pools=(Pool(nodes=(D, _at("one"))),))
    proxy = Proxy.build(old, Shelf())
    live = _followed(proxy, Answers(one="10.0.0.1").look_up)
    try:
        await until(lambda: own.url in proxy.engines)
        engine = proxy.engines[own.url]
        without = changed(old, ("pools", 0, "nodes"), (D, own))
        other = changed(
            old, ("pools", 0, "nodes"), (D, msgspec.structs.replace(own, labels={"rack": "1"}))
        )
        with pytest.raises(
            MembershipError, match="was added by dns://one:8000, with other settings"
        ):
            live.use(old, other)
        assert [source.name for source in proxy.sources.found] == ["dns://one:8000"]
        live.use(old, without)
        member = proxy.membership.members[own.url]
        assert (member.source, member.drain, proxy.engines[own.url]) == ("settings", None, engine)
        assert proxy.sources.found == []
    finally:
        await proxy.stop()


async def test_a_source_that_can_not_be_made_changes_nothing() -> None:
    """Neither its pool's engines nor other sources."""
    old = Settings(pools=(Pool(nodes=(D, _at("one"))),))
    proxy = Proxy.build(old, Shelf())
    live = _followed(proxy, Answers(one="10.0.0.1").look_up)

    def refuse(url: str, settings: Settings) -> DnsSource:
        raise SettingsError("its file can't be read")

    try:
        await until(lambda: _engines(proxy) == [["d", "10.0.0.1"]])
        proxy.sources.make = refuse
        e = ConfiguredEngine(url="http://e:8000", role="decode")
        with pytest.raises(SettingsError, match="its file can't be read"):
            live.use(old, changed(old, ("pools", 0, "nodes"), (D, e, _at("two"))))
        await until(lambda: _engines(proxy) == [["d", "10.0.0.1"]])
        assert [found.name for found in proxy.sources.found] == ["dns://one:8000"]
        assert {member.drain for member in proxy.membership.members.values()} == {None}
    finally:
        await proxy.stop()
