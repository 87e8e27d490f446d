"""The registry of engines: the only place where engines are added to the proxy and removed.

Owns every `Engine`. A part that must act when engines come and go is a watcher of the registry.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from pdproxy.fleet.engine import Engine, EngineCredentials, ReceiveBuffer
from pdproxy.fleet.open_legs import OpenLegs
from pdproxy.kit.errors import EngineError
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import EngineSpec
from pdproxy.transfer.contract import Receiver
from pdproxy.upstream.client import EngineClient


class EngineWatcher(Protocol):
    """Is called when engines come and go."""

    def added(self, engine: Engine) -> None:
        """Take in an engine. It has not been probed yet."""

    def removed(self, engine: Engine) -> None:
        """Stop all work for an engine. Legs to it may still be under way."""


class EngineRegistry(Mapping[str, Engine]):
    """All engines of one pool by URL, in the order in which they were added.

    `known` holds the same engines, and those removed ones that are still needed: legs to them may
    be under way, or they may hold KV. Who has a lease or a custody finds its engine there. It is a
    plain dict for the data path; only the registry writes to it. `open_legs` makes an engine's open
    legs, of its URL.
    """

    def __init__(
        self, ledger: Ledger, open_legs: Callable[[str], OpenLegs] = lambda _: OpenLegs()
    ) -> None:
        self._ledger = ledger
        self._open_legs = open_legs
        self._engines: dict[str, Engine] = {}
        self.known: dict[str, Engine] = {}
        self.replaced: str | None = None
        """The URL of the engine that is removed now, and added at once with other settings. It is
        the same process: watchers keep what they know of that. Written by `Membership`.
        """
        self._leaving: list[Engine] = []
        self._watchers: list[EngineWatcher] = []
        self._named: list[Callable[[], Collection[str]]] = []
        self._forget: list[Callable[[str], None]] = []

    def __repr__(self) -> str:
        return f"<EngineRegistry {', '.join(self._engines) or 'without engines'}>"

    def __getitem__(self, url: str) -> Engine:
        return self._engines[url]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def leaving(self) -> Sequence[Engine]:
        """The removed engines that are still needed. One with the URL of an engine that is there
        was replaced by it.
        """
        return self._leaving

    def watch(self, watcher: EngineWatcher) -> None:
        """Call a watcher for each engine that is added or removed from now on."""
        self._watchers.append(watcher)

    def keep_known(self, named: Callable[[], Collection[str]]) -> None:
        """Keep removed engines in `known` while `named` returns their URLs."""
        self._named.append(named)

    def when_forgotten(self, forget: Callable[[str], None]) -> None:
        """Call `forget(url)` once nothing needs a removed engine any more, unless one with its URL
        has been added since.

        For those who note something of an engine when a leg to it ends.
        """
        self._forget.append(forget)

    def add(
        self,
        spec: EngineSpec,
        client: EngineClient,
        credentials: EngineCredentials | None = None,
        *,
        block_size: int | None = None,
        receiver: Receiver | None = None,
        buffer_capacity: int | None = None,
        ranks: int = 1,
        kv_host: str | None = None,
        tp_size: int | None = None,
        bootstrap: str | None = None,
        registered_as: str = "",
        kv_lease: float | None = None,
        ec_address: str | None = None,
    ) -> Engine:
        """Make an engine known to the ledger and to all watchers. It gets requests once it has
        answered a probe.

        `buffer_capacity`: chunks of KV that its receive buffer holds, None: no bound is known.
        `ranks`: its data-parallel size. `kv_host`: the host at which other engines reach it for KV,
        in place of the one that it names. `tp_size`: its tensor-parallel size, None: not known.
        `bootstrap`: the address of its bootstrap server, None: it has none. `registered_as`:
        `host:port` by which it registers. `kv_lease`: seconds for which it keeps KV that nobody
        reads. `ec_address`: where it receives encoder outputs that are pushed.

        Raises:
            ValueError: there is an engine with this URL.
        """
        if spec.url in self._engines:
            raise ValueError(f"{spec.url} is there already")
        self.forget_idle()
        buffer = ReceiveBuffer(buffer_capacity) if buffer_capacity is not None else None
        engine = Engine(
            self._ledger.add(spec),
            client,
            credentials or EngineCredentials(),
            block_size,
            receiver,
            buffer,
            ranks,
            kv_host,
            tp_size,
            bootstrap,
            registered_as,
            kv_lease,
            ec_address,
            open_legs=self._open_legs(spec.url),
        )
        self._engines[spec.url] = self.known[spec.url] = engine
        for watcher in self._watchers:
            watcher.added(engine)
        return engine

    def remove(self, url: str) -> Engine:
        """Take an engine out. It gets no new request; legs that run continue, and their leases are
        closed as usual.

        Raises:
            KeyError: there is no engine with this URL.
        """
        engine = self._engines.pop(url)
        self._ledger.remove(url)
        engine.client.retire()
        self._leaving.append(engine)
        for watcher in self._watchers:
            watcher.removed(engine)
        self.forget_idle()
        return engine

    def lists(self, model: str) -> bool:
        """Return whether any engine lists a model."""
        return any(engine.in_ledger.serves(model) for engine in self._engines.values())

    def key(self, url: str) -> str | None:
        """Return an engine's bearer token, None where it needs none. Raises EngineError if the
        engine was removed.
        """
        return self._leased(url).credentials.key()

    def tls(self, url: str) -> ssl.SSLContext | None:
        """Return an engine's TLS context, None for plain HTTP. Raises EngineError if the engine was
        removed.
        """
        return self._leased(url).credentials.tls()

    def _leased(self, url: str) -> Engine:
        engine = self.known.get(url)
        if engine is None:
            raise EngineError(f"{url} was removed")
        return engine

    def needed(self, engine: Engine) -> bool:
        """Return whether legs to an engine are under way, or it holds KV for us."""
        return self._is_needed(engine, self._urls_named())

    def forget_idle(self) -> bool:
        """Forget the removed engines that are not needed any more. Return whether any is left."""
        if not self._leaving:
            return False
        named = self._urls_named()
        going = [engine for engine in self._leaving if engine.url != self.replaced]
        idle = [engine for engine in going if not self._is_needed(engine, named)]
        self._leaving = [engine for engine in self._leaving if engine not in idle]
        needed = self._engines.keys() | {engine.url for engine in self._leaving}
        for url in {engine.url for engine in idle} - needed:
            del self.known[url]
            for forget in self._forget:
                forget(url)
        return bool(self._leaving)

    def _urls_named(self) -> set[str]:
        return {url for urls in self._named for url in urls()}

    @staticmethod
    def _is_needed(engine: Engine, named: Collection[str]) -> bool:
        held = engine.buffer.taken if engine.buffer is not None else 0
        return bool(engine.in_ledger.requests or held or engine.url in named)
