"""Engines that name a host at which others do not reach them: the settings' host goes to the decode
engine, and to releases.
"""

from __future__ import annotations

import json

import pytest

from pdproxy.observe.events import HandleEnded
from tests.fakes.client import request
from tests.fakes.pool import pool
from tests.fakes.world import until
from tests.proxy.test_connectors import CHAT, COMPLETIONS, chat, completion, same

ELSEWHERE = "203.0.113.9"
"""An address that nobody has: the engine names it, and listens on the loopback."""


@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
async def test_the_host_of_the_url(connector: str) -> None:
    """For both routes; the engine's own host is in its answer, and not in the decode leg."""
    facts = {"side_channel_host": ELSEWHERE}
    async with pool(
        connector,
        p=facts,
        notices=False,
        kv_ready={"notifier": False},
        pool_settings={"remote_host": "url"},
    ) as pair:
        await same(pair, COMPLETIONS, completion())
        await same(pair, CHAT, chat(stream=True))
        await same(pair, COMPLETIONS, completion(prompt="another " * 40))
        assert pair.loaded > 0
        hosts = {one.kv["remote_host"] for one in pair.d.requests if one.kv is not None}
        assert hosts == {"127.0.0.1"}


async def test_the_host_of_one_engine() -> None:
    """A node's own setting, and a release: the client leaves, and the decode engine reaches P to
    report it.
    """
    facts = {"side_channel_host": ELSEWHERE}
    async with pool("nixl", p=facts, notices=False, kv_ready={"notifier": False}) as pair:
        pair.world.proxy.engines[pair.p.url].kv_host = "localhost"
        await same(pair, COMPLETIONS, completion())
        pair.p.engine.freeze()
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion(prompt="x" * 300)))
        await until(lambda: len(pair.p.requests) == 2)
        client.close()
        pair.p.engine.thaw()
        await until(lambda: "released" in {event.end for event in pair.world.events(HandleEnded)})
        sent = [
            json.loads(one.body)["kv_transfer_params"]["remote_host"] for one in pair.d.releases
        ]
        assert set(sent) == {"localhost"}
        await until(lambda: not pair.p.engine.handles)


async def test_without_the_setting_the_engines_own_host_is_sent() -> None:
    async with pool("nixl", kv_ready={"notifier": False}) as pair:
        await same(pair, COMPLETIONS, completion())
        named = {one.kv["remote_host"] for one in pair.d.requests if one.kv is not None}
        assert named == {"127.0.0.1"}
        assert all(engine.kv_host is None for engine in pair.world.proxy.engines.values())
