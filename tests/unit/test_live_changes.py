"""Pools that can't be made or changed, and limits that change beside what engines can take."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.app.live import LiveSettings
from pdproxy.observe.events import NodeChanged
from pdproxy.scheduling.nodes import Evidence
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kv_events import KvEvents
from pdproxy.settings.limits import Limits
from pdproxy.settings.policy import PoolPolicy
from pdproxy.settings.schema import Node, Pool, Settings
from tests.fakes.tokenizer import Shelf
from tests.unit.test_live_settings import NODES, settings


async def test_more_requests_than_engines_can_take() -> None:
    """A limit on all requests that is lowered, and raised again, leaves the bound of the engines as it was."""
    old = msgspec.structs.replace(settings(), limits=Limits(engine_requests=4))
    proxy = Proxy.build(old, Shelf())
    try:
        for engine in proxy.engines.values():
            proxy.ledger.mark_up(engine.url, Evidence(frozenset("m"), "1", 16, (), 0, 1.0))
        proxy.observers.notify(NodeChanged(NODES[1].url, "decode", up=True, reason=""))
        assert proxy.admission.places == 4
        live, less = (
            LiveSettings(proxy, lambda _: None),
            msgspec.structs.replace(old, limits=Limits(engine_requests=4, max_inflight=2)),
        )
        live.use(old, less)
        assert proxy.admission.places == 2
        live.use(less, old)
        assert proxy.admission.places == 4
    finally:
        await proxy.stop()


async def test_an_engine_that_cannot_be_put_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its key file was deleted with the change. The first failure is shown, the other pools are put back, and the log says so."""
    key = tmp_path / "key"
    key.write_text("secret")
    a, b, c, new = (Node(url=f"http://{name}:8000", role="decode") for name in "abcn")
    keyed = msgspec.structs.replace(b, api_key_file=str(key))

    def of(*pools: tuple[Node, ...]) -> Settings:
        return Settings(pools=tuple(Pool(name=f"pool {at}", nodes=nodes) for at, nodes in enumerate(pools)))

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
    first = Pool(name="first", nodes=(Node(url="http://a:8000", role="decode"),))
    return Settings(pools=(first, Pool(name="other", nodes=(Node(url="http://b:8000", role="decode"),), **fields)))


async def test_what_is_wrong_with_a_pool_names_it() -> None:
    """And its settings by their place in the file."""
    with pytest.raises(SettingsError, match=r"pool other: pools\[1\]\.tokenizer: .nowhere"):
        Proxy.build(second(tokenizer="nowhere", tokenize="always"), Shelf())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        events = KvEvents(enabled=True, host="127.0.0.1", port=taken.getsockname()[1])
        proxy = Proxy.build(second(kv_events=events, policy=PoolPolicy(prefill="prefix")), Shelf())
        try:
            with pytest.raises(SettingsError, match=r"pool other: can't bind pools\[1\]\.kv_events"):
                proxy.start()
        finally:
            await proxy.stop()
