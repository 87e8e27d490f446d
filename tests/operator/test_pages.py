"""What is asked of proxies at /metrics: by whom with which key, how long, and what is not an
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pdproxy_operator import pages
from pdproxy_operator.keys import digest_of, key_of
from pdproxy_operator.own import OwnPod
from pdproxy_operator.pages import Pages
from pdproxy_operator.resources import Name, Proxy
from tests.fakes.world import until
from tests.operator.resources import proxy

SECRET = "s" * 32
PAGE = b"""pdproxy_node_info{node="http://e:1",pod="e",role="decode",pool="p"} 1
pdproxy_state{state="ok"} 1
"""


class Store:
    """Two PDProxies of which one has pods."""

    def __init__(self, port: int) -> None:
        self.proxies = [
            proxy("some", config={"listen": {"port": port}}),
            proxy("none"),
        ]
        self.ready = {"127.0.0.1": True, "127.0.0.2": True, "127.0.0.3": False}

    def all_proxies(self) -> list[Proxy]:
        return self.proxies

    def pods(self, _: str) -> list[OwnPod]:
        return [self._pod(ip, ready) for ip, ready in self.ready.items()]

    def _pod(self, ip: str, ready: bool) -> OwnPod:
        conditions = [{"type": "Ready", "status": str(ready)}]
        metadata = {"name": f"pod-{ip}", "labels": {"pdproxy.dev/proxy": "some"}}
        status = {"podIP": ip, "conditions": conditions}
        return msgspec.convert({"metadata": metadata, "status": status}, OwnPod)


class Proxies:
    """Answers at two addresses. `how`: by the address."""

    def __init__(self) -> None:
        self.how: dict[str, str] = {}
        self.keys: list[tuple[str, str | None]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        host = request.host.partition(":")[0]
        self.keys.append((host, request.headers.get("authorization")))
        how = self.how.get(host)
        if how == "hangs":
            await asyncio.sleep(60)
        if how == "refuses":
            return web.Response(status=401)
        if how == "long":
            return web.Response(body=b"x" * (9 << 20))
        return web.Response(body=PAGE)


@asynccontextmanager
async def serving(proxies: Proxies) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/metrics", proxies.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    first = web.TCPSite(runner, "127.0.0.1", 0)
    await first.start()
    port = int(runner.addresses[0][1])
    await web.TCPSite(runner, "127.0.0.2", port).start()
    try:
        yield port
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "EVERY", 0.2)
    monkeypatch.setattr(pages, "DEADLINE", 1.0)


async def test_ready_proxies_are_asked_with_a_key_of_their_own() -> None:
    proxies, said = Proxies(), list[Name]()
    async with serving(proxies) as port:
        store: Any = Store(port)
        some, none = store.proxies
        made = Pages(store, SECRET, said.append)
        task = asyncio.create_task(made.run())
        try:
            assert not made.has_asked(some)
            await until(lambda: Name("llm", "some") in said)
            assert made.has_asked(some)
            assert made.has_asked(none)
            figures = made.figures(some)
            assert figures is not None
            assert (figures.total, figures.answered) == (2, 2)
            assert made.figures(none) is None
            key = key_of(SECRET, some.metadata.uid)
            assert {*proxies.keys} == {
                ("127.0.0.1", f"Bearer {key}"),
                ("127.0.0.2", f"Bearer {key}"),
            }
            assert len({key, key_of(SECRET, "another"), key_of("t" * 32, "uid-of-some")}) == 3
            assert len(digest_of(key)) == 64
            store.ready["127.0.0.2"] = False
            await until(lambda: _of(made, some) == (1, 1))
            store.ready["127.0.0.1"] = False
            await until(lambda: made.figures(some) is None)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("how", ["hangs", "refuses", "long"])
async def test_what_is_no_answer_harms_no_other(how: str) -> None:
    proxies = Proxies()
    proxies.how = {"127.0.0.2": how}
    async with serving(proxies) as port:
        store: Any = Store(port)
        made = Pages(store, None, lambda _: None)
        task = asyncio.create_task(made.run())
        try:
            await until(lambda: _of(made, store.proxies[0]) == (2, 1))
            assert {key for _, key in proxies.keys} == {None}
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _of(made: Pages, one: Proxy) -> tuple[int, int] | None:
    figures = made.figures(one)
    return None if figures is None else (figures.total, figures.answered)


def test_a_key_is_of_one_proxy_alone() -> None:
    uids: Mapping[str, str] = {uid: key_of(SECRET, uid) for uid in ("a", "b", "c")}
    assert len({*uids.values()}) == 3
