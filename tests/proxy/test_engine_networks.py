"""`engines.networks` while requests are served: engines that operators add, and hosts that engines name."""

from __future__ import annotations

import json

import msgspec
import pytest

from pdproxy.settings.engine_networks import EngineSettings
from pdproxy.settings.schema import Settings
from tests.fakes.admin import BASE, admin
from tests.fakes.pool import pool
from tests.fakes.world import until, world
from tests.proxy.test_connectors import COMPLETIONS, completion, same
from tests.proxy.test_membership import started

METADATA = "169.254.169.254"


@pytest.mark.parametrize("url", [f"http://{METADATA}:80", "http://[fd00:ec2::254]:80", "http://0xa9fea9fe:80"])
async def test_an_address_at_which_no_engine_may_be_is_not_added(url: str) -> None:
    """By no route of the admin API, and nothing is sent there. The answer names the setting."""
    async with world() as w, admin(w) as api:
        refused = await api.post("/engines", {"url": url, "role": "decode"})
        assert refused.status == 400
        assert "engines.networks can allow it" in refused.json["error"]["message"]
        assert (await api.ask("POST", f"/add_worker?url={url}&worker_type=decode")).status == 400
        assert len(w.proxy.engines) == 2


async def test_a_name_that_leads_elsewhere_is_never_asked() -> None:
    """It may be added, since names change; it gets no connection, and `/ready` says why."""

    def far(settings: Settings) -> Settings:
        return msgspec.structs.replace(settings, engines=EngineSettings(networks=("127.0.0.2/32", "10.0.0.0/8")))

    async with world(adjust=far, probed=False) as w, admin(w) as api:
        new = await started(w, "decode")
        url = new.url.replace("127.0.0.1", "localhost")
        assert (await api.post("/engines", {"url": url, "role": "decode"})).status == 201
        await w.probe()
        await until(lambda: w.proxy.engines[url].node.probed)
        assert (await api.ask("GET", f"{BASE}/engines")).status == 200
        state = w.proxy.engines[url].node
        assert not state.up
        details = (await w.get("/ready")).json
        assert "is not in engines.networks" in json.dumps(details)
        assert not new.requests


@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
async def test_an_engine_that_names_another_host_moves_no_kv(connector: str) -> None:
    """A decode engine never gets that host: the prompt is served by one engine alone, as without a handle."""
    facts = {"side_channel_host": METADATA}
    async with pool(connector, p=facts, notices=False, kv_ready={"notifier": False}) as pair:
        await same(pair, COMPLETIONS, completion())
        assert not [one for one in (*pair.d.requests, *pair.d.releases) if METADATA.encode() in one.body]
        assert pair.loaded == 0
