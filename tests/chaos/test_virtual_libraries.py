"""asyncio's streams, uvicorn's protocol, aiohttp and a simulated engine run on a virtual
network.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.chaos.virtual.connector import VirtualConnector
from tests.chaos.virtual.network import HOST, VirtualNetwork
from tests.chaos.virtual.ports import VirtualPorts
from tests.fakes.virtual import run


async def _slow_app(scope, receive, send) -> None:
    body = (await receive())["body"]
    await asyncio.sleep(3600)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(3):
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(1800)
    await send({"type": "http.response.body", "body": b"end"})


@asynccontextmanager
async def session():
    async with aiohttp.ClientSession(
        connector=VirtualConnector(), timeout=aiohttp.ClientTimeout()
    ) as made:
        yield made


def test_uvicorns_protocol_and_aiohttp_take_hours_in_no_time() -> None:
    async def main(network: VirtualNetwork) -> None:
        config = uvicorn.Config(
            _slow_app, http=HttpToolsProtocol, log_config=None, lifespan="off", ws="none"
        )
        config.load()
        state = ServerState()
        network.listen("10.0.0.1", 80).accept(lambda: HttpToolsProtocol(config, state, {}))
        loop = asyncio.get_running_loop()
        begun, really = loop.time(), time.monotonic()
        async with session() as http, http.post("http://10.0.0.1:80/", data=b"body") as answer:
            assert await answer.text() == "bodybodybodyend"
        assert loop.time() - begun == pytest.approx(9000, abs=1)
        assert time.monotonic() - really < 60
        await asyncio.sleep(6)
        assert not network.open

    run(main)


def test_aiohttps_errors_and_deadlines() -> None:
    async def main(network: VirtualNetwork) -> None:
        async with session() as http:
            with pytest.raises(aiohttp.ClientConnectorError) as refused:
                await http.get("http://10.0.0.1:80/")
            assert refused.value.errno == 111
            network.listen("10.0.0.1", 80)
            with pytest.raises(TimeoutError):
                await http.get("http://10.0.0.1:80/", timeout=aiohttp.ClientTimeout(total=7))
            network.link(HOST.get(), "10.0.0.1").cut()
            with pytest.raises(aiohttp.ConnectionTimeoutError):
                await http.get("http://10.0.0.1:80/", timeout=aiohttp.ClientTimeout(sock_connect=7))

    run(main)


def test_two_engines_hand_kv_over_and_one_restarts() -> None:
    async def main(network: VirtualNetwork) -> None:
        ports = VirtualPorts(network)
        engines = [
            SimServer(
                SimFacts(
                    role=role,  # type: ignore[arg-type]
                    eos_every=0,
                    side_channel_host=host,
                    side_channel_port=5600,
                    hardware=Hardware(),
                ),
                host=host,
                port=8000,
                chance=7,
                network=ports,
            )
            for role, host in (("prefill", "10.0.0.1"), ("decode", "10.0.0.2"))
        ]
        for engine in engines:
            await engine.start()
        body = {
            "model": "sim",
            "prompt": "the quick brown fox " * 20,
            "max_tokens": 1,
            "temperature": 0,
        }
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        async with session() as http:
            for _ in range(2):
                sent = {**body, "kv_transfer_params": asked}
                async with http.post(engines[0].url + "/v1/completions", json=sent) as answer:
                    handle = json.loads(await answer.read())["kv_transfer_params"]
                sent = {**body, "max_tokens": 5, "kv_transfer_params": handle}
                async with http.post(engines[1].url + "/v1/completions", json=sent) as answer:
                    assert answer.status == 200
                    text = json.loads(await answer.read())["choices"][0]["text"]
                    assert text
                assert not engines[0].engine.handles
                await engines[0].restart(down=5)
        assert engines[1].engine.stats.prompt_tokens_by_source["external_kv_transfer"]
        for engine in engines:
            await engine.stop()

    run(main)
