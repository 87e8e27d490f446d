"""Simulated engines, a proxy with an admin API in front of them, and traffic: what screenshots
show. One engine is down, and another one resets streams from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from pdproxy.app.admin import AdminSocket, serve_admin
from pdproxy.app.compose import Proxy
from pdproxy.app.listening import listen
from pdproxy.app.server import serve
from pdproxy.app.signals import Ending
from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.formats import make_formatter
from pdproxy.observe.lines import LineWriter
from pdproxy.observe.logs import Log
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.health import Probes
from pdproxy.settings.listen import AdminPlace, Listen
from pdproxy.settings.pools import Pool, PoolSlo
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer

MODEL = "llama-3.1-8b"
ROLES = ("prefill", "prefill", "decode", "decode", "decode")
SLOW = Hardware(speed=0.2)
"""So slow that two cores can simulate all engines beside a browser."""
RESETS = "reset@mid_stream:rate=0.04,events=12"
PEOPLE, PAUSE = 14, 1.2
"""Clients, and their mean seconds between an answer and the next question."""


def _engine(number: int, role: str) -> SimServer:
    facts: dict[str, Any] = {"role": role, "model": MODEL, "hardware": SLOW}
    return SimServer(
        SimFacts(
            num_gpu_blocks=768, max_model_len=4096, enable_prompt_tokens_details=True, **facts
        ),
        faults=[RESETS] if number == len(ROLES) - 1 else [],
        chance=number,
    )


def _settings(urls: list[str], port: int, admin_port: int) -> Settings:
    with socket.socket() as free:  # nobody listens there once it is closed
        free.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{free.getsockname()[1]}"
    nodes = zip([*urls, down], [*ROLES, "decode"], strict=True)
    pool = Pool(
        nodes=tuple(ConfiguredEngine(url=url, role=role) for url, role in nodes),  # type: ignore[arg-type]
        slo=PoolSlo(ttft=1.0, tpot=0.05, gap=0.012),
        profile="h200-8b",
        tokenize="off",
    )
    return Settings(
        listen=Listen(port=port, admin=f"127.0.0.1:{admin_port}", linger=0),
        pools=(pool,),
        probes=Probes(interval=1.0, scrape_interval=1.0),
    )


async def _ask(url: str, chance: random.Random) -> None:
    """Be a client who asks again and again."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        while True:
            words = int(20 * 40 ** chance.random())
            text = " ".join(f"{chance.randrange(1000)}" for _ in range(words))
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": chance.randint(20, 120),
                "stream": chance.random() < 0.95,
                "stream_options": {"include_usage": True},
            }
            if not body["stream"]:
                del body["stream_options"]
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post("/v1/chat/completions", json=body) as answer:
                    await answer.read()
            await asyncio.sleep(chance.expovariate(1 / PAUSE))


@asynccontextmanager
async def shown_fleet() -> AsyncIterator[str]:
    """Run all of it. Yields the URL of the admin listener."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(_engine(number, role))
            for number, role in enumerate(ROLES)
        ]
        listener = listen("127.0.0.1", 0)
        at = AdminSocket(AdminPlace(None, "127.0.0.1", 0))
        log = Log(LineWriter(io.StringIO(), str), make_formatter("text"), shows_requests=True)
        port, admin_port = listener.getsockname()[1], at.socket.getsockname()[1]
        settings = _settings([one.url for one in engines], port, admin_port)
        ready = asyncio.Event()

        def begin(proxy: Proxy) -> None:
            serve_admin(proxy, at, log)
            ready.set()

        ending = Ending()
        serving = asyncio.create_task(serve(settings, listener, ending, started=begin))
        await ready.wait()
        chance = random.Random(1)
        clients = [
            asyncio.create_task(_ask(f"http://127.0.0.1:{port}", random.Random(chance.random())))
            for _ in range(PEOPLE)
        ]
        try:
            yield f"http://127.0.0.1:{admin_port}"
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            ending.requested.set()
            ending.at_once.set()
            await serving
            at.close()
            log.close()
            listener.close()
