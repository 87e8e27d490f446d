"""A virtual loop for tests: `run` a coroutine in one, with protocols that record what happens to
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.chaos.virtual.loop import VirtualLoop
from tests.chaos.virtual.network import VirtualNetwork

_T = TypeVar("_T")


def run(main: Callable[[VirtualNetwork], Coroutine[Any, Any, _T]]) -> _T:
    network = VirtualNetwork()
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(network)) as runner:
        return runner.run(main(network))


class Recorder(asyncio.Protocol):
    """Notes its calls. `keeps`: what `eof_received` answers."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.calls: list[str] = []
        self.data = b""
        self.keeps = keeps
        self.transport: Any = None
        self.error: Exception | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.calls.append("made")

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.calls[-1] != "data":
            self.calls.append("data")

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return self.keeps

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, error: Exception | None) -> None:
        self.calls.append("lost")
        self.error = error


async def pair(
    network: VirtualNetwork, *, keeps: bool = False, window: int = 65536
) -> tuple[Recorder, Recorder]:
    """A client's and a server's end of one connection."""
    server = Recorder(keeps=keeps)
    network.listen("10.0.0.1", 80).accept(lambda: server)
    transport = await network.connect("10.0.0.1", 80, source="10.0.0.2", window=window)
    client = Recorder(keeps=keeps)
    transport.attach(client)
    await asyncio.sleep(1)
    return client, server
