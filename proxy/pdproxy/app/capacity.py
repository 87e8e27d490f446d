"""Wiring of engines' bounds: what engines report goes in; places, their tokens, and who has room,
come out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdproxy.app.demand import PoolDemand
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.slow_engines import SlowEngines
from pdproxy.observe.description import NODE, MergeRule, Samples, gauge
from pdproxy.observe.events import (
    Event,
    LegFailed,
    MemberChanged,
    NodeChanged,
    Observers,
    RequestEnded,
)
from pdproxy.scheduling.capacity import Load, Windows
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy.settings.limits import AUTO, Limits
from pdproxy.upstream.metrics_page import NO_METRICS, Scrape

FULL = 503
"""The status with which vLLM refuses a request because its queue is full
(`--max-num-queued-reqs`).
"""
CAPACITY = gauge(
    "pdproxy_capacity",
    "requests",
    "Requests that an engine can take now (limits.engine_requests). Engines without such a bound "
    "are not shown",
    NODE,
    workers=MergeRule.MOST,
)


class Places(Protocol):
    """The places of a pool's requests: all of the proxy's, or those of one pool of several."""

    @property
    def inflight(self) -> int:
        """Requests being served."""

    def resize(self, places: int | None, tokens: int) -> None:
        """Change the number of places, and how many tokens they hold; None and 0: no bound."""


class Bounded(Protocol):
    """Requests whose number and tokens are bounded."""

    def resize(self, places: int | None, tokens: int = 0) -> None:
        """Change the bounds; None and 0: there are none."""


class ProxyPlaces:
    """The places of a proxy with several pools: as many as all pools together can take."""

    def __init__(self, admission: Bounded) -> None:
        self._admission = admission
        self._pools: dict[_PlacesOfPool, tuple[int | None, int]] = {}
        """What each can take; None: any number of requests."""

    def of(self, engines: EngineRegistry) -> Places:
        """Return the places of one more pool."""
        part = _PlacesOfPool(engines, self._resized)
        self._pools[part] = None, 0
        return part

    def _resized(self, part: _PlacesOfPool, places: int | None, tokens: int) -> None:
        self._pools[part] = places, tokens
        serving = {one: bound for one, (bound, _) in self._pools.items() if one.serves}
        bounds = [bound for bound in serving.values() if bound is not None]
        # A pool that can't serve takes no more than it has, and does not lift the bound of the
        # others.
        bounds += [one.inflight for one in self._pools if one not in serving]
        is_bounded = bool(serving) and None not in serving.values()
        self._admission.resize(
            sum(bounds) if is_bounded else None, sum(each for _, each in self._pools.values())
        )


class _PlacesOfPool:
    def __init__(
        self, engines: EngineRegistry, resized: Callable[[_PlacesOfPool, int | None, int], None]
    ) -> None:
        self._engines = engines
        self._resized = resized

    @property
    def inflight(self) -> int:
        return sum(_own(one) for one in self._engines.values() if _answers(one))

    @property
    def serves(self) -> bool:
        return any(one.in_ledger.available for one in self._engines.values() if _answers(one))

    def resize(self, places: int | None, tokens: int) -> None:
        self._resized(self, places, tokens)


class PoolCapacity:
    """Keeps the number of places at what the pool's engines can take, and has the ledger prefer
    engines with room.

    `replicas`: how many proxies the engines have. Each has its part of a bound that is given, one
    request at least.
    A watcher of engines, and an observer.
    """

    only = (NodeChanged, MemberChanged, RequestEnded, LegFailed)

    def __init__(
        self,
        limits: Limits,
        engines: EngineRegistry,
        admission: Places,
        replicas: int = 1,
    ) -> None:
        self._windows = Windows()
        self._limits, self._replicas = limits, replicas
        self._bound()
        self._engines = engines
        self._admission = admission
        self._going: list[Engine] = []
        """Engines on their way out that still answer clients."""
        self._left = 0
        """Their requests at the last look. They take no places from engines that stay."""

    def _bound(self) -> None:
        limits = self._limits
        self._learns = limits.engine_requests == AUTO
        fixed = None if isinstance(limits.engine_requests, str) else limits.engine_requests
        self._windows.fixed = max(1, round(fixed / self._replicas)) if fixed else None
        self._tokens = -(-limits.engine_tokens // self._replicas)

    def configure(self) -> None:
        """Use the settings as they are now. Windows that were learned before are used again."""
        self._bound()
        self._resize()

    def use_replicas(self, replicas: int) -> None:
        """Note that the engines have another number of proxies."""
        self._replicas = replicas
        self.configure()

    def scraped(self, engine: Engine, metrics: Scrape) -> None:
        """Take what an engine reports."""
        if self._learns and _has_window(engine):
            # Without those that wait for KV: by them a decode engine is full at any load.
            waiting = metrics.waiting if metrics.queued is None else metrics.queued
            self._windows.seen(_load(engine), waiting, metrics.kv_usage)
            self._resize()

    def refused(self, url: str) -> None:
        """Note that an engine has refused a request since it has too many."""
        engine = self._engines.get(url)
        if self._learns and engine is not None and _has_window(engine):
            self._windows.refused(_load(engine))
            self._resize()

    def look(self) -> None:
        """Look at what is left of the requests of engines on their way out, which other processes
        may serve.
        """
        if self._going and self._left != self._requests_left():
            self._resize()

    def notify(self, event: Event) -> None:
        """Follow engines that go up and down, and one that refuses requests."""
        match event:
            case NodeChanged(ledger_engine, up=up):
                if not up:
                    self._windows.forget(ledger_engine)
                self._resize()
            case MemberChanged():
                self._resize()
            case RequestEnded() if self._going and self._left != self._requests_left():
                self._resize()
            case LegFailed(node=url, status=status) if status == FULL:
                self.refused(url)

    def added(self, engine: Engine) -> None:
        """Nothing is to be done: nothing is sent to a new engine before it is up."""

    def removed(self, engine: Engine) -> None:
        """Take what a removed engine could do from the places."""
        if engine.url != self._engines.replaced:
            self._windows.forget(engine.url)
        self._resize()

    def show(self, observers: Observers) -> None:
        """Show the windows."""

        def windows() -> Samples:
            found = (
                (url, self._windows.of(_load(engine))) for url, engine in self._engines.items()
            )
            return [((url,), window) for url, window in found if window is not None]

        observers.show(CAPACITY, windows)

    def _resize(self) -> None:
        engines = [engine for engine in self._engines.values() if _has_window(engine)]
        for engine in engines:
            engine.in_ledger.window = self._windows.of(_load(engine))
        usable = [_load(engine) for engine in engines if engine.in_ledger.available]
        going = [
            engine for engine in self._engines.values() if engine.in_ledger.draining is not None
        ]
        going += [engine for engine in self._engines.leaving if engine.url not in self._engines]
        self._going = [engine for engine in going if _own(engine) and _answers(engine)]
        self._left = self._requests_left()
        places = self._windows.places(usable, self._admission.inflight - self._left)
        answering = sum(not load.prefills for load in usable) + len(self._going)
        self._admission.resize(
            None if places is None else places + self._left, self._tokens * max(answering, 1)
        )

    def _requests_left(self) -> int:
        return min(sum(map(_own, self._going)), self._admission.inflight)


class Scraped:
    """Passes what engines report to the audit, the pool's capacity and the ledger."""

    def __init__(
        self, auditor: Auditor, ledger: Ledger, observers: Observers, now: Callable[[], float]
    ) -> None:
        self._auditor = auditor
        self._ledger = ledger
        self._replicas = ledger if isinstance(ledger, ReplicaLedger) else None
        self._observers = observers
        self._now = now
        self.capacity: PoolCapacity | None = None
        """None where there are no windows."""
        self.slow: SlowEngines | None = None
        self.demand: PoolDemand | None = None
        """Both are set once they are made, behind the probes."""

    def scraped(self, engine: Engine, metrics: Scrape) -> None:
        """Take what an engine has just reported."""
        self._auditor.scraped(engine, metrics)
        if self.capacity is not None:
            self.capacity.scraped(engine, metrics)
        if self.slow is not None:
            self.slow.scraped(engine, metrics)
        if self.demand is not None:
            self.demand.scraped(engine, metrics)
        engine.kv_expired = metrics.expired
        engine.kv_usage = None if metrics is NO_METRICS else metrics.kv_usage
        if self._replicas is not None:
            count = None if metrics.waiting is None else metrics.running + metrics.waiting
            self._replicas.reported(engine.url, count, self._now())
        if self._ledger.mark_asleep(engine.url, metrics.asleep):
            role, how = engine.in_ledger.role.value, metrics.asleep
            reason = "it is awake" if how is None else how
            self._observers.notify(
                NodeChanged(engine.url, role, up=how is None, reason=reason, state="asleep")
            )
        self._ledger.when_noted(engine.url)


def _load(engine: Engine) -> Load:
    return Load(engine.url, _own(engine), prefills=engine.in_ledger.role is Role.PREFILL)


def _answers(engine: Engine) -> bool:
    return engine.in_ledger.role not in (Role.ENCODE, Role.PREFILL)


def _has_window(engine: Engine) -> bool:
    """Return whether an engine's requests are bounded: an encoder engine has nothing that they
    could fill.
    """
    return engine.in_ledger.role is not Role.ENCODE


def _own(engine: Engine) -> int:
    """Return how many requests an engine has of this proxy, of all its workers."""
    return engine.in_ledger.known_load[0]
