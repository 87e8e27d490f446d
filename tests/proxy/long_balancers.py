"""Rolling restarts behind each balancer: two proxies, one after the other, are terminated and
replaced, and no client notices; and a stream that is longer than a gateway's time-out.
"""

# Needs the programs of all balancers.

from __future__ import annotations

import asyncio
import re
import subprocess
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.chart.render import of_kind, rendered
from tests.chart.sets import SETS
from tests.fakes import scripts
from tests.fakes.client import Client
from tests.fakes.ports import free_port
from tests.fakes.process import served
from tests.fakes.world import COMPLETIONS, TEXT, completion, world
from tests.proxy.test_balancers import DEFAULTS, FRAME, at_ports, balanced, of_page

LINGER = 10.0
"""Seconds: the page's health checks notice within half of that, on a busy machine, too."""
CLIENTS = 4


def with_second(config: str, proxy: int) -> str:
    """The page's configuration with one more proxy behind the balancer."""
    lines = []
    for line in config.splitlines():
        lines.append(line)
        if re.match(r"\s+server (one )?127.0.0.1:8000|\s+- endpoint: ", line):
            lines.append(at_ports(line, 8080, proxy).replace("server one", "server two"))
        if line.strip() == "proxy_pass http://pdproxy;":
            # as the page says
            lines.append("proxy_next_upstream error timeout http_503 non_idempotent;")
    return "\n".join(lines) + "\n"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FRAME)
async def test_a_rolling_restart_costs_no_request(name: str, tmp_path: Path) -> None:
    """Whole answers and streams of clients that keep their connections, all the while."""
    seen: Counter[str] = Counter()
    stop = asyncio.Event()

    async def client_of(port: int, stream: bool) -> None:
        client = await Client.connect(port)
        while not stop.is_set():
            client.post(COMPLETIONS, completion(stream=stream))
            answer = await client.answer()
            is_right = answer.status == 200 and answer.ended and answer.text == TEXT
            seen["right" if is_right else f"{answer.status} {answer.body[:100]!r}"] += 1
            if answer.header("connection") == "close" or not answer.ended:
                client.close()
                client = await Client.connect(port)
            await asyncio.sleep(0.02)
        client.close()

    ports = [free_port(), free_port()]
    async with AsyncExitStack() as stack:
        stacks = [await stack.enter_async_context(AsyncExitStack()) for _ in ports]
        proxies = [
            await own.enter_async_context(
                served(subprocess.DEVNULL, workers=1, linger=LINGER, port=port)
            )
            for own, port in zip(stacks, ports, strict=True)
        ]
        config = with_second(of_page(name), ports[1])
        port = await stack.enter_async_context(balanced(name, config, ports[0], tmp_path))
        clients = [
            asyncio.create_task(client_of(port, bool(number % 2))) for number in range(CLIENTS)
        ]
        try:
            for number, at in enumerate(ports):
                before = seen["right"]
                while seen["right"] < before + 50:
                    assert not any(one.done() for one in clients)
                    await asyncio.sleep(0.1)
                proxies[number].process.terminate()
                assert await proxies[number].process.wait() == 0
                await stacks[number].aclose()
                again = served(subprocess.DEVNULL, workers=1, linger=LINGER, port=at)
                proxies[number] = await stacks[number].enter_async_context(again)
                await asyncio.sleep(5)  # the balancer sees that it is back
        finally:
            stop.set()
        await asyncio.gather(*clients)
    print(f"{name}: {seen['right']} requests while both proxies restarted: {dict(seen)}")
    assert set(seen) == {"right"}, seen


@pytest.mark.parametrize("is_routed", [False, True])
async def test_a_gateway_cuts_no_stream_with_the_route_of_the_chart(
    is_routed: bool, tmp_path: Path
) -> None:
    """Envoy is configured as gateways do for an HTTPRoute. Without one its time-out is 15 s."""
    (route,) = of_kind(rendered(SETS["behind a gateway"]), "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert "retry" not in rule
    timeout = f", timeout: {rule['timeouts']['request']}" if is_routed else ""
    config = DEFAULTS["envoy"].replace("{cluster: pdproxy}", f"{{cluster: pdproxy{timeout}}}")
    async with world() as w, balanced("envoy", config, w.port, tmp_path) as port:
        go = asyncio.Event()
        w.decode[0].script(scripts.after_word(go, scripts.one_more_word))
        client = await Client.connect(port)
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        assert scripts.WORD in await client.piece()
        await asyncio.sleep(17)
        go.set()
        assert (await client.rest(head)).ended == is_routed
