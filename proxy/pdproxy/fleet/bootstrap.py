"""Bootstrap servers: which ranks each prefill engine has, for contracts whose decode legs name the
prefill engine's rank.

Owns the tasks that ask, and what they write: `EngineRun.peers`, and in the ledger why an engine
can't take part in KV transfer yet. A server is asked once its engine is up, again while it names a
part of the engine's ranks, and from then on at each interval: an engine that restarts between two
probes has other ids. An engine that is not named completely gets no pair. A server that fails later
changes nothing: the ids are known.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.errors import EngineError, EngineTimeoutError, OverloadedError
from pdproxy.kit.tasks import TaskOwner
from pdproxy.kit.text import truncate
from pdproxy.observe.description import NODE, Label, counter
from pdproxy.observe.events import (
    BootstrapAsked,
    DeadlinePassed,
    Event,
    HandleEnded,
    NodeChanged,
    Observers,
)
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.settings.health import Probes
from pdproxy.transfer.contract import Contract, PushedToDecode
from pdproxy.transfer.peers import Peer
from pdproxy.wire.bootstrap import RankAddresses, Ranks

NOT_ASKED = "its bootstrap server was not asked yet"
SOON = 0.5
"""Seconds until a server that has named a part of its engine's ranks, or has failed, is asked again
at first.
"""

MAX_GIVEN_UP = 10
"""Requests that a prefill engine may have given up while decode engines wait for their KV. Each
keeps one of its sending threads busy for minutes. vLLM's default is 20 of them: with none left,
nothing is transferred any more.
"""
STUCK = "stuck"
"""The end of such a request's handle."""

_Addresses = Mapping[str, str]
"""The address of each process of an engine, by its ranks as a text."""
BOOTSTRAP_QUERIES = counter(
    "pdproxy_bootstrap_queries_total",
    "questions",
    "Questions to the bootstrap servers of prefill engines",
    NODE,
    Label(
        "result",
        (
            ("complete", "it named all workers of the engine"),
            ("incomplete", "it named a part of them, or they can't be used: see /ready"),
            ("failed", "no answer, or none that can be read"),
        ),
    ),
    of=BootstrapAsked,
)


@dataclass(slots=True)
class Known:
    """What a server has said of its engine. Written by `Bootstraps`.

    `run`: the engine's run that it was said of, None: of none; `ranks`: what was said then.
    `addresses` by engine id: decode
    engines never forget those that they have asked for. `stale`: the runs of decode engines that
    may have asked for addresses which are no longer right. `given_up`: when requests of this run
    were given up that decode engines wait for, in monotonic seconds.
    """

    run: int | None = None
    ranks: Ranks = field(default_factory=dict)
    trouble: str | None = None
    addresses: dict[str, _Addresses] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)
    given_up: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_GIVEN_UP))
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class KnownServer(msgspec.Struct, array_like=True):
    """What is known of the server of one run of an engine: what it has answered last, None if it
    has not, or why it can't be used. `started`: when that run began, as the engine reports it.

    `stale`: decode engines that keep addresses which are no longer right, with their start times.
    `given_up`: when prompts were given up, in monotonic seconds.
    """

    url: str
    started: float
    ranks: dict[int, RankAddresses] | None
    trouble: str | None
    stale: list[tuple[str, float]]
    given_up: list[float]


class Bootstraps:
    """Asks the bootstrap server of each prefill engine.

    `query(address)` asks one, and raises EngineError. `contract` says for how long a decode engine
    waits for a request that a prefill engine has given up. An observer and a watcher of engines.
    `tasks` runs a task for each engine that has a server, from when the engine first comes up.
    """

    only = (HandleEnded, NodeChanged)

    def __init__(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        query: Callable[[str], Awaitable[Ranks]],
        observers: Observers,
        tasks: TaskOwner,
        probes: Probes,
        now: Callable[[], float],
        contract: Contract,
    ) -> None:
        self._engines = engines
        self._ledger = ledger
        self._query = query
        self._observers = observers
        self._tasks = tasks
        self._probes = probes
        self._now = now
        holder = contract.holder
        self._stuck_for = (holder.stuck_for if isinstance(holder, PushedToDecode) else None) or 0.0
        self._known: dict[Engine, Known] = {}
        self._running: dict[Engine, asyncio.Task[None]] = {}
        self.keep_asking: Callable[[Engine], None] = self._keep_asking
        """Called with an engine that is up in another run than its server has answered for: asks
        for it from now on. Set where another process asks.
        """
        self.changed: Callable[[Engine], None] = lambda _: None
        """Called with an engine of whose server something else is known."""
        self.when_given_up: Callable[[Engine], None] = lambda _: None
        """Called with an engine that has given up a prompt of this process."""
        engines.watch(self)

    def __repr__(self) -> str:
        return f"<Bootstraps of {len(self._known)} engines>"

    def added(self, engine: Engine) -> None:
        """Ask for one more engine, if it has a bootstrap server."""
        if engine.bootstrap is not None:
            self._known[engine] = Known()
            self._ledger.mark_kv(engine.url, NOT_ASKED)

    def removed(self, engine: Engine) -> None:
        """Ask no more for an engine."""
        self._known.pop(engine, None)
        if (task := self._running.pop(engine, None)) is not None:
            self._tasks.end(task)

    def notify(self, event: Event) -> None:
        """Have the server of an engine that has just come up asked at once. Until it has answered,
        the engine gets no pair.
        """
        if isinstance(event, HandleEnded):
            if event.end == STUCK and (stuck := self._engines.get(event.prefill)) is not None:
                self.gave_up(stuck)
                self.when_given_up(stuck)
            return
        if not isinstance(event, NodeChanged) or (engine := self._engines.get(event.node)) is None:
            return
        known = self._known.get(engine)
        if known is not None and event.up and known.run != engine.in_ledger.run_number:
            known.given_up.clear()
            self._ledger.mark_kv(engine.url, NOT_ASKED)
            known.wake.set()
            self.keep_asking(engine)

    def _keep_asking(self, engine: Engine) -> None:
        """Ask for an engine from now on."""
        if engine not in self._running:
            self._running[engine] = self._tasks.keep(
                partial(self.run, engine), f"bootstrap {engine.url}"
            )

    def gave_up(self, engine: Engine) -> None:
        """Note that a prompt was given up for which a decode engine waits."""
        if (known := self._known.get(engine)) is None:
            return
        known.given_up.append(self._now())
        if known.run is not None and (why := self._overrun(known)) is not None:
            self._ledger.mark_kv(engine.url, why)
        self.changed(engine)

    def _overrun(self, known: Known) -> str | None:
        """Return why no more prompts may be transferred from an engine, None if they may."""
        while known.given_up and known.given_up[0] <= self._now() - self._stuck_for:
            known.given_up.popleft()
        if len(known.given_up) < MAX_GIVEN_UP:
            return None
        return (
            f"has given up {MAX_GIVEN_UP} prompts or more for which decode engines wait, "
            f"{self._stuck_for:g} s each:"
            " with more of them its transfers stop"
        )

    def shortcomings(self) -> list[str]:
        """Return which servers have not answered the last time although their engines are up, a
        sentence each.
        """
        return [
            f"the bootstrap server of {engine.url} ({engine.bootstrap}): {known.trouble}"
            for engine, known in self._known.items()
            if known.trouble is not None and engine.in_ledger.up
        ]

    async def run(self, engine: Engine) -> None:
        """Ask for one engine until cancelled."""
        pause = SOON
        known = self._known[engine]
        while True:
            if engine.in_ledger.up:
                await self.ask(engine)
                most = self._probes.scrape_interval
                pause = most if engine.in_ledger.kv_not_ready is None else min(2 * pause, most)
            try:
                async with asyncio.timeout(pause):
                    await known.wake.wait()
                known.wake.clear()
                pause = SOON
            except TimeoutError:
                pass

    async def ask(self, engine: Engine) -> None:
        """Ask the server of an engine once, and note what it answers."""
        known, run = self._known[engine], engine.in_ledger.run_number
        assert engine.bootstrap is not None
        try:
            ranks = await self._query(engine.bootstrap)
        except OverloadedError:
            return  # which shows nothing of the server
        except EngineError as error:
            if isinstance(error, EngineTimeoutError):
                self._observers.notify(DeadlinePassed(error.wait.value, engine.url))
            self._observers.notify(BootstrapAsked(engine.url, "failed"))
            self._failed(engine, known, truncate(error.message))
            return
        if run != engine.in_ledger.run_number or engine not in self._known:
            return  # it has restarted meanwhile: the answer may be of the run before
        why = self._answered(engine, known, ranks)
        self._observers.notify(
            BootstrapAsked(engine.url, "complete" if why is None else "incomplete")
        )

    def _answered(self, engine: Engine, known: Known, ranks: Ranks) -> str | None:
        """Note what a server has answered. Return why its engine can't take part in KV transfer,
        None if it can.
        """
        why = self._learn(engine, known, ranks) or self._overrun(known)
        known.run, known.trouble, known.ranks = engine.in_ledger.run_number, None, ranks
        self._ledger.mark_kv(engine.url, why)
        self.changed(engine)
        return why

    def _failed(self, engine: Engine, known: Known, why: str) -> None:
        """Note that a server can't be used now."""
        known.trouble = why
        if known.run != engine.in_ledger.run_number:
            self._ledger.mark_kv(
                engine.url,
                f"has a bootstrap server at {engine.bootstrap} that can't be used: {why}",
            )
        self.changed(engine)

    def _learn(self, engine: Engine, known: Known, ranks: Ranks) -> str | None:
        """Take note of an engine's ranks. Return why it can't take part in KV transfer, None if it
        can.
        """
        peers = engine.run.peers
        peers.forget()
        if (more := [rank for rank in ranks if rank >= engine.ranks or rank < 0]) != []:
            # The engine would choose any of them for a leg, and the decode engine would wait at
            # another one.
            return (
                f"has a data-parallel rank {max(more)}, but facts.data_parallel_size is "
                f"{engine.ranks}"
            )
        for rank in range(engine.ranks):
            if rank not in ranks:
                return f"has a bootstrap server that does not know data-parallel rank {rank} yet"
            if (missing := ranks[rank].missing(engine.tp_size)) is not None:
                return f"has a bootstrap server that does not know {missing} yet"
        if (stale := self._stale(engine, known, ranks)) is not None:
            return stale
        for rank, one in ranks.items():
            peers.learn(
                Peer(
                    rank=rank,
                    ranks=engine.ranks,
                    engine_id=one.engine_id,
                    address=engine.bootstrap,
                    tp_size=one.tp_size,
                    pp_size=one.pp_size,
                )
            )
        return None

    def _stale(self, engine: Engine, known: Known, ranks: Ranks) -> str | None:
        """Return why other decode engines would ask at wrong addresses, None if they would not.

        A decode engine keeps the addresses of an engine id for ever. If the id is a fixed one and
        its engine has restarted, they are wrong, and each of its requests would wait for minutes.
        """
        decodes = {
            other.in_ledger.run_number: other.url
            for other in self._engines.values()
            if Role.DECODE in other.in_ledger.uses and other is not engine
        }
        found = {one.engine_id: _spelled(one.worker_addr) for one in ranks.values()}
        for engine_id, addresses in found.items():
            if known.addresses.get(engine_id, addresses) != addresses:
                known.stale |= decodes.keys()
        known.addresses = found
        known.stale &= decodes.keys()
        if not known.stale:
            return None
        urls = ", ".join(decodes[run] for run in sorted(known.stale))
        return (
            "has restarted with the engine_id that it had before, and decode engines keep its "
            "old addresses:"
            f" restart {urls}, and leave engine_id out of its --kv-transfer-config"
        )

    # -- what other processes know

    def has_asked(self, engine: Engine) -> bool:
        """Return whether a server has answered for an engine, in whatever run."""
        known = self._known.get(engine)
        return known is not None and known.run is not None

    def of(self, engine: Engine) -> KnownServer | None:
        """Return what is known of the server of an engine, None if it has none or is not up."""
        known, started = self._known.get(engine), _started(engine)
        if known is None or started is None:
            return None
        runs = {other.in_ledger.run_number: other for other in self._engines.values()}
        stale = [
            (runs[run].url, since)
            for run in sorted(known.stale)
            if run in runs and (since := _started(runs[run])) is not None
        ]
        ranks = dict(known.ranks) if known.run == engine.in_ledger.run_number else None
        return KnownServer(engine.url, started, ranks, known.trouble, stale, [*known.given_up])

    def restore(self, told: KnownServer) -> None:
        """Go on from what was known before, if nothing is known of the engine's run yet."""
        engine = self._engines.get(told.url)
        known = None if engine is None else self._known.get(engine)
        if engine is None or known is None or told.ranks is None:
            return
        if known.run != engine.in_ledger.run_number:
            self.follow(told)

    def follow(self, told: KnownServer) -> None:
        """Take over what another process knows of an engine's server, if that is of its present
        run.
        """
        engine = self._engines.get(told.url)
        known = None if engine is None else self._known.get(engine)
        if engine is None or known is None or _started(engine) != told.started:
            return
        for url, started in told.stale:
            other = self._engines.get(url)
            if other is not None and _started(other) == started:
                known.stale.add(other.in_ledger.run_number)
        known.given_up.clear()
        known.given_up.extend(told.given_up[-MAX_GIVEN_UP:])
        if told.ranks is not None:
            self._answered(engine, known, told.ranks)
        if told.trouble is not None:
            self._failed(engine, known, told.trouble)


def _started(engine: Engine) -> float | None:
    """Return when an engine's run began, None if the engine is not up."""
    known = engine.in_ledger
    return known.evidence.started if known.up and known.evidence is not None else None


def _spelled(workers: Mapping[int, Mapping[int, str]]) -> _Addresses:
    return {
        f"{tp}.{pp}": address for tp, stages in workers.items() for pp, address in stages.items()
    }
