"""NIXL in real time: what one engine core's connector sends to other engines, and what it answers
them.

Owns the side channel of one data-parallel rank. A command is carried out in a task of its own; its
result goes to the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.frame_port import LinkError
from pdproxy_lab.sim.memory import Page
from pdproxy_lab.sim.network import Network
from pdproxy_lab.sim.nixl import Greeting, Handshake, PeerNotice, Pull
from pdproxy_lab.sim.nixl_push import NixlPush, Push, PushRegistration, Register
from pdproxy_lab.sim.receiving_line import ReceivingLine
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.side_channel import (
    SideChannel,
    greeting_of,
    read_pages,
    send_notice,
    send_registration,
    write_pages,
)

Command = Handshake | Pull | PeerNotice | Register | Push


class Driver(Protocol):
    """What steps the core."""

    facts: SimFacts
    network: Network

    @property
    def dead(self) -> bool:
        """Whether the core has died."""

    def wake(self) -> None:
        """Look whether the core has something to do."""

    def carry_out(self, core: Core) -> None:
        """Carry out what the core's connector wants now, also while a step is under way."""

    def transferring(self, request_id: str) -> None:
        """The transfer of a request's KV begins at D."""

    def fails_now(self) -> bool:
        """Return whether the transfer that begins must fail."""


class NixlLink:
    """The link of one core: `open`, `attach`, then commands."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._facts = driver, driver.facts
        self.side = SideChannel(self, driver.network.reserved_port())
        self._line = ReceivingLine(self._facts.hardware)
        self._core: Core | None = None

    async def open(self, engine_id: str, agent: str, port: int) -> int:
        """Listen, after a restart where it did before; return the port.

        Raises:
            OSError: the port is taken.
        """
        self._core = None
        await self.side.open(engine_id, agent, self._facts.side_channel_host, port)
        return self.side.port

    def attach(self, core: Core) -> None:
        """Speak for a core."""
        self._core = core

    # -- what other engines ask

    def greet(self, tp_size: int, pp_size: int) -> Greeting | None:
        """Answer a handshake; None: not at all."""
        if self._core is None or self._driver.dead:
            return None
        return self._core.nixl.greet(self._core.agent, tp_size, pp_size)

    def read(self, blocks: Sequence[int]) -> list[Page]:
        """Return pages by block ids.

        Raises:
            IndexError: there is no such block.
            EngineDeadError: the core has died.
        """
        core = self._live()
        return [core.pool.pages[block] for block in blocks]

    def notified(self, kind: str, request_ids: Sequence[str]) -> None:
        """Take a notice."""
        if self._core is not None:
            self._core.nixl.notified(kind, request_ids, _now())
            self._driver.wake()

    def registered(self, registration: PushRegistration, reached: int) -> None:
        """P: take a registration, and push at once what waits for it, also while a step with other
        prompts is under way.

        vLLM 0.32.0: while finished prompts wait for a registration, the thread "nixl-push-writer"
        looks for notices each millisecond and posts the write itself (`nixl/push_worker.py`:
        `_push_writer_loop`, `_handle_push_reg_notif`, `_do_start_push_kv`). A prompt that ends
        after its registration is pushed from the next step's `start_load_kv`, before that step
        computes.

        Raises:
            EngineDeadError: the core has died.
        """
        core = self._live()
        pusher(core).take(registration, reached)
        self._driver.carry_out(core)
        self._driver.wake()

    def written(self, request_id: str, blocks: Sequence[int], pages: Sequence[Page]) -> None:
        """D: take pages for a request.

        Raises:
            IndexError, ValueError: there are no such blocks.
            EngineDeadError: the core has died.
        """
        take_push(self._live(), request_id, blocks, pages)
        self._driver.wake()

    # -- what the core wants

    async def perform(self, core: Core, command: Command) -> None:
        """Carry a command out and report its result to the core."""
        match command:
            case Handshake():
                core.handshaken(
                    command.peer, await greeting_of(command, self._facts.handshake_timeout), _now()
                )
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

    async def _pull(self, core: Core, pull: Pull) -> None:
        self._driver.transferring(pull.request_id)
        begun = _now()
        if core.nixl.declines(pull, begun):
            core.never_received(pull.request_id, begun)
            return
        await asyncio.sleep(self._line.add(begun, pull.tokens))
        try:
            self._fail_if_due()
            pages = await read_pages(pull.peer, pull.blocks)
        except LinkError:
            core.load_failed(pull.request_id, _now())
            return
        core.stats.transfers.observe(_now() - begun)
        core.stats.transferred_bytes.observe(pull.tokens * self._facts.hardware.kv_bytes_per_token)
        core.loaded(pull, pages)

    async def _register(self, core: Core, command: Register) -> None:
        self._driver.transferring(command.request_id)
        if self._driver.fails_now():
            core.load_failed(command.request_id, _now())
            return
        try:
            await send_registration(command)
        except LinkError:
            core.stats.failed_notifications += 1  # D waits on

    async def _push(self, core: Core, push: Push) -> None:
        begun = _now()
        tokens = len(push.blocks) * self._facts.block_size
        await asyncio.sleep(self._facts.hardware.transfer_s(tokens))
        try:
            self._fail_if_due()
            await write_pages(push, [core.pool.pages[block] for block in push.blocks])
        except LinkError:
            pusher(core).pushed(push, whole=False)
            return
        core.stats.transfers.observe(_now() - begun)
        core.stats.transferred_bytes.observe(tokens * self._facts.hardware.kv_bytes_per_token)
        pusher(core).pushed(push, whole=True)

    def _fail_if_due(self) -> None:
        if self._driver.fails_now():
            raise LinkError("made to fail by a fault")

    def _live(self) -> Core:
        if self._core is None or self._driver.dead:
            raise EngineDeadError
        return self._core


def pusher(core: Core) -> NixlPush:
    """Return the connector of a core that pushes."""
    assert isinstance(core.connector, NixlPush)
    return core.connector


def take_push(core: Core, request_id: str, blocks: Sequence[int], pages: Sequence[Page]) -> None:
    """Write pages into a core's blocks, whoever has these by now, for a request that waits for
    them.

    Raises:
        IndexError, ValueError: there are no such blocks.
    """
    for block, page in zip(blocks, pages, strict=True):
        core.pool.pages[block] = page
    expected = pusher(core).landed(request_id)
    if expected is not None:
        core.loaded(expected, pages)


def _now() -> float:
    return asyncio.get_running_loop().time()
