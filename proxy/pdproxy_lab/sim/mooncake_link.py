"""The sockets between simulated engines with Mooncake: a prefill worker's port, and a decode engine
that asks there.

Owns P's listening socket. Real engines ask over ZMQ, and P writes the KV into D's memory. What is
simulated: a worker has another port in each run; ZMQ never reports that nobody listens, so a D
waits until its own deadline, which is longer than P's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.sim.bootstrap import Bootstrap, Registration, query
from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.frame_port import LinkError, receive_frame, send_frame
from pdproxy_lab.sim.memory import Page
from pdproxy_lab.sim.mooncake import LONGER_THAN_PREFILL, Mooncake, Receive
from pdproxy_lab.sim.network import Network
from pdproxy_lab.sim.nixl_link import Driver
from pdproxy_lab.sim.request import EngineDeadError

_PAUSE = 0.05
"""Seconds between attempts to connect."""


class _Question(msgspec.Struct):
    transfer_id: str
    blocks: int


class _Reply(msgspec.Struct):
    pages: tuple[Page, ...] | None


_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class RankPort:
    """P's side. `connector` returns the running core's; `changed` is called when the core has work;
    `delay(blocks)`: seconds that the transfer of so many blocks takes. `bootstrap`: a server that
    shares its fate, None if there is none.
    """

    def __init__(
        self,
        connector: Callable[[], Mooncake],
        changed: Callable[[], None],
        delay: Callable[[int], float],
        bootstrap: Bootstrap | None,
    ) -> None:
        self._connector, self._changed, self._delay = connector, changed, delay
        self._bootstrap = bootstrap
        self._server: asyncio.Server | None = None
        self._answering = TaskOwner("Mooncake worker")
        self._awake = asyncio.Event()
        self._awake.set()
        self.address, self.port = "", 0

    async def open(self, host: str) -> None:
        """Listen on any free port.

        Raises:
            OSError: the address does not belong to this machine.
        """
        if self._bootstrap is not None:
            await self._bootstrap.open()
        self._server = await asyncio.start_server(self._accepted, host, 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"tcp://{host}:{self.port}"

    async def close(self) -> None:
        """Stop listening and drop what is being answered."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._bootstrap is not None:
            await self._bootstrap.close()
        await self._answering.settle(0)

    def release(self) -> None:
        """Release the bootstrap server's port, after `close`."""
        if self._bootstrap is not None:
            self._bootstrap.release()

    def freeze(self) -> None:
        """Accept connections and questions, answer none."""
        self._awake.clear()
        if self._bootstrap is not None:
            self._bootstrap.freeze()

    def thaw(self) -> None:
        """Answer again, also what was asked while frozen."""
        self._awake.set()
        if self._bootstrap is not None:
            self._bootstrap.thaw()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._answering.spawn(self._answer(reader, writer), "Mooncake worker")
        task.add_done_callback(lambda _: writer.close())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, EOFError, msgspec.MsgspecError, LinkError, EngineDeadError
        ):
            asked = _decode_question(await receive_frame(reader))
            await self._awake.wait()
            connector = self._connector()
            found: asyncio.Future[tuple[Page, ...] | None] = (
                asyncio.get_running_loop().create_future()
            )
            now = asyncio.get_running_loop().time()
            connector.asked(
                asked.transfer_id, asked.blocks, now, lambda pages: _resolve(found, pages)
            )
            self._changed()
            pages = await found
            whole = False
            try:
                if pages:
                    await asyncio.sleep(self._delay(len(pages)))
                # What only frees the blocks moves nothing: it does not matter whether D is still
                # there.
                if not pages or not reader.at_eof():
                    send_frame(writer, _Reply(pages))
                    await writer.drain()
                    whole = True
            finally:
                if pages is not None:
                    now = asyncio.get_running_loop().time()
                    connector.sent(asked.transfer_id, now, whole=whole or not pages)
                    self._changed()


def _resolve(
    found: asyncio.Future[tuple[Page, ...] | None], pages: tuple[Page, ...] | None
) -> None:
    if not found.done():
        found.set_result(pages)


async def ask(address: str, receive: Receive, deadline: float) -> tuple[Page, ...]:
    """Return the pages that a worker sends. `deadline`: seconds until D gives up.

    Raises:
        LinkError: P has refused, or D has given up.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(deadline):
            reply = await _until_answered(
                host, int(port), _Question(receive.transfer_id, receive.blocks)
            )
    except TimeoutError:
        raise LinkError("Resource temporarily unavailable") from None
    except ValueError as error:
        raise LinkError(str(error)) from error
    if reply.pages is None:
        raise LinkError("refused")
    return reply.pages


async def _until_answered(host: str, port: int, question: _Question) -> _Reply:
    """Try to connect until it succeeds; then ask once. Wait for ever if the answer is lost."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except (OSError, OverflowError):
            await asyncio.sleep(_PAUSE)
            continue
        try:
            send_frame(writer, question)
            return _decode_reply(await receive_frame(reader))
        except (OSError, EOFError, LinkError, msgspec.MsgspecError):
            await asyncio.get_running_loop().create_future()
        finally:
            writer.close()


class MooncakeLink:
    """The link of one core: `open`, `attach`, then commands. `bootstrap`: its engine's server, None
    for a consumer.
    """

    def __init__(self, driver: Driver, rank: int, bootstrap: Bootstrap | None) -> None:
        self._driver, self._facts = driver, driver.facts
        self._rank, self._bootstrap = rank, bootstrap
        self._core: Core | None = None
        self.side = RankPort(
            self._live, driver.wake, self._sending_s, bootstrap if rank == 0 else None
        )
        """The port of a prefill worker. That of a consumer does not listen."""

    async def open(self, engine_id: str, agent: str, port: int) -> int:
        """Listen as a prefill worker on any free port, and register it for all tensor-parallel
        ranks. Return the port, 0: none.

        Raises:
            OSError: the address does not belong to this machine.
        """
        self._core = None
        if self._bootstrap is None:
            return 0
        await self.side.open(self._facts.side_channel_host)
        for rank in range(self._facts.tensor_parallel_size):
            self._bootstrap.register(
                Registration(
                    engine_id=engine_id,
                    dp_rank=self._rank,
                    tp_rank=rank,
                    pp_rank=0,
                    addr=self.side.address,
                )
            )
        return self.side.port

    def attach(self, core: Core) -> None:
        """Speak for a core."""
        self._core = core

    async def perform(self, core: Core, command: Receive) -> None:
        """Carry a command out and report its result to the core."""
        self._driver.transferring(command.request_id)
        try:
            if command.blocks and self._driver.fails_now():
                raise LinkError("made to fail by a fault")
            pages = await self._received(command)
        except LinkError:
            core.stats.failed_receives += 1
            if command.blocks:
                core.load_failed(command.request_id, asyncio.get_running_loop().time())
            return
        if command.blocks:
            core.loaded(command, pages)

    async def _received(self, command: Receive) -> tuple[Page, ...]:
        """Return what D has asked for. A worker's address is asked for once: D never forgets it.

        Raises:
            LinkError: it does not come.
        """
        connector, facts = self._live(), self._facts.mooncake
        if command.engine_id not in connector.workers:
            connector.bootstrapped(await query(command.bootstrap, facts.connector_timeout))
        if (address := connector.workers.get(command.engine_id)) is None:
            raise LinkError(f"{command.engine_id} is not known at {command.bootstrap}")
        return await ask(address, command, facts.abort_request_timeout + LONGER_THAN_PREFILL)

    def _live(self) -> Mooncake:
        if self._core is None or self._driver.dead:
            raise EngineDeadError
        assert isinstance(self._core.connector, Mooncake)
        return self._core.connector

    def _sending_s(self, blocks: int) -> float:
        return self._facts.hardware.transfer_s(blocks * self._facts.block_size)


def bootstrap_of(facts: SimFacts, network: Network) -> Bootstrap | None:
    """Return the bootstrap server of an engine with Mooncake, None if it has none."""
    if facts.connector != "mooncake" or facts.mooncake_role == "kv_consumer":
        return None
    return Bootstrap(facts.side_channel_host, facts.mooncake.bootstrap_port, network)
