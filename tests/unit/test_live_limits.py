"""Limits that change while a proxy runs, beside what the engines can take."""

from __future__ import annotations

import msgspec

from pdproxy.app.compose import Proxy
from pdproxy.app.live import LiveSettings
from pdproxy.observe.events import NodeChanged
from pdproxy.scheduling.nodes import Evidence
from pdproxy.settings.limits import Limits
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
