"""The sockets of EC connectors: the port at which a producer's outputs are read
(`ECCPUConnector`), or at which a consumer takes pushes (`ECMooncakeConnector`), and what asks
there.

Real engines do the same with ZMQ, which never reports that nobody listens: whoever asks waits until
its own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.ec_connector import ROW_BYTES, EncoderOutput
from pdproxy_lab.sim.ec_cpu import ECCpu, FetchOutput
from pdproxy_lab.sim.ec_mooncake import ECMooncake, PushOutput
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.frame_port import BROKEN, FramePort, receive_frame, send_frame
from pdproxy_lab.sim.network import EnginePort

_PAUSE = 0.05
"""Seconds between attempts to connect, and before an engine that has closed is asked again."""
_TRIES = 2
"""How often a push asks a consumer (`_CANCEL_ATTEMPTS`)."""


class _Question(msgspec.Struct, omit_defaults=True):
    fetch: str = ""
    """The identifier of an output that is to be read."""
    compatibility: str = ""
    push: PushOutput | None = None


class _Reply(msgspec.Struct, omit_defaults=True):
    output: EncoderOutput | None = None
    accepted: bool = False


_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class ECLink(FramePort):
    """An engine's port, and its questions to others. `core` returns the running core; `changed` is
    called when it has work.
    """

    def __init__(
        self,
        facts: SimFacts,
        core: Callable[[], Core],
        changed: Callable[[], None],
        port: EnginePort,
    ) -> None:
        super().__init__(port, "EC link")
        self._facts, self._core, self._changed = facts, core, changed
        self._config = facts.ec_transfer_config

    async def open(self) -> None:
        """Listen, if other engines reach this one; on the same port as before if it has listened.

        Raises:
            OSError: the port is taken.
        """
        if self._config is None or not self._config.listens:
            return
        host, port = self._config.ec_ip, self._config.ec_port
        if self._config.ec_connector == "ECCPUConnector":
            host, port = self._facts.ec_side_channel_host, self._facts.ec_side_channel_port
        await self.listen(host, port)

    def attach(self, core: Core) -> None:
        """Let a core's connector know where others reach it."""
        core.ec_connector.port = self.port

    # -- what the core wants

    async def perform(self, core: Core, command: FetchOutput | PushOutput) -> None:
        """Carry out a command and report its result to the core."""
        assert self._config is not None
        extra, connector = self._config.extra, core.ec_connector
        match command:
            case FetchOutput():
                assert isinstance(connector, ECCpu)
                question = _Question(command.identifier, command.compatibility)
                found = await _asked(
                    command.host, command.port, question, extra.consumer_ack_timeout_s
                )
                if found is None:
                    connector.unanswered(command.identifier)
                elif found.output is None:
                    connector.refused(command.identifier)
                else:
                    connector.fetched(command.identifier, found.output)
            case PushOutput():
                assert isinstance(connector, ECMooncake)
                await asyncio.sleep(self._transfer_s(command.output))
                host, _, port = command.consumer.removeprefix("tcp://").rpartition(":")
                if port.isdecimal():
                    patience = _TRIES * extra.control_timeout_s
                    found = await _asked(host, int(port), _Question(push=command), patience)
                    if found is not None and found.accepted:
                        connector.taken()

    # -- what other engines ask

    async def answer(self, question: bytes) -> _Reply:
        """See `FramePort`."""
        asked, connector, reply = _decode_question(question), self._core().ec_connector, _Reply()
        if (push := asked.push) is not None:
            now = asyncio.get_running_loop().time()
            reply.accepted = connector.pushed(push.transfer_id, push.identifier, push.output, now)
            self._changed()
        else:
            reply.output = connector.granted(asked.fetch, asked.compatibility)
            if reply.output is not None:
                await asyncio.sleep(self._transfer_s(reply.output))
        return reply

    def _transfer_s(self, output: EncoderOutput) -> float:
        return self._facts.hardware.transfer_s(
            -(-output.rows * ROW_BYTES // self._facts.hardware.kv_bytes_per_token)
        )


async def _asked(host: str, port: int, question: _Question, patience: float) -> _Reply | None:
    """Return the answer of another engine; None: there is none within so many seconds, or the
    engine has closed the connection.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(host, port)
                    break
                except (OSError, OverflowError, ValueError):
                    await asyncio.sleep(_PAUSE)
            try:
                send_frame(writer, question)
                return _decode_reply(await receive_frame(reader))
            except BROKEN:
                await asyncio.sleep(_PAUSE)
            finally:
                writer.close()
    return None
