"""The ports of simulated engines in a virtual network, as `sim.network` asks for them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from pdproxy_lab.sim.network import EnginePort, PortListener
from tests.chaos.virtual.network import Listening, VirtualNetwork


class VirtualPorts:
    """Makes the ports of engines."""

    def __init__(self, network: VirtualNetwork) -> None:
        self._network = network

    def listener(
        self,
        host: str,
        port: int,
        factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> PortListener:
        """Return a port for HTTP, which is closed.

        Raises:
            NotImplementedError: it is to have TLS.
        """
        if tls is not None:
            raise NotImplementedError("the virtual network has no TLS")
        return _Listener(self._network, host, port, factory)

    def reserved_port(self) -> EnginePort:
        """Return a port for other engines."""
        return _ReservedPort(self._network)


class _Listener:
    def __init__(
        self, network: VirtualNetwork, host: str, port: int, factory: Callable[[], asyncio.Protocol]
    ) -> None:
        self._network = network
        self.host, self.port = host, port
        self._factory = factory
        self._listening: Listening | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"

    @property
    def listening(self) -> bool:
        """Whether connections are taken, also when nothing accepts them."""
        return self._listening is not None

    def open(self) -> None:
        """Listen; connections wait until `accept`.

        Raises:
            OSError: the port is taken.
        """
        if self._listening is None:
            self._listening = self._network.listen(self.host, self.port)
            self.port = self._listening.port

    async def accept(self) -> None:
        """Accept connections."""
        if self._listening is not None:
            self._listening.accept(self._factory)

    def stop_accepting(self) -> None:
        """Let new connections wait."""
        if self._listening is not None:
            self._listening.stop_accepting()

    def close(self) -> None:
        """Refuse connections, those that wait too."""
        if self._listening is not None:
            self._network.unlisten(self.host, self.port)
            self._listening = None

    def release(self) -> None:
        """Close: nobody else takes ports here."""
        self.close()


class _ReservedPort:
    def __init__(self, network: VirtualNetwork) -> None:
        self._network = network
        self.number = 0

    async def listen(
        self,
        accepted: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
        host: str,
        port: int,
    ) -> asyncio.AbstractServer:
        """Listen on the reserved port, or reserve `port` (0: any free one).

        Raises:
            OSError: the port is taken, or the host is unknown.
        """
        self.number = self.number or port or self._network.free_port()
        return await asyncio.start_server(accepted, host, self.number)

    def release(self) -> None:
        """Reserve another one at the next `listen`."""
        self.number = 0
