"""Pools that can't be made or changed, and settings whose effect is not where they are kept."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import msgspec
import pytest
from aiohttp.client_proto import ResponseHandler

from pdproxy.app.compose import Proxy
from pdproxy.app.live import LiveSettings
from pdproxy.app.watch import Watch
from pdproxy.kit.errors import EngineUnreachableError
from pdproxy.observe.events import NodeChanged
from pdproxy.scheduling.ledger_engine import Evidence
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kv import KvEvents
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.settings.pools import Pool, PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes.admitted import admission_of
from tests.fakes.tokenizer import Shelf
from tests.unit.test_live_settings import NODES, settings


async def test_more_requests_than_engines_can_take() -> None:
    """A limit on all requests that is lowered, and raised again, leaves the bound of the engines as
    it was.
    """
    old = msgspec.structs.replace(settings(), limits=Limits(engine_requests=4))
    proxy = Proxy.build(old, Shelf())
    try:
        for engine in proxy.engines.values():
            proxy.ledger.mark_up(engine.url, Evidence(frozenset("m"), "1", 16, (), 0, 1.0))
        proxy.observers.notify(NodeChanged(NODES[1].url, "decode", up=True, reason=""))
        assert admission_of(proxy).places == 4
        live, less = (
            LiveSettings(proxy, lambda _: None),
            msgspec.structs.replace(old, limits=Limits(engine_requests=4, max_inflight=2)),
        )
        live.use(old, less)
        assert admission_of(proxy).places == 2
        live.use(less, old)
        assert admission_of(proxy).places == 4
    finally:
        await proxy.stop()


async def test_an_engine_that_cannot_be_put_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key file was deleted with the change. The first failure is shown, the other pools are put
    back, and the log says so.
    """
    key = tmp_path / "key"
    key.write_text("secret")
    a, b, c, new = (ConfiguredEngine(url=f"http://{name}:8000", role="decode") for name in "abcn")
    keyed = msgspec.structs.replace(b, api_key_file=str(key))

    def of(*pools: tuple[ConfiguredEngine, ...]) -> Settings:
        return Settings(
            pools=tuple(Pool(name=f"pool {at}", nodes=nodes) for at, nodes in enumerate(pools))
        )

    old = of((a,), (keyed,), (c,))
    proxy = Proxy.build(old, Shelf())
    live = LiveSettings(proxy, lambda _: None)
    key.unlink()
    try:
        with pytest.raises(SettingsError, match=r"pool pool 2: .*nowhere"):
            live.use(old, of((a, new), (b,), (msgspec.structs.replace(c, api_key_file="nowhere"),)))
        assert "pool pool 1 keeps its new engines" in caplog.text
        await proxy.tasks.settle(5)
        assert [[*parts.engines] for parts in proxy.pools] == [[a.url], [b.url], [c.url]]
        live.use(old, of((a,), (b,), (c,)))
        assert proxy.pools[1].membership.members[b.url].settings == b
    finally:
        await proxy.stop()


def second(**fields: Any) -> Settings:
    """Settings with a second pool that has these."""
    first = Pool(name="first", nodes=(ConfiguredEngine(url="http://a:8000", role="decode"),))
    return Settings(
        pools=(
            first,
            Pool(
                name="other",
                nodes=(ConfiguredEngine(url="http://b:8000", role="decode"),),
                **fields,
            ),
        )
    )


async def test_what_is_wrong_with_a_pool_names_it() -> None:
    """And its settings by their place in the file."""
    with pytest.raises(SettingsError, match=r"pool other: pools\[1\]\.tokenizer: .nowhere"):
        Proxy.build(second(tokenizer="nowhere", tokenize="always"), Shelf())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        events = KvEvents(enabled=True, host="127.0.0.1", port=taken.getsockname()[1])
        proxy = Proxy.build(second(kv_events=events, policy=PoolPolicy(prefill="prefix")), Shelf())
        try:
            with pytest.raises(
                SettingsError, match=r"pool other: can't bind pools\[1\]\.kv_events"
            ):
                proxy.start()
        finally:
            await proxy.stop()


class Unreachable(aiohttp.BaseConnector):
    """Engines that take no connection. `waits`: how long they were waited for."""

    waits: ClassVar[list[float | None]] = []

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: object, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        self.waits.append(timeout.sock_connect)
        raise aiohttp.ConnectionTimeoutError


async def test_the_wait_for_a_connection_of_routes_that_one_engine_serves() -> None:
    """Their connections are made by one session, which lives as long as the proxy."""
    proxy = Proxy.build(settings(), Shelf(), Watch(connector=Unreachable))
    old = settings()
    new = msgspec.structs.replace(old, deadlines=Deadlines(connect=9.5))

    async def send() -> None:
        with pytest.raises(EngineUnreachableError):
            async with asyncio.timeout(20):
                await proxy.legs.send("POST", NODES[1].url, "/tokenize", (), b"{}")

    try:
        await send()
        LiveSettings(proxy, lambda _: None).use(old, new)
        await send()
        assert Unreachable.waits == [2.0, 9.5]
    finally:
        await proxy.stop()
