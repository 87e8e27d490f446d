"""The engine in real time: the event loop steps the core, requests use async generators, other
engines use sockets.

Owns the core, the task that steps it, and its connector's sockets. The API server calls `generate`;
faults call the methods under "faults".
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.sim.connector import PeerCommand, ProxyNotice
from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.core_stops import CoreStops
from pdproxy_lab.sim.cpu import CpuConnector, FindReceiver, Received, SendPart
from pdproxy_lab.sim.cpu_link import CpuLink
from pdproxy_lab.sim.ec_cpu import FetchOutput
from pdproxy_lab.sim.ec_link import ECLink
from pdproxy_lab.sim.ec_mooncake import PushOutput
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.folder import FolderStorage, OutputFolder
from pdproxy_lab.sim.kv_events import KvEventPublishers
from pdproxy_lab.sim.lmcache_pd import Cancel, LMCachePD, Offer, ReceiverHandshake, Write
from pdproxy_lab.sim.mooncake_link import MooncakeLink, bootstrap_of
from pdproxy_lab.sim.network import Network, Sockets
from pdproxy_lab.sim.nixl_link import NixlLink
from pdproxy_lab.sim.notice_sender import NoticeSender
from pdproxy_lab.sim.output_stream import OutputStream
from pdproxy_lab.sim.pd_link import Receiving, Sending
from pdproxy_lab.sim.registered_link import RegisteredLink
from pdproxy_lab.sim.request import EngineDeadError, EngineOutput, EngineRequest, Picture
from pdproxy_lab.sim.stats import Stats
from pdproxy_lab.sim.storage import Storage
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer

_MAX_LAG = 0.05
"""Seconds. A step that begins less late than this ends at its planned time, so that the loop's lag
does not add up.
"""


class SimEngine:
    """One simulated engine. `start` it inside a running event loop, `stop` it there."""

    def __init__(
        self,
        facts: SimFacts,
        *,
        chance: int | None = None,
        storage: Storage | None = None,
        network: Network | None = None,
    ) -> None:
        """Make an engine; `chance` seeds all draws (sampling without a seed, ids); None: different
        in each run.

        `storage`: where a connector shares KV within this process, else `shared_storage_path`.
        `network`: of its ports.
        """
        self.network = network or Sockets()
        self.facts = facts
        self.tokenizer = BuiltInTokenizer(facts.add_bos)
        self.rank_stats = [Stats() for _ in range(facts.data_parallel_size)]
        self.engine_id = ""
        """New at each start and restart, unless the facts have one."""
        self.started_at = 0.0
        """Seconds since the epoch."""
        self.dead = False
        """Whether the core has died: `/health` answers 503 and every request fails."""
        self.slowness = 1.0
        """How many times longer its steps take than its hardware's."""
        self._chance = random.Random(chance)
        self._cores: list[Core] = []
        """One for each data-parallel rank."""
        self._in_flight, self._first = [0] * facts.data_parallel_size, 0
        self.adapters: dict[str, str] = {}  # LoRA adapters that were loaded, with their paths
        self.pictures: dict[str, Picture] = {}
        """What the API server's processor has read, by identifier. It forgets nothing."""
        self._streams: dict[str, OutputStream] = {}
        self._wake = asyncio.Event()
        self._tasks = TaskOwner("engine")
        self.bootstrap = bootstrap_of(facts, self.network)
        """P's bootstrap server with Mooncake."""
        self._links = self._made_links()
        self._sending = Sending()
        self._receiving = Receiving(self._pd, self.wake)
        self._cpu_link = CpuLink(facts, self._cpu, self.wake, self.network.reserved_port())
        self._ec_link = ECLink(facts, self._live_core, self.wake, self.network.reserved_port())
        self.link = RegisteredLink(facts, lambda: self._live_core().connector, self.wake)
        """The link of a connector whose engines register."""
        self.http_address = ""
        """Where its API listens, `host:port`."""
        self.kv_events = KvEventPublishers(facts)
        self._ports = (
            *(link.side for link in self._links),
            self._receiving,
            self._cpu_link,
            self._ec_link,
            self.link,
            self.kv_events,
        )
        self.stops = CoreStops(
            facts.data_parallel_size, self._ports, [link.side for link in self._links]
        )
        self._storage = storage
        self.notice_sender = NoticeSender(facts.notify, keeps=facts.connector != "nixl")
        self._failing_loads = 0

    async def start(self) -> None:
        """Listen on the connector's ports and begin to step.

        Raises:
            OSError: a port is taken, or the shared folder can't be used.
        """
        made = str(uuid.UUID(int=self._chance.getrandbits(128), version=4))
        self.engine_id = self.facts.engine_id or made
        self.rank_stats = [Stats() for _ in range(self.facts.data_parallel_size)]
        self.started_at = time.time()
        self.dead, self.adapters, self.pictures = False, {}, {}
        self.stops.reset()
        if self.facts.connector == "lmcache-pd" and self.facts.role == "decode":
            await self._receiving.open(
                self.engine_id,
                self.facts.side_channel_host,
                self.facts.pd_ranks,
                self.facts.lmcache.pd_peer_init_port,
                self.facts.lmcache.pd_peer_alloc_port,
            )
        await self._cpu_link.open(self.engine_id)
        await self._ec_link.open()
        if self.facts.registers:
            await self.link.open(self.engine_id, self.http_address)
        if self._storage is None and self.facts.shared_storage_path:
            self._storage = FolderStorage(self.facts.shared_storage_path)
        self._sending = Sending()
        self.kv_events.open()
        self.notice_sender.open(self.facts.tensor_parallel_size)
        self._cores = [
            await self._core_of(rank, made) for rank in range(self.facts.data_parallel_size)
        ]
        for core in self._cores:
            self._tasks.spawn(self._run(core), "steps")

    def _made_links(self) -> Sequence[NixlLink | MooncakeLink]:
        ranks = range(self.facts.data_parallel_size)
        if self.facts.has_nixl:
            return [NixlLink(self) for _ in ranks]
        if self.facts.connector == "mooncake":
            return [MooncakeLink(self, rank, self.bootstrap) for rank in ranks]
        return []

    async def _core_of(self, rank: int, agent: str) -> Core:
        """Make the core of a data-parallel rank: with its own id, side channel, memory and
        counters.
        """
        facts, port = self.facts, 0
        engine_id = (
            self.engine_id if facts.data_parallel_size == 1 else f"{self.engine_id}_dp{rank}"
        )
        if self._links:
            port = facts.side_channel_port and facts.side_channel_port + rank
            port = await self._links[rank].open(engine_id, agent, port)
        chance = random.Random(self._chance.getrandbits(64))
        outputs = None
        if (ec := facts.ec_transfer_config) and ec.ec_connector == "ECExampleConnector":
            outputs = OutputFolder(ec.extra.shared_storage_path)
        stats = self.rank_stats[rank]
        core = Core(facts, engine_id, port, chance, stats, self._storage, agent, outputs)
        if self._links:
            self._links[rank].attach(core)
        self.link.attach(core)
        self._ec_link.attach(core)
        return core

    async def stop(self) -> None:
        """End everything; running requests get `EngineDeadError`."""
        self.kill_core()
        for ports in self._ports:
            await ports.close()
        await self._tasks.settle(0)
        await self.notice_sender.close()

    def release(self) -> None:
        """Release the ports, after `stop`: until then they are reserved for the next start."""
        for ports in self._ports:
            ports.release()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request; closing the iterator early aborts it.

        Raises (from the iterator):
            EngineDeadError: the core died, before or while this request ran.
        """
        hardware = self.facts.hardware
        if wait := hardware.between_engines_s if request.handed_over else hardware.before_engine_s:
            await asyncio.sleep(wait)
        core = self._core_for(request.data_parallel_rank)
        rank = self._cores.index(core)
        self._in_flight[rank] += 1
        stream = self._streams[request.id] = OutputStream(hardware.to_client_s)
        self._to_core(rank, lambda: core.add(request, self._now()))
        over = False
        try:
            while not over:
                while not stream.outputs:
                    if stream.dead:
                        raise EngineDeadError
                    stream.wake.clear()
                    await stream.wake.wait()
                output = stream.outputs.popleft()
                over = output.finish_reason is not None
                yield output
        finally:
            self._in_flight[rank] -= 1
            self._streams.pop(request.id, None)
            if not over and core in self._cores and not self.dead:
                self._to_core(rank, lambda: core.abort(request.id, self._now()))

    def finish_aborted(self, request_id: str) -> None:
        """End a request with the finish reason "abort", as a vLLM that is terminated may."""
        if (stream := self._streams.get(request_id)) is not None:
            for rank, core in enumerate(self._cores):
                self._to_core(rank, partial(core.abort, request_id, self._now()))
            stream.put(EngineOutput(request_id=request_id, finish_reason="abort"))

    def new_id(self) -> str:
        """Return 8 random hex digits, vLLM's suffix of internal request ids."""
        return f"{self._chance.getrandbits(32):08x}"

    def reject(self, kv_transfer_params: dict[str, Any], rank: int | None = None) -> None:
        """Clean up after a request with a KV handle that the API server refused: the connector
        releases P's blocks.

        A rank that does not exist is logged by vLLM, and nothing is released; one below 0 counts
        from the last.
        """
        count = len(self._cores)
        if count < 2:
            rank = None
        if not count or self.dead or (rank is not None and not -count <= rank < count):
            return
        core = self._core_for(rank)
        self._guarded(lambda: core.reject(kv_transfer_params))
        self.carry_out(core)

    # -- faults

    def kill_core(self) -> None:
        """Let the core die, as an assertion in vLLM does."""
        self.dead = True
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail()
        self.wake()

    def freeze(self, rank: int | None = None) -> None:
        """Stop the core of a data-parallel rank (None: of all) and its side channel; sockets stay
        open, as by SIGSTOP.
        """
        self.stops.freeze(rank)

    def thaw(self, rank: int | None = None) -> None:
        """Go on after `freeze`."""
        for what in self.stops.thaw(rank):
            self._guarded(what)
        self.wake()

    def _to_core(self, rank: int, what: Callable[[], None]) -> None:
        """Have a core do something, once it is not stopped."""
        if self.stops.send(rank, what):
            self._guarded(what)
            self.wake()

    def expire_leases(self) -> int:
        """End the lease of every handle now; return how many there were."""
        count = sum(core.connector.end_leases(self._now()) for core in self._cores)
        self.wake()
        return count

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches, as vLLM's route of this name does. Return whether that was
        possible: no request may run.
        """
        return False not in [core.pool.reset() for core in self._cores]

    def fail_loads(self, count: int = 1) -> None:
        """Let the next `count` KV transfers that this engine begins fail: pulls, registrations,
        pushes.
        """
        self._failing_loads += count

    async def restart(self) -> None:
        """Start again with a new engine id and empty memory; running requests get
        `EngineDeadError`.
        """
        await self.stop()
        await self.start()

    @property
    def contacted(self) -> frozenset[str] | None:
        """Ids of the engines with which this run has made a handshake; None if the connector has
        none, or the core is dead.
        """
        core = self._core
        return None if core is None else core.connector.contacted

    @property
    def handles(self) -> dict[str, float]:
        """P's handles that have not ended: request id to seconds left of the lease."""
        return dict(
            chain.from_iterable(core.connector.leases(self._now()).items() for core in self._cores)
        )

    @property
    def awaited(self) -> dict[str, float]:
        """D's requests whose blocks only a push frees, aborted ones too: request id to seconds
        since it was registered.
        """
        return dict(
            chain.from_iterable(core.connector.awaited(self._now()).items() for core in self._cores)
        )

    @property
    def registrations(self) -> list[str]:
        """D's request ids for which P has nothing to push yet."""
        return [name for core in self._cores for name in core.connector.registrations()]

    @property
    def receiver_ports(self) -> tuple[list[int], list[int]]:
        """D's init and alloc ports with `lmcache-pd`, one of each per rank."""
        return self._receiving.init_ports, self._receiving.alloc_ports

    @property
    def side_channel_ports(self) -> list[int]:
        """The ports of NIXL's side channels, one per data-parallel rank."""
        return [link.side.port for link in self._links]

    @property
    def ec_port(self) -> int:
        """The port of its EC connector, 0 if it has none."""
        return self._ec_link.port

    @property
    def stats(self) -> Stats:
        """The counters of the first data-parallel rank."""
        return self.rank_stats[0]

    # -- steps

    def wake(self) -> None:
        """Let the cores see whether they have something to do."""
        self._wake.set()

    def transferring(self, request_id: str) -> None:
        """The transfer of a request's KV begins at D."""

    def fails_now(self) -> bool:
        """Return whether the transfer that begins must fail."""
        self._failing_loads -= (failing := self._failing_loads > 0)
        return failing

    @property
    def _core(self) -> Core | None:
        return self._cores[0] if self._cores else None

    def _core_for(self, rank: int | None) -> Core:
        """Return the core of a rank, by default of the one with the fewest requests; ties go round,
        as in vLLM.
        """
        self._live_core()
        if rank is not None:
            return self._cores[rank]
        count = len(self._cores)
        ranks = [(self._first + place) % count for place in range(count)]
        self._first = (self._first + 1) % count
        return self._cores[min(ranks, key=self._in_flight.__getitem__)]

    def _live_core(self) -> Core:
        if self._core is None or self.dead:
            raise EngineDeadError
        return self._core

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _guarded(self, what: Callable[[], None]) -> None:
        try:
            what()
        except EngineDeadError:
            self.kill_core()

    async def _run(self, core: Core) -> None:
        planned, rank = 0.0, self._cores.index(core)
        while not self.dead:
            await self.stops.going(rank)
            self._wake.clear()
            now = self._now()
            try:
                step = core.begin(now)
            except EngineDeadError:
                self.kill_core()
                return
            self.carry_out(core)
            if step is None:
                await self._idle(core)
                planned = 0.0  # what comes next begins when it comes, however soon
                continue
            planned = planned if now - planned < _MAX_LAG else now
            planned += step.seconds * self.slowness
            # a step that takes no time still lets other tasks run
            await asyncio.sleep(max(planned - now, 0.0))
            await self.stops.going(rank)
            try:
                outputs = core.finish(step, self._now())
            except EngineDeadError:
                self.kill_core()
                return
            self.kv_events.publish(rank, core.kv_events.take())
            for output in outputs:
                if (stream := self._streams.get(output.request_id)) is not None:
                    stream.put(output)
            self.carry_out(core)

    async def _idle(self, core: Core) -> None:
        """Wait until something happens, or a lease or a heartbeat is due."""
        try:
            async with asyncio.timeout_at(core.next_timer()):
                await self._wake.wait()
        except TimeoutError:
            return

    # -- other engines

    def _pd(self) -> LMCachePD:
        connector = self._live_core().connector
        assert isinstance(connector, LMCachePD)
        return connector

    def _cpu(self) -> CpuConnector:
        connector = self._live_core().connector
        assert isinstance(connector, CpuConnector)
        return connector

    def carry_out(self, core: Core) -> None:
        """Carry out what the core's connector wants now, also while a step is under way."""
        while core.commands:
            command = core.commands.popleft()
            if isinstance(command, ProxyNotice):
                self.notice_sender.send(command)
            elif isinstance(command, Received):
                self._received(core, command)
            else:
                self._tasks.spawn(self._perform(core, command), "command")

    def _received(self, core: Core, command: Received) -> None:
        core.received(command.request_id, command.pages, command.tokens)
        self._wake.set()

    async def _perform(self, core: Core, command: Any) -> None:
        match command:
            case ReceiverHandshake() | Offer() | Write() | Cancel():
                await self._sending.perform(self._pd(), command, self.facts.hardware)
            case FindReceiver() | SendPart():
                await self._cpu_link.perform(command)
            case FetchOutput() | PushOutput():
                await self._ec_link.perform(core, command)
            case PeerCommand():
                await self._to_peer(core, command)
            case _:
                await self._links[self._cores.index(core)].perform(core, command)
        self.carry_out(core)
        self.wake()

    async def _to_peer(self, core: Core, command: PeerCommand) -> None:
        await self.link.perform(core, command)
