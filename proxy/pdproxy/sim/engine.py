"""The engine in real time: the event loop steps the core, requests use async generators, other engines use sockets.

Owns the core, the task that steps it, and its connector's sockets. The API server calls `generate`; faults call the methods
under "faults".
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from pdproxy.kit.tasks import TaskOwner
from pdproxy.sim.connector import ProxyNotice
from pdproxy.sim.core import Core
from pdproxy.sim.facts import Facts
from pdproxy.sim.folder import FolderStorage
from pdproxy.sim.lmcache_pd import Cancel, LMCachePD, Offer, ReceiverHandshake, Write
from pdproxy.sim.memory import Page
from pdproxy.sim.nixl import Greeting, Handshake, PeerNotice, Pull
from pdproxy.sim.nixl_push import Push, Register, Registration
from pdproxy.sim.notice_sender import NoticeSender
from pdproxy.sim.pd_link import Receiving, Sending
from pdproxy.sim.request import EngineDeadError, EngineOutput, EngineRequest
from pdproxy.sim.side_channel import (
    LinkError,
    SideChannel,
    greeting_of,
    read_pages,
    send_notice,
    send_registration,
    write_pages,
)
from pdproxy.sim.stats import Stats
from pdproxy.sim.storage import Storage
from pdproxy.sim.tokenizer import Tokenizer

_MAX_LAG = 0.05
"""Seconds. A step that begins less late than this ends at its planned time, so that the loop's lag does not add up."""


class _Stream:
    """One request's outputs on their way to its reader."""

    def __init__(self) -> None:
        self.outputs: deque[EngineOutput] = deque()
        self.wake = asyncio.Event()
        self.dead = False

    def put(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        self.wake.set()

    def fail(self) -> None:
        self.dead = True
        self.wake.set()


class Engine:
    """One simulated engine. `start` it inside a running event loop, `stop` it there."""

    def __init__(self, facts: Facts, *, chance: int | None = None, storage: Storage | None = None) -> None:
        """Make an engine; `chance` seeds all draws (sampling without a seed, ids); None: different in each run.

        `storage`: where a connector shares KV with other engines of this process; None: as `shared_storage_path` says.
        """
        self.facts = facts
        self.tokenizer = Tokenizer(facts.add_bos)
        self.stats = Stats()
        self.engine_id = ""
        """New at each start and restart, unless the facts have one."""
        self.started_at = 0.0
        """Seconds since the epoch."""
        self.dead = False
        """Whether the core has died: `/health` answers 503 and every request fails."""
        self._chance = random.Random(chance)
        self._core: Core | None = None
        self._streams: dict[str, _Stream] = {}
        self._wake = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._tasks = TaskOwner("engine")
        self._side = SideChannel(self)
        self._sending = Sending()
        self._receiving = Receiving(self._pd, lambda: self._wake.set())
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
        self.stats = Stats()
        self.started_at = time.time()
        self.dead = False
        self.thaw()
        if self.facts.has_nixl:
            port = self._side.port or self.facts.side_channel_port
            await self._side.open(self.engine_id, made, self.facts.side_channel_host, port)
        if self.facts.connector == "lmcache-pd" and self.facts.role == "decode":
            await self._receiving.open(
                self.engine_id,
                self.facts.side_channel_host,
                self.facts.pd_ranks,
                self.facts.lmcache.pd_peer_init_port,
                self.facts.lmcache.pd_peer_alloc_port,
            )
        if self._storage is None and self.facts.shared_storage_path:
            self._storage = FolderStorage(self.facts.shared_storage_path)
        self._sending = Sending()
        self.notice_sender.open(self.facts.tensor_parallel_size)
        chance = random.Random(self._chance.getrandbits(64))
        self._core = Core(self.facts, self.engine_id, self._side.port, chance, self.stats, self._storage, made)
        self._tasks.spawn(self._run(self._core), "steps")

    async def stop(self) -> None:
        """End everything; running requests get `EngineDeadError`."""
        self.kill_core()
        await self._side.close()
        await self._receiving.close()
        await self._tasks.settle(0)
        await self.notice_sender.close()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request; closing the iterator early aborts it.

        Raises (from the iterator):
            EngineDeadError: the core died, before or while this request ran.
        """
        core = self._live_core()
        stream = self._streams[request.id] = _Stream()
        core.add(request, self._now())
        self._wake.set()
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
            self._streams.pop(request.id, None)
            if not over and self._core is core and not self.dead:
                self._guarded(lambda: core.abort(request.id, self._now()))
                self._wake.set()

    def new_id(self) -> str:
        """Return 8 random hex digits, vLLM's suffix of internal request ids."""
        return f"{self._chance.getrandbits(32):08x}"

    def reject(self, kv_transfer_params: dict[str, Any]) -> None:
        """Clean up after a request with a KV handle that the API server refused: the connector releases P's blocks."""
        if self._core is not None and not self.dead:
            core = self._core
            self._guarded(lambda: core.reject(kv_transfer_params))
            self._carry_out(core)

    # -- faults

    def kill_core(self) -> None:
        """Let the core die, as an assertion in vLLM does."""
        self.dead = True
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail()
        self._wake.set()

    def freeze(self) -> None:
        """Stop stepping and stop answering on the side channel; sockets stay open (what SIGSTOP does to the core)."""
        self._awake.clear()
        self._side.freeze()
        self._receiving.freeze()

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._awake.set()
        self._side.thaw()
        self._receiving.thaw()

    def expire_leases(self) -> int:
        """End the lease of every handle now; return how many there were."""
        count = self._core.connector.end_leases(self._now()) if self._core is not None else 0
        self._wake.set()
        return count

    def fail_loads(self, count: int = 1) -> None:
        """Let the next `count` KV transfers that this engine begins fail: pulls, registrations, pushes."""
        self._failing_loads += count

    async def restart(self) -> None:
        """Start again with a new engine id and empty memory; running requests get `EngineDeadError`."""
        await self.stop()
        await self.start()

    @property
    def handles(self) -> dict[str, float]:
        """P's handles that have not ended: request id to seconds left of the lease."""
        return self._core.connector.leases(self._now()) if self._core is not None else {}

    @property
    def awaited(self) -> dict[str, float]:
        """D's requests whose blocks only a push frees, aborted ones too: request id to seconds since it was registered."""
        return self._core.connector.awaited(self._now()) if self._core is not None else {}

    @property
    def registrations(self) -> list[str]:
        """D's request ids for which P has nothing to push yet."""
        return self._core.connector.registrations() if self._core is not None else []

    @property
    def receiver_ports(self) -> tuple[list[int], list[int]]:
        """D's init and alloc ports with `lmcache-pd`, one of each per rank."""
        return self._receiving.init_ports, self._receiving.alloc_ports

    # -- steps

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
        planned = 0.0
        while not self.dead:
            await self._awake.wait()
            self._wake.clear()
            now = self._now()
            try:
                step = core.begin(now)
            except EngineDeadError:
                self.kill_core()
                return
            self._carry_out(core)
            if step is None:
                await self._idle(core)
                continue
            planned = (planned if now - planned < _MAX_LAG else now) + step.seconds
            # A step that takes no time still lets other tasks run.
            await asyncio.sleep(max(planned - now, 0.0))
            await self._awake.wait()
            try:
                outputs = core.finish(step, self._now())
            except EngineDeadError:
                self.kill_core()
                return
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    stream.put(output)
            self._carry_out(core)

    async def _idle(self, core: Core) -> None:
        """Wait until something happens, or a lease or a heartbeat is due."""
        timer = core.next_timer()
        try:
            async with asyncio.timeout_at(timer):
                await self._wake.wait()
        except TimeoutError:
            return

    # -- other engines

    def greet(self, tp_size: int, pp_size: int) -> Greeting | None:
        """Answer a handshake; None: not at all."""
        return None if self._core is None or self.dead else self._core.greet(tp_size, pp_size)

    def read(self, blocks: Sequence[int]) -> list[Page]:
        """Return pages of this engine by block ids."""
        core = self._live_core()
        return [core.pool.pages[block] for block in blocks]

    def notified(self, kind: str, request_ids: Sequence[str]) -> None:
        """Take a notice of another engine."""
        if self._core is not None:
            self._core.nixl.notified(kind, request_ids, self._now())
            self._wake.set()

    def registered(self, registration: Registration, reached: int) -> None:
        """Take D's registration."""
        core = self._live_core()
        core.push.take(registration, reached)
        self._carry_out(core)

    def written(self, request_id: str, blocks: Sequence[int], pages: Sequence[Page]) -> None:
        """Take the pages that P writes."""
        self._live_core().pushed(request_id, blocks, pages)
        self._wake.set()

    def _pd(self) -> LMCachePD:
        connector = self._live_core().connector
        assert isinstance(connector, LMCachePD)
        return connector

    def _carry_out(self, core: Core) -> None:
        while core.commands:
            command = core.commands.popleft()
            if isinstance(command, ProxyNotice):
                self.notice_sender.send(command)
            else:
                self._tasks.spawn(self._perform(core, command), "command")

    async def _perform(self, core: Core, command: Any) -> None:
        match command:
            case ReceiverHandshake() | Offer() | Write() | Cancel():
                await self._push_chunks(self._pd(), command)
            case Handshake():
                found = await greeting_of(command, self.facts.handshake_timeout)
                core.handshaken(command.peer, found, self._now())
            case Pull():
                await self._pull(core, command)
            case Register():
                await self._register(core, command)
            case Push():
                await self._push(core, command)
            case PeerNotice():
                try:
                    await send_notice(command.peer, command.kind, command.request_ids)
                except LinkError:  # vLLM does not count a heartbeat that fails
                    core.stats.failed_notifications += command.kind == "release"
        self._carry_out(core)
        self._wake.set()

    async def _pull(self, core: Core, pull: Pull) -> None:
        begun = self._now()
        if core.declined(pull, begun):
            return
        await asyncio.sleep(self.facts.hardware.transfer_s(pull.tokens))
        try:
            self._fail_if_due()
            pages = await read_pages(pull.peer, pull.blocks)
        except LinkError:
            core.load_failed(pull.request_id, self._now())
            return
        core.stats.transfers.observe(self._now() - begun)
        core.stats.transferred_bytes.observe(pull.tokens * self.facts.hardware.kv_bytes_per_token)
        core.loaded(pull, pages)

    async def _register(self, core: Core, command: Register) -> None:
        try:
            self._fail_if_due()
        except LinkError:
            core.load_failed(command.request_id, self._now())
            return
        try:
            await send_registration(command)
        except LinkError:
            core.stats.failed_notifications += 1  # D waits on

    async def _push(self, core: Core, push: Push) -> None:
        begun = self._now()
        tokens = len(push.blocks) * self.facts.block_size
        await asyncio.sleep(self.facts.hardware.transfer_s(tokens))
        try:
            self._fail_if_due()
            await write_pages(push, self.read(push.blocks))
        except LinkError:
            core.push.pushed(push, self._now(), whole=False)
            return
        core.stats.transfers.observe(self._now() - begun)
        core.stats.transferred_bytes.observe(tokens * self.facts.hardware.kv_bytes_per_token)
        core.push.pushed(push, self._now(), whole=True)

    def _fail_if_due(self) -> None:
        if self._failing_loads:
            self._failing_loads -= 1
            raise LinkError("made to fail by a fault")

    async def _push_chunks(self, connector: LMCachePD, command: ReceiverHandshake | Offer | Write | Cancel) -> None:
        match command:
            case ReceiverHandshake():
                connector.receiver_found(command.receiver, await self._sending.handshake(command.receiver))
            case Offer():
                connector.offered(command, await self._sending.offer(command.receiver, command.batch))
            case Write():
                await asyncio.sleep(self.facts.hardware.transfer_s(command.tokens))
                connector.written(command, whole=await self._sending.write(command))
            case Cancel():
                await self._sending.cancel(command)
