"""The course of one run: load with faults, the end of the faults, calm, quiet, the end. In a
virtual loop.

Owns the phases and their times. `tests.chaos.child` runs it in a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import msgspec

from tests.chaos import access_rules, continued_rules, counts, invariants
from tests.chaos.clients import Outcome, Visitors
from tests.chaos.ending import Ending
from tests.chaos.finding import Finding
from tests.chaos.invariants import PATIENCE
from tests.chaos.killers import Killers, killers
from tests.chaos.loads_nothing import LoadsNothing
from tests.chaos.one_by_one import TIMES, OneByOne
from tests.chaos.options import Options
from tests.chaos.oracle import BODIES, Body, ask_judge, bodies, streams
from tests.chaos.schedule import Call, Client, Fault, Item, schedule
from tests.chaos.setup import LEASE, MODEL, PORT, PROXY, quiet_for
from tests.chaos.trace import Trace
from tests.chaos.troubles import Troubles
from tests.chaos.virtual.loop import SpinningError, StuckError, VirtualLoop
from tests.chaos.virtual.network import VirtualNetwork
from tests.chaos.virtual.pairs import DELAYS
from tests.chaos.world import CLIENTS, LIMITS, World

_RECOVERY = 30.0
"""Seconds between the end of the faults and the calm: probes, cooldowns of breakers, leases of what
died, canaries.
"""
_BURSTS, _BURST, _BETWEEN = 10, 8, 3.0
"""The calm: so many times so many requests at once, with so many seconds between."""
_LARGE, _EVERY = 30, 4
"""One burst of so many has so many requests: more than there are places (`LIMITS`)."""
_LAST_BURSTS = 3
"""Bursts at the very end: an engine that failed shows with requests that it works, and gets them
only if there are any.
"""
_LEAVE_AFTER = (0.0, 300.0)
"""Two of each burst leave before any data, and after so many bytes."""
_LEAVE_SOON = 0.004
"""One more leaves after that many seconds, or a multiple: while it waits for a place, or its prompt
is prefilled.
"""
_POLLS, _POLL = 100, 0.05


class Result(msgspec.Struct):
    """What came of a run. `cpu`, seconds, is left to whoever measures it."""

    findings: list[Finding]
    digest: str = ""
    calls: dict[str, int] = {}
    """How many requests ended in which way, under faults."""
    faults: dict[str, int] = {}
    virtual: float = 0.0
    cpu: float = 0.0
    deliveries: int = 0


def run(options: Options, trace: Trace) -> Result:
    """Run it all in a loop of its own."""
    network = VirtualNetwork(trace.delivered)
    loop = VirtualLoop(network)
    asyncio.set_event_loop(loop)
    course = _Course(options, network, trace)
    try:
        loop.run_until_complete(course.run())
    except (StuckError, SpinningError) as error:
        course.findings.append(
            Finding("the loop goes on", f"{error}, in phase {course.phase}: {course.state()}")
        )
    return course.result(loop.time())


class _Course:
    def __init__(self, options: Options, network: VirtualNetwork, trace: Trace) -> None:
        self._options = options
        self._network = network
        self._trace = trace
        self.phase = "begin"
        self.findings: list[Finding] = []
        self._load: list[Outcome] = []
        self._faults: Counter[str] = Counter()
        self._begun = 0.0

    def state(self) -> str:
        """Return what waits, in words."""
        return ", ".join(
            sorted(task.get_name() for task in asyncio.all_tasks(self._network.loop))[:20]
        )

    def result(self, now: float) -> Result:
        """Return what came of it so far."""
        calls = Counter(
            one.how if one.how != "error" else f"error {one.detail}" for one in self._load
        )
        return Result(
            self.findings,
            self._trace.digest,
            dict(calls.most_common()),
            dict(self._faults.most_common()),
            now - self._begun,
            0.0,
            self._trace.deliveries,
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._begun = loop.time()
        own = asyncio.current_task()
        world = World(self._options, self._network, self._trace)
        await world.begin()
        asked = bodies(self._options.seed, MODEL, pictures=self._options.encode > 0)
        alone, kill = streams(self._options.seed, MODEL, TIMES), killers(MODEL)
        await ask_judge(self._network, world.judge.host, PORT, [*asked, *alone, *kill])
        names, timers = self._names(own), _timers(world)
        gc.freeze()
        await self._under_faults(world, self._visitors(asked))
        await self._calm(world, self._visitors(asked))
        await self._one_by_one(world, self._visitors(alone))
        self._phase("requests that kill engines")
        self.findings += await Killers(world, self._visitors([*kill, *asked]), self._trace).run(
            self._options.seed, CLIENTS
        )
        self._phase("no KV")
        self.findings += await LoadsNothing(world, self._visitors(asked), self._trace).run(CLIENTS)
        await self._last(self._visitors(asked))
        await self._quiet(world)
        self.findings += await self._lasting(world, names, timers, own)
        self.findings += invariants.balanced(world, self._trace.events)
        errors = len(world.errors)
        self.findings += invariants.garbage()
        await asyncio.sleep(_POLL)
        del world.errors[errors:]  # generators of the simulator that the collection closes
        await self._end(world, self._visitors(asked))
        await asyncio.sleep(1.0)
        left = sorted(task.get_name() for task in asyncio.all_tasks() if task is not own)
        self.findings += invariants.ended(left, [repr(one) for one in self._network.open])
        self.findings += invariants.logged(world.errors)
        self.findings += invariants.bodies(world.engines)

    def _visitors(self, asked: list[Body]) -> Visitors:
        return Visitors(self._network, (PROXY, PORT), asked, PATIENCE)

    @staticmethod
    def _names(own: asyncio.Task[object] | None) -> list[str]:
        names = [task.get_name() for task in asyncio.all_tasks() if task is not own]
        return ["a task without a name" if name.startswith("Task-") else name for name in names]

    async def _lasting(
        self, world: World, names: list[str], timers: int, own: asyncio.Task[object] | None
    ) -> list[Finding]:
        """Compare tasks and timers with those before; a probe may be under way."""
        found: list[Finding] = []
        for _ in range(_POLLS):
            found = invariants.lasting(names, self._names(own), timers, _timers(world))
            if not found:
                break
            await asyncio.sleep(_POLL)
        return found

    def _phase(self, name: str) -> None:
        self.phase = name
        self._trace.mark(f"phase {name}")

    async def _under_faults(self, world: World, visitors: Visitors) -> None:
        self._phase("load")
        items = schedule(self._options)
        self._faults = Counter(
            one.spec.partition(":")[0] or one.what for one in items if isinstance(one, Fault)
        )
        troubles = Troubles(world)
        begun = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(
                    self._at(begun, item, visitors, troubles), name=f"chaos:item {item.number}"
                )
        self._load = visitors.outcomes
        for outcome in self._load:
            self._trace.ended(outcome)
        self.findings += invariants.answered(self._load)
        self.findings += access_rules.admitted(self._load)
        bodies = visitors.asked
        decided = continued_rules.explained(
            self._trace.decisions, bodies, troubles.soundness, world.answering
        )
        self.findings += decided
        await world.heal()

    async def _at(self, begun: float, item: Item, visitors: Visitors, troubles: Troubles) -> None:
        await asyncio.sleep(begun + item.at - asyncio.get_running_loop().time())
        self._trace.mark(f"item {item.number}")
        if isinstance(item, Call):
            await visitors.visit(
                item, f"call-{item.number}", f"{CLIENTS[:-1]}{item.number % 8 + 1}"
            )
        else:
            await troubles.happen(item)

    async def _calm(self, world: World, visitors: Visitors) -> None:
        self._phase("recovery")
        await asyncio.sleep(_RECOVERY)
        self._phase("calm")
        for engine in world.engines:
            engine.sim.requests.clear()
        expired = sum(
            stats.kv_expired for engine in world.engines for stats in engine.sim.engine.rank_stats
        )
        events = len(self._trace.events)
        number = 0
        for burst in range(_BURSTS):
            leave_after = (*_LEAVE_AFTER, _LEAVE_SOON * (burst + 1))
            size = _BURST if (burst + 1) % _EVERY else _LARGE
            async with asyncio.TaskGroup() as group:
                for place in range(size):
                    number += 1
                    call = Call(-1, 0.0, "plain", (number % BODIES,), 0.0)
                    # the last ones: they wait for a place
                    if (leaver := size - 1 - place) < len(leave_after):
                        kind: Client = "leaves" if number % 2 else "resets"
                        call = Call(-1, 0.0, kind, (number % BODIES,), leave_after[leaver])
                    group.create_task(
                        visitors.visit(call, f"calm-{number}", f"{CLIENTS[:-1]}{place % 8 + 1}")
                    )
            await asyncio.sleep(_BETWEEN)
        await asyncio.sleep(LEASE)
        expired -= sum(
            stats.kv_expired for engine in world.engines for stats in engine.sim.engine.rank_stats
        )
        expired += invariants.left_to_leases(
            world.proxy.transfer.contract, self._trace.events[events:]
        )
        served = {
            engine.name: len(engine.sim.requests)
            for engine in world.engines
            if not world.is_blind(engine)
        }
        self.findings += invariants.calm(visitors.outcomes, served, max(0, -expired))
        self.findings += access_rules.within_limits(
            self._trace.reports, 2 * max(DELAYS) * (self._options.workers > 1)
        )
        self.findings += invariants.reported([*self._load, *visitors.outcomes], self._trace.events)

    async def _one_by_one(self, world: World, visitors: Visitors) -> None:
        self._phase("one by one")
        alone = OneByOne(world, visitors, Troubles(world), self._trace)
        self.findings += await alone.run(self._options.seed, CLIENTS)

    async def _last(self, visitors: Visitors) -> None:
        """Give each engine requests once more: those that failed last are used again only after one
        that was good.
        """
        self._phase("last bursts")
        for burst in range(_LAST_BURSTS):
            async with asyncio.TaskGroup() as group:
                for place in range(LIMITS.max_inflight):
                    number = burst * LIMITS.max_inflight + place
                    call = Call(-1, 0.0, "plain", (number % BODIES,), 0.0)
                    group.create_task(
                        visitors.visit(call, f"after-{number}", f"{CLIENTS[:-1]}{place % 8 + 1}")
                    )
            await asyncio.sleep(_BETWEEN)
        self.findings += invariants.calm(visitors.outcomes, {}, 0)

    async def _end(self, world: World, visitors: Visitors) -> None:
        self._phase("end")
        chance = random.Random(f"{self._options.seed}/end")
        ending = Ending(world, visitors, self._trace, CLIENTS)
        self.findings += await ending.remove(chance)
        self.findings += await ending.stop(chance)
        await world.end()

    async def _quiet(self, world: World) -> None:
        self._phase("quiet")
        await asyncio.sleep(quiet_for(self._options))
        self.findings += invariants.quiet(world)
        self.findings += invariants.met(world)
        for proxy in world.proxies:
            self.findings += counts.held(proxy)
        asked = {engine.url for engine in world.engines if not world.is_blind(engine)}
        engines = [
            ledger_engine
            for ledger_engine in world.proxy.ledger.engines
            if ledger_engine.url in asked
        ]
        self.findings += counts.out_of_use(engines, world.proxy.front.clock.now())
        for _ in range(_POLLS):  # a probe may be under way
            if not self._network.open:
                return
            await asyncio.sleep(_POLL)
        self.findings += invariants.ended([], [repr(one) for one in self._network.open])


def _timers(world: World) -> int:
    """Return how many timers run, without that which forgets engines that were lost: this one runs
    for as long as anything is remembered.
    """
    return sum(
        proxy.front.clock.timers - sum(pool.resources.suspects.remembers for pool in proxy.pools)
        for proxy in world.proxies
    )
