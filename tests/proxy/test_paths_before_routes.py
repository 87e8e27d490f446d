"""A path before all routes: of the proxy behind a balancer, and of engines behind one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from pdproxy.settings.engines import engine_url
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import free_port
from tests.fakes.world import CHAT, COMPLETIONS, TEXT, chat, completion, world


def below(settings: Settings) -> Settings:
    return msgspec.structs.replace(
        settings, listen=msgspec.structs.replace(settings.listen, root_path="/llm/a")
    )


async def test_a_balancer_may_strip_the_path_or_leave_it() -> None:
    """All routes are found both ways, and no other paths."""
    async with world(adjust=below) as w:
        for prefix in ("", "/llm/a"):
            assert (await w.ask(f"{prefix}{COMPLETIONS}?x", completion())).text == TEXT
            assert (
                await w.ask(f"{prefix}/tokenize", {"model": "tiny", "prompt": "x"})
            ).status == 200
            for path in (
                "/health",
                "/ready",
                "/v1/models",
                "/metrics",
                "/docs",
                "/docs/swagger-ui.css",
                "/openapi.json",
            ):
                assert (await w.get(prefix + path)).status == 200, path
        assert b'"/llm/a/docs/swagger-ui.css"' in (await w.get("/docs")).body
        assert (await w.get("/openapi.json")).json["servers"] == [{"url": "/llm/a"}]
        for path in ("/llm", "/llm/v1/completions", "/llm/a/llm/a/health"):
            assert (await w.ask(path, completion())).status == 404
            assert (await w.get(path)).status == 404


@asynccontextmanager
async def behind(engine: FakeEngine, path: str, port: int) -> AsyncIterator[None]:
    """Have an engine reached below a path of another port, and nowhere else there."""
    begins = re.compile(rb"\A(GET|POST) " + path.encode() + rb"(/\S*) HTTP/1.1\r\n")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection("127.0.0.1", engine.port)

        async def back() -> None:
            while data := await there.read(65536):
                writer.write(data)
            writer.close()

        task = asyncio.create_task(back())
        while data := await reader.read(1 << 20):
            if data[:4] in (b"GET ", b"POST"):
                assert begins.match(data), data[:100]
            here.write(begins.sub(rb"\1 \2 HTTP/1.1\r\n", data))
        here.close()
        await task

    async with await asyncio.start_server(serve, "127.0.0.1", port):
        yield


async def test_engines_behind_a_path() -> None:
    """Probes, metrics, legs, releases and passed requests all go below it."""
    ports: dict[str, int] = {}

    def moved(settings: Settings) -> Settings:
        (pool,) = settings.pools
        engines = [
            msgspec.structs.replace(node, url=f"http://127.0.0.1:{ports[node.role]}/{node.role}")
            for node in pool.nodes
        ]
        return msgspec.structs.replace(
            settings, pools=(msgspec.structs.replace(pool, nodes=tuple(engines)),)
        )

    ports = {role: free_port() for role in ("prefill", "decode")}
    async with AsyncExitStack() as stack, world(adjust=moved, probed=False) as w:
        for engine in w.engines:
            await stack.enter_async_context(behind(engine, f"/{engine.role}", ports[engine.role]))
        await w.probe()
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert (await w.ask(CHAT, chat(stream=True))).status == 200
        assert (await w.ask("/tokenize", {"model": "tiny", "prompt": "x"})).status == 200
        assert (await w.get("/ready")).json["state"] == "ok"
        assert w.books.endings == {"loaded": 2}


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://host:1/e1", "http://host:1/e1"),
        ("https://host/a/b.c/", "https://host:443/a/b.c"),
        ("http://host:1/", "http://host:1"),
    ],
)
def test_urls_with_a_path(url: str, wanted: str) -> None:
    assert engine_url(url, ("url",)) == wanted


@pytest.mark.parametrize(
    "path", ["/v1", "/e1/v1/", "//", "/a//b", "/..", "/a/../b", "/a%2fb", "/a;b"]
)
def test_urls_with_a_path_that_can_not_be(path: str) -> None:
    with pytest.raises(SettingsError, match="perhaps a path before its routes"):
        engine_url(f"http://host:1{path}", ("url",))
