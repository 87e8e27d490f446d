"""Where a simulated engine's ports are: on this machine's sockets, or in a network that exists only
in memory.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol

from pdproxy_lab.sim.listener import Listener
from pdproxy_lab.sim.reserved_port import ReservedPort


class PortListener(Protocol):
    """A port for HTTP, as `sim.listener.Listener`."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Where it listens."""

    @property
    def listening(self) -> bool:
        """Whether connections are accepted, also when only the kernel does."""

    def open(self) -> None:
        """Listen, on the same port as before if there was one. Connections wait until `accept`."""

    async def accept(self) -> None:
        """Accept connections."""

    def stop_accepting(self) -> None:
        """Let new connections wait."""

    def close(self) -> None:
        """Refuse connections. The port stays reserved."""

    def release(self) -> None:
        """Close, and release the port."""


class EnginePort(Protocol):
    """A port for other engines, as `sim.reserved_port.ReservedPort`."""

    @property
    def number(self) -> int:
        """The reserved port, 0 before the first `listen`."""

    async def listen(
        self,
        accepted: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
        host: str,
        port: int,
    ) -> asyncio.AbstractServer:
        """Listen on the reserved port, or reserve `port` (0: any free one)."""

    def release(self) -> None:
        """Let others have the port, once nobody listens on it."""


class Network(Protocol):
    """Makes ports."""

    def listener(
        self,
        host: str,
        port: int,
        factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> PortListener:
        """Return a port for HTTP, which is closed. `factory` makes the protocol of each
        connection.
        """

    def reserved_port(self) -> EnginePort:
        """Return a port for other engines."""


class Sockets:
    """The network of this machine."""

    def listener(
        self,
        host: str,
        port: int,
        factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> PortListener:
        """Return a port for HTTP, which is closed."""
        return Listener(host, port, factory, tls)

    def reserved_port(self) -> EnginePort:
        """Return a port for other engines."""
        return ReservedPort()
