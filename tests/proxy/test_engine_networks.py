"""`engines.networks` while requests are served: engines that operators add, and hosts that engines
name.
"""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from pdproxy.observe.events import HandleEnded, KvNoticed
from pdproxy.settings.engines import EngineSettings
from pdproxy.settings.schema import Settings
from tests.fakes.admin import BASE, admin
from tests.fakes.client import request
from tests.fakes.clock import ManualClock
from tests.fakes.pool import pool
from tests.fakes.world import until, world
from tests.proxy.test_connectors import COMPLETIONS, completion, same
from tests.proxy.test_membership import started
from tests.proxy.test_notifier import ours, speak

METADATA = "169.254.169.254"


@pytest.mark.parametrize(
    "url", [f"http://{METADATA}:80", "http://[fd00:ec2::254]:80", "http://0xa9fea9fe:80"]
)
async def test_an_address_at_which_no_engine_may_be_is_not_added(url: str) -> None:
    """By no route of the admin API, and nothing is sent there. The answer names the setting."""
    async with world() as w, admin(w) as api:
        refused = await api.post("/engines", {"url": url, "role": "decode"})
        assert refused.status == 400
        assert "engines.networks can allow it" in refused.json["error"]["message"]
        assert (await api.ask("POST", f"/add_worker?url={url}&worker_type=decode")).status == 400
        assert len(w.proxy.engines) == 2


async def test_an_engine_is_not_added_with_a_name_that_others_resolve() -> None:
    """Decode engines would get handles that name it."""

    def near(settings: Settings) -> Settings:
        return msgspec.structs.replace(settings, engines=EngineSettings(networks=("127.0.0.0/8",)))

    async with world(adjust=near) as w, admin(w) as api:
        new = {
            "url": "http://127.0.0.1:9",
            "role": "prefill",
            "facts": {"remote_host": "evil.example.com"},
        }
        refused = await api.post("/engines", new)
        assert refused.status == 400
        assert "engines.networks" in refused.json["error"]["message"]
        assert len(w.proxy.engines) == 2


@pytest.mark.parametrize("host", ["1\0", "10.1.2.3:1;169.254.169.254"])
async def test_an_engine_is_not_added_with_a_host_that_is_none(host: str) -> None:
    async with world() as w, admin(w) as api:
        new = {"url": "http://127.0.0.1:9", "role": "prefill", "facts": {"remote_host": host}}
        refused = await api.post("/engines", new)
        assert refused.status == 400
        assert "neither an address nor a name" in refused.json["error"]["message"]
        assert len(w.proxy.engines) == 2


async def test_a_name_that_leads_elsewhere_is_never_asked() -> None:
    """It may be added, since names change; it gets no connection, and `/ready` says why."""

    def far(settings: Settings) -> Settings:
        return msgspec.structs.replace(
            settings, engines=EngineSettings(networks=("127.0.0.2/32", "10.0.0.0/8"))
        )

    async with world(adjust=far, probed=False) as w, admin(w) as api:
        new = await started(w, "decode")
        url = new.url.replace("127.0.0.1", "localhost")
        assert (await api.post("/engines", {"url": url, "role": "decode"})).status == 201
        await w.probe()
        await until(lambda: w.proxy.engines[url].in_ledger.probed)
        assert (await api.ask("GET", f"{BASE}/engines")).status == 200
        state = w.proxy.engines[url].in_ledger
        assert not state.up
        details = (await w.get("/ready")).json
        assert "is not in engines.networks" in json.dumps(details)
        assert not new.requests


@pytest.mark.parametrize("host", [METADATA, f"[{METADATA}]", "1\0"])
@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
async def test_an_engine_that_names_another_host_moves_no_kv(connector: str, host: str) -> None:
    """A decode engine never gets that host: the prompt is served by one engine alone, as without a
    handle.
    """
    facts = {"side_channel_host": host}
    async with pool(connector, p=facts, notices=False, kv_ready={"notifier": False}) as pair:
        await same(pair, COMPLETIONS, completion())
        named = json.dumps(host).encode()
        assert not [one for one in (*pair.d.requests, *pair.d.releases) if named in one.body]
        assert pair.loaded == 0


async def test_a_notice_for_a_client_that_has_left_names_no_other_host() -> None:
    """Nobody is asked to release KV at a host that no engine may name."""
    clock = ManualClock()
    async with pool("nixl", notices=False, deadlines={"abandoned_prefill": 7}, clock=clock) as pair:
        address, orphans = (
            pair.world.proxy.notices.socket.address,
            pair.world.proxy.custodian.orphans,
        )
        assert address is not None
        pair.p.faults.add("stall@handed_over")
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion()))
        await until(lambda: pair.p.engine.handles)
        client.close()
        await until(lambda: orphans.count)
        named = {
            "do_remote_prefill": True,
            "remote_block_ids": [[1]],
            "remote_engine_id": "e",
            "remote_port": 80,
        }
        params = {**named, "remote_host": METADATA, "remote_request_id": "r", "tp_size": 1}
        leg = pair.p.journal.requests[-1].header("x-request-id")
        more = {
            "role": "P",
            "params": json.dumps(params).encode(),
            "prompt_ids": b"[1]",
            "tokens": 1,
        }
        assert leg is not None
        await asyncio.to_thread(speak, address, ours("ready", leg, **more))
        await until(
            lambda: [event for event in pair.world.events(KvNoticed) if event.result == "given_up"]
        )
        await until(lambda: not pair.world.proxy.custodian.snapshot()["held"][0])
        await clock.reach(7)
        assert pair.world.events(HandleEnded) == []
        assert not [
            one for one in (*pair.d.requests, *pair.d.releases) if METADATA.encode() in one.body
        ]
