"""An event loop whose time is virtual: where nothing is to be done now, the clock moves to the next
timer at once.

Owns the clock. Connections are those of a `VirtualNetwork`: no sockets, no threads, no processes.
Callbacks run in the order of asyncio's own loop, so equal inputs give equal runs.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from tests.chaos.virtual.network import VirtualNetwork
from tests.chaos.virtual.pairs import VirtualEnd
from tests.chaos.virtual.transport import VirtualTransport

BEGIN = 1000.0
"""Seconds that the clock shows at first: code that subtracts a duration from the time gets no
negative numbers.
"""
TURN = 1e-6
"""Seconds that a turn of the loop takes. Code that waits until a time and then misses it by a
rounding error goes on.
"""
MAX_TURNS = 200_000
"""Turns of the loop in a row of which none waits for a timer: more of them are work without an
end.
"""


class StuckError(Exception):
    """Nothing is to be done, and no timer is set: all tasks wait for ever."""


class SpinningError(Exception):
    """The loop turned `MAX_TURNS` times and never waited for a timer."""


class _Waiting:
    """What the loop takes for its selector: moves the clock, and never blocks."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._turns = 0

    def select(self, timeout: float | None) -> Iterable[object]:
        if timeout is None:
            raise StuckError("nothing is to be done, and no timer is set")
        if timeout > 0:
            self._turns = 0
            self._loop.pass_time(timeout)
        else:
            self._loop.pass_time(TURN)
            self._turns += 1
            if self._turns > MAX_TURNS:
                raise SpinningError(f"{MAX_TURNS} turns of the event loop, and none waited")
        return ()


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. `network`: where its connections are."""

    _default_executor: None

    def __init__(self, network: VirtualNetwork) -> None:
        super().__init__()
        self._time = BEGIN
        self._selector = _Waiting(self)
        self.network = network
        self.ends: dict[int, VirtualEnd] = {}
        """Ends of pairs of sockets, by their descriptors."""
        network.attach(self)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._time

    def pass_time(self, seconds: float) -> None:
        """Move the clock."""
        self._time += seconds

    # -- what asyncio's loop asks of its subclasses

    def _process_events(self, events: Iterable[object]) -> None:
        """Do nothing: there are no sockets."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never blocks."""

    # -- pairs of sockets

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Call this whenever something can be read there."""
        self.ends[fd].watch(partial(callback, *args))

    def remove_reader(self, fd: Any) -> bool:
        """Call nothing for it any more."""
        if (end := self.ends.get(fd)) is not None:
            end.watch(None)
        return end is not None

    def remove_writer(self, fd: Any) -> bool:
        """Do nothing: what is sent always has space."""
        return False

    # -- connections

    async def create_connection(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        ssl: object = None,
        sock: socket.socket | None = None,
        local_addr: tuple[str, int] | None = None,
        **_: object,
    ) -> tuple[VirtualTransport, Any]:
        """Connect as asyncio does.

        Raises:
            OSError: nothing listens there.
            socket.gaierror: the host is unknown.
        """
        if ssl is not None or sock is not None or host is None or port is None:
            _unsupported("connections by TLS or by a socket")
        address = self.network.resolve(host)[0]
        source = local_addr[0] if local_addr is not None else None
        transport = await self.network.connect(address, port, source=source)
        protocol = protocol_factory()
        transport.attach(protocol)
        return transport, protocol

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        ssl: object = None,
        sock: socket.socket | None = None,
        **_: object,
    ) -> VirtualServer:
        """Listen as asyncio does, on one address.

        Raises:
            OSError: the port is taken.
        """
        if ssl is not None or sock is not None or host is None:
            _unsupported("servers with TLS or on a socket")
        address = self.network.resolve(host)[0]
        listening = self.network.listen(address, port or 0)
        listening.accept(protocol_factory)
        return VirtualServer(self.network, (address, listening.port))

    async def getaddrinfo(self, host: Any, port: Any, **_: int) -> Any:
        """Return the addresses of a host, as the network knows them.

        Raises:
            socket.gaierror: it is unknown.
        """
        kind = socket.SOCK_STREAM
        return [
            (socket.AF_INET, kind, socket.IPPROTO_TCP, "", (address, port))
            for address in self.network.resolve(str(host))
        ]

    # -- threads

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call the function at once; return its result or exception as a future that is done."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class _Address:
    """What code asks a server's socket for."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def getsockname(self) -> tuple[str, int]:
        return self._address


class VirtualServer(asyncio.AbstractServer):
    """What `create_server` returns."""

    def __init__(self, network: VirtualNetwork, address: tuple[str, int]) -> None:
        self._network = network
        self.address = address
        self.sockets = (_Address(address),)
        self._open = True

    def close(self) -> None:
        """Refuse connections from now on."""
        if self._open:
            self._open = False
            self._network.unlisten(*self.address)

    def is_serving(self) -> bool:
        """Return whether connections are accepted."""
        return self._open

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop."""
        return self._network.loop

    async def start_serving(self) -> None:
        """Return at once: it serves from the beginning."""

    async def serve_forever(self) -> None:
        """Serve until cancelled."""
        await self._network.loop.create_future()

    async def wait_closed(self) -> None:
        """Return at once."""


def _unsupported(what: str) -> NoReturn:
    raise NotImplementedError(f"the virtual network has no {what}")
