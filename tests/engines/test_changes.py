"""Engines added, drained and removed by file, by the admin API and by DNS, under streams, on real
engines: nothing is lost.
"""

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.name_server import name_server

from .client import ask
from .engine import Engine
from .fleet import Fleet
from .prompts import question
from .proxy import Proxy
from .shapes import CHAT, Body

pytestmark = pytest.mark.engines

STREAMS, TOKENS = 8, 48
PATIENCE = 90.0


class Streams:
    """Clients that stream one answer after the other, each of which must be the plain engine's."""

    def __init__(self, fleet: Fleet, proxy: Proxy) -> None:
        self._plain, self._proxy = fleet.plain, proxy
        self.served = 0
        self.wrong: list[str] = []
        self._ending = False

    async def run(self) -> None:
        """Be one client."""
        while not self._ending:
            body: Body = {
                "model": "tiny",
                "messages": question(secrets.token_hex(6)),
                "temperature": 0,
            }
            body |= {"max_tokens": TOKENS, "ignore_eos": True, "stream": True}
            answer = await ask(self._proxy.url, CHAT, body)
            self.served += 1
            plain = await ask(self._plain.url, CHAT, body)
            if answer.events[-1:] != ["[DONE]"] or answer.text != plain.text:
                self.wrong.append(
                    f"{answer.text!r} for {plain.text!r}: {answer.status} {answer.broken} "
                    f"{answer.body[-300:]!r}"
                )

    async def more(self, count: int = STREAMS) -> None:
        """Return when so many have been served that are not yet."""
        wanted = self.served + count
        async with asyncio.timeout(PATIENCE):
            while self.served < wanted:
                await asyncio.sleep(0.1)

    def end(self) -> None:
        """Begin no more."""
        self._ending = True


@asynccontextmanager
async def streaming(fleet: Fleet, proxy: Proxy) -> AsyncIterator[Streams]:
    """Have clients stream; behind that, all answers were right."""
    streams = Streams(fleet, proxy)
    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(streams.run())
        try:
            await streams.more()
            yield streams
        finally:
            streams.end()
    assert streams.wrong == []


async def _pdproxy(*arguments: str, code: int = 0) -> str:
    """Run the command line, as an operator does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdproxy.cli.main", *arguments),
        stdout=-1,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(PATIENCE):
        out, _ = await process.communicate()
    assert process.returncode == code, out
    return out.decode()


async def _until_serving(admin: str, wanted: set[str]) -> None:
    """Return when exactly these engines are there, and each serves."""
    async with asyncio.timeout(PATIENCE):
        while True:
            listed = json.loads(await _pdproxy("engines", "list", "--json", "--admin", admin))[
                "engines"
            ]
            if {one["url"]: one["state"] for one in listed} == dict.fromkeys(wanted, "serving"):
                return
            await asyncio.sleep(0.3)


def _file(path: Path, admin: str, *engines: Engine, **more: Any) -> None:
    ledger_engines = [{"url": engine.url, "role": engine.role} for engine in engines]
    pool: dict[str, Any] = {"nodes": [*ledger_engines, *more.pop("nodes", [])]}
    settings = {"listen": {"admin": admin}, "pools": [pool], "health": {"slow_start": 1}, **more}
    # Each engine must serve, and of engines that share cores some are several times slower.
    settings["outliers"] = {"interval": 0}
    path.write_text(json.dumps(settings))  # JSON is YAML


@pytest.mark.timeout(600, func_only=True)
async def test_engines_come_and_go_under_streams(fleet: Fleet, tmp_path: Path) -> None:
    """Each of the second pair is added, drained, used again and removed by hand; the first pair's
    go and come by file.
    """
    (p1, p2), (d1, d2) = fleet.prefills[:2], fleet.decodes[:2]
    admin, path = f"unix:{tmp_path}/admin.sock", tmp_path / "proxy.yaml"
    _file(path, admin, p1, d1)
    proxy = Proxy.start([], [], tmp_path, config=path)
    try:
        async with streaming(fleet, proxy) as streams:
            for engine in (p2, d2):
                await _pdproxy(
                    "engines", "add", engine.url, "--role", engine.role, "--wait", "--admin", admin
                )
                await streams.more()
            served = {one.url: _served(one) for one in (p1, p2, d1, d2)}
            for engine in (p2, d2):
                await _pdproxy("engines", "drain", engine.url, "--wait", "--admin", admin)
                await streams.more()
                await _pdproxy("engines", "undrain", engine.url, "--wait", "--admin", admin)
                await streams.more()
            # A pool needs a decode engine: the file gives up one, and wants the one that was added
            # by hand.
            _file(path, admin, p1, d2)
            # it is the file's
            await _pdproxy("engines", "remove", d1.url, "--admin", admin, code=1)
            proxy.process.send_signal(signal.SIGHUP)
            await _until_serving(admin, {p1.url, p2.url, d2.url})
            await streams.more()
            _file(path, admin, p1, d1)
            proxy.process.send_signal(signal.SIGHUP)
            await _until_serving(admin, {p1.url, p2.url, d1.url, d2.url})
            await streams.more(2 * STREAMS)
            more = {one.url: _served(one) - served[one.url] for one in (p1, p2, d1, d2)}
            assert all(more.values()), f"{more}: {proxy.tail()}"
            for engine in (p2, d2):
                await _pdproxy("engines", "remove", engine.url, "--wait", "--admin", admin)
                await streams.more()
            await _until_serving(admin, {p1.url, d1.url})
        page = proxy.counters()
        assert not [url for url in page.by("pdproxy_node_up", "node") if url in (p2.url, d2.url)]
        assert (
            page.sum("pdproxy_requests_total", outcome="ok")
            == page.sum("pdproxy_requests_total")
            == streams.served
        )
    finally:
        assert proxy.stop() == 0, proxy.tail()


def _served(engine: Engine) -> float:
    return engine.counters().sum("vllm:request_success_total")


@pytest.mark.timeout(600, func_only=True)
async def test_engines_that_dns_names_come_and_go(fleet: Fleet, tmp_path: Path) -> None:
    """The second pair appears in DNS beside the first one, and takes its place."""
    (p1, p2), (d1, d2) = fleet.prefills[:2], fleet.decodes[:2]
    admin, path = f"unix:{tmp_path}/admin.sock", tmp_path / "proxy.yaml"
    async with name_server() as names:

        def have(*engines: Engine) -> None:
            for role in ("prefill", "decode"):
                ports = [engine.url.rpartition(":")[2] for engine in engines if engine.role == role]
                names.records[f"_{role}._tcp.example", "SRV"] = (
                    1,
                    [f"0 0 {port} 127.0.0.1." for port in ports],
                )

        have(p1, d1)
        nodes = [
            {"url": f"srv://_{role}._tcp.example", "role": role} for role in ("prefill", "decode")
        ]
        _file(
            path, admin, nodes=nodes, dns={"servers": [names.address], "min_ttl": 0.5, "max_ttl": 1}
        )
        proxy = await asyncio.to_thread(Proxy.start, [], [], tmp_path, config=path)
        try:
            async with streaming(fleet, proxy) as streams:
                for engines in ((p1, p2, d1, d2), (p2, d2), (p1, p2, d1, d2), (p1, d1)):
                    have(*engines)
                    await _until_serving(admin, {one.url for one in engines})
                    before = {one.url: _served(one) for one in engines}
                    await streams.more(2 * STREAMS)
                    more = {one.url: _served(one) - before[one.url] for one in engines}
                    assert all(more.values()), f"{more}: {proxy.tail()}"
            page = proxy.counters()
            assert page.sum("pdproxy_requests_total", outcome="ok") == page.sum(
                "pdproxy_requests_total"
            )
        finally:
            assert proxy.stop() == 0, proxy.tail()
