"""Every panel of the dashboards has data in a real Prometheus: of `pdproxy demo`, or, where it says
what it needs, of a proxy that has that.
"""

# Needs prometheus on PATH. The panels that need settings are looked at with a second proxy, in
# front of the demo's engines; those that need other engines or failures with the worlds of
# scraped.py.

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdproxy.fleet.gauges import NODE_INFO
from tests.demo.processes import PROMPT, environment, running
from tests.fakes.client import bearer, exchange, request
from tests.fakes.forked import piped
from tests.fakes.ports import free_port
from tests.proxy.scraped import worlds
from tests.reference.alerts import JOB
from tests.reference.boards import BOARDS
from tests.reference.panels import Panel

SECONDS, EVERY = 60.0, 2
"""For how long there is traffic, and how often Prometheus scrapes."""
KEY = "sk-of-a-team"
SETTINGS = """
listen: {{port: {port}, workers: 2, operator_routes: everywhere}}
auth: {{api_keys_file: {keys}}}
limits: {{engine_requests: 8}}
replicas: {{count: 2}}
pools:
- policy: {{placement: auto}}
  slo: {{ttft: 1, tpot: 0.1}}
  kv_events: {{enabled: true}}
  turns: {{bidirectional: true}}
  tokenize: always
  nodes: {nodes}
"""
LONG, SHORT = "word " * 200, "word"
"""A prompt that is split, and one that is shorter than a block."""


@asynccontextmanager
async def prometheus(folder: Path, *ports: int) -> AsyncIterator[int]:
    """A Prometheus that scrapes these proxies. Yields its port."""
    port = free_port()
    targets = [{"targets": [f"127.0.0.1:{one}" for one in ports]}]
    job = {"job_name": JOB, "static_configs": targets}
    times = {"scrape_interval": f"{EVERY}s"}
    (folder / "prometheus.yml").write_text(json.dumps({"global": times, "scrape_configs": [job]}))
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        process.terminate()
        await process.wait()


def values(port: int, instance: str, query: str) -> list[float]:
    """Return all numbers that a panel would show of one proxy over the last half minute."""
    chosen = {"$instance": re.escape(instance), "$engine": ".*", "$__rate_interval": "20s"}
    for name, value in chosen.items():
        query = query.replace(name, value.replace("\\", "\\\\"))
    now = time.time()
    asked = {"query": query, "start": now - 30, "end": now, "step": EVERY}
    url = f"http://127.0.0.1:{port}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    numbers = [float(value) for series in found for _, value in series["values"]]
    return [one for one in numbers if not math.isnan(one)]


def empty(port: int, instance: str, panels: list[Panel]) -> list[Panel]:
    """Return those of the panels of which a query has no data of this proxy."""
    return [
        panel
        for panel in panels
        if not all(values(port, instance, query.text) for query, _ in panel.queries)
    ]


async def page(port: int) -> str:
    return (await exchange(port, request("GET", "/metrics", b""))).body.decode()


async def ready(port: int) -> bool:
    try:
        return (await exchange(port, request("GET", "/ready", b""))).json["state"] == "ok"
    except OSError:
        return False


async def traffic(port: int) -> None:
    """Send prompts of all sorts to the second proxy."""
    headers = bearer(KEY)
    for number in range(10_000):
        prompt = f"{number} {SHORT if number % 2 else LONG}"
        body = {"model": "sim", "prompt": prompt, "max_tokens": 8, "stream": number % 4 < 2}
        answer = await exchange(port, request("POST", "/v1/completions", body, headers))
        assert answer.status in (200, 503), answer.body  # the demo kills engines
        await asyncio.sleep(0.1)


@pytest.mark.timeout(300)
async def test_each_panel_has_data_or_says_what_it_needs(tmp_path: Path) -> None:
    plain, other = free_port(), free_port()
    async with (
        running("--port", str(plain)) as demo,
        worlds(tmp_path) as small,
        prometheus(tmp_path, plain, other, *small) as port,
    ):
        await demo.until(PROMPT)
        text = await page(plain)
        nodes = [
            {"url": url, "role": role}
            for url, role in re.findall(
                rf'^{NODE_INFO.name}{{node="([^"]+)",pool="[^"]+",role="([^"]+)"}}',
                text,
                re.MULTILINE,
            )
        ]
        assert len(nodes) == 4
        (tmp_path / "keys").write_text(f"team:{KEY}\n")
        (tmp_path / "pdproxy.yaml").write_text(
            SETTINGS.format(port=other, keys=tmp_path / "keys", nodes=json.dumps(nodes))
        )
        served = await piped("serve", "--config", str(tmp_path / "pdproxy.yaml"), env=environment())
        try:
            while not await ready(other):
                await asyncio.sleep(0.2)
            sent = asyncio.create_task(traffic(other))
            await asyncio.wait([sent], timeout=SECONDS)
            left = [panel for board in BOARDS for panel in board.panels]
            without = await asyncio.to_thread(empty, port, f"127.0.0.1:{plain}", left)
            full, left = [panel for panel in left if panel not in without], without
            for one in (other, *small):
                left = await asyncio.to_thread(empty, port, f"127.0.0.1:{one}", left)
            assert not sent.done(), sent.exception()
            sent.cancel()
        finally:
            served.terminate()
            await served.wait()
    print(f"{len(full)} panels have data of `pdproxy demo`, {len(without)} say what they need")
    assert [panel.title for panel in without if not panel.needs] == []
    assert [panel.title for panel in full if panel.needs] == []
    print(f"{len(without) - len(left)} of these have data of a proxy that has what they need")
    assert [panel.title for panel in left] == []
