"""The pages of metrics of all proxies, asked for from time to time.

Owns what proxies have said last. Nothing of it is needed to reconcile: what is not known stays as
it is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from pdproxy.kit.errors import PdproxyError
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.admin import EngineAdmin
from pdproxy_operator.figures import Figures, add_page
from pdproxy_operator.keys import key_of
from pdproxy_operator.names import PROXY
from pdproxy_operator.own import OwnPod
from pdproxy_operator.proxy_settings import port_of, scheme_of
from pdproxy_operator.resources import Name, Proxy, name_of
from pdproxy_operator.store import Store

EVERY, DEADLINE = 15.0, 5.0
"""Seconds between two questions to a proxy, and for its answer."""
AT_ONCE = 8
"""Pages that are asked for at once: each may have megabytes."""
YOUNG = 60.0
"""Seconds for which what was said counts."""


class _Said(NamedTuple):
    uid: str
    at: float
    figures: Figures


class Pages:
    """Asks for pages. `secret` None: without keys; `said` gets each PDProxy whose proxies were
    asked.
    """

    def __init__(self, store: Store, secret: str | None, said: Callable[[Name], None]) -> None:
        self._store = store
        self._secret = secret
        self._said_of = said
        self._said: dict[Name, _Said] = {}
        self._asked: set[str] = set()
        """The uids of PDProxies whose proxies were asked once, or that had none."""
        self._keys: dict[str, str] = {}
        """By the URLs of proxies."""
        self._places = asyncio.Semaphore(AT_ONCE)
        self._admin = EngineAdmin(deadlines=Deadlines(probe=DEADLINE), key=self._keys.get)

    def __repr__(self) -> str:
        return f"<Pages of {len(self._said)} PDProxies>"

    def has_asked(self, proxy: Proxy) -> bool:
        """Return whether the proxies of a PDProxy were asked since this operator began."""
        return proxy.metadata.uid in self._asked

    def figures(self, proxy: Proxy) -> Figures | None:
        """Return what the proxies of a PDProxy have said, None if that is not known or old."""
        said = self._said.get(name_of(proxy))
        now = asyncio.get_running_loop().time()
        if said is None or said.uid != proxy.metadata.uid or now > said.at + YOUNG:
            return None
        return said.figures

    async def run(self) -> None:
        """Ask, until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                begun = loop.time()
                proxies = sorted(self._store.all_proxies(), key=self._turn)
                uids = {one.metadata.uid for one in proxies}
                self._asked &= uids
                self._said = {name: said for name, said in self._said.items() if said.uid in uids}
                self._keys.clear()
                async with asyncio.TaskGroup() as tasks:
                    for proxy in proxies:
                        tasks.create_task(self._ask(proxy))
                left = EVERY * random.uniform(0.9, 1.1) - (loop.time() - begun)
                await asyncio.sleep(max(left, EVERY / 10))
        finally:
            await self._admin.close()

    def _turn(self, proxy: Proxy) -> tuple[bool, float]:
        """Return when a PDProxy is asked. Those that nobody reaches come last, in any order: else
        they would hold up all others.
        """
        said = self._said.get(name_of(proxy))
        return said is not None and not said.figures.answered, random.random()

    async def _ask(self, proxy: Proxy) -> None:
        namespace, name = name_of(proxy)
        pods = [
            one
            for one in self._store.pods(namespace)
            if (one.metadata.labels or {}).get(PROXY) == name and one.is_ready
        ]
        if not pods:
            self._said.pop(name_of(proxy), None)
            if not self.has_asked(proxy):
                self._asked.add(proxy.metadata.uid)
                self._said_of(name_of(proxy))
            return
        figures, one_by_one = Figures(), asyncio.Lock()
        until = asyncio.get_running_loop().time() + EVERY

        async def ask(pod: OwnPod) -> None:
            try:
                async with asyncio.timeout_at(until):
                    await self._places.acquire()
            except TimeoutError:  # too many others do not answer
                add_page(figures, pod.metadata.name, None)
                return
            try:
                page = await self._page(proxy, pod)
                # a page is kept no longer than until it is read: proxies may be many
                async with one_by_one:
                    await asyncio.to_thread(add_page, figures, pod.metadata.name, page)
            finally:
                self._places.release()

        await asyncio.gather(*map(ask, pods))
        at = asyncio.get_running_loop().time()
        self._asked.add(proxy.metadata.uid)
        self._said[name_of(proxy)] = _Said(proxy.metadata.uid, at, figures)
        self._said_of(name_of(proxy))

    async def _page(self, proxy: Proxy, pod: OwnPod) -> bytes | None:
        """Return a proxy's page, None: no answer."""
        ip = pod.status.pod_ip
        host = f"[{ip}]" if ":" in ip else ip
        url = f"{scheme_of(proxy)}://{host}:{port_of(proxy)}"
        if self._secret is not None:
            self._keys[url] = key_of(self._secret, proxy.metadata.uid)
        try:
            return await self._admin.metrics(url)
        except PdproxyError:
            return None
