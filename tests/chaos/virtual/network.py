"""The network of a virtual loop: hosts, ports, links, and the connections between them.

Owns who listens where. A connection's host is that of the code which opens it, by the context
variable `HOST`. Links may be cut in one direction or in both; connections through them hang, as
they do where packets are lost.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar, copy_context
from functools import partial

from tests.chaos.virtual.transport import WINDOW, Link, VirtualTransport

HOST: ContextVar[str] = ContextVar("HOST", default="127.0.0.1")
"""The address of the host whose code runs."""
BACKLOG = 1024
"""Connections that wait for a listener which does not accept."""
LATENCY = 0.0002
"""Seconds of a link, unless set otherwise."""
_FIRST_PORT = 32768

Delivered = Callable[[int, int], None]
"""Gets the number of a transport and how many of its bytes have arrived; 0: its end."""


class Listening:
    """A port that is listened on. `factory` None: connections wait."""

    def __init__(self, network: VirtualNetwork, host: str, port: int) -> None:
        self._network = network
        self.host, self.port = host, port
        self._factory: Callable[[], asyncio.BaseProtocol] | None = None
        self._context: Context = copy_context()
        self._waiting: list[VirtualTransport] = []

    def accept(self, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        """Accept connections, those that wait first. Their protocols are called in a copy of the
        caller's context.
        """
        self._factory, self._context = factory, copy_context()
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            self._take(transport)

    def stop_accepting(self) -> None:
        """Let connections wait."""
        self._factory = None

    @property
    def full(self) -> bool:
        """Whether no more connections may wait."""
        return len(self._waiting) >= BACKLOG

    @property
    def context(self) -> Context:
        """The context of the code that listens."""
        return self._context

    def connected(self, transport: VirtualTransport) -> None:
        """Take a connection."""
        if self._factory is None:
            self._waiting.append(transport)
        else:
            self._take(transport)

    def _take(self, transport: VirtualTransport) -> None:
        self._network.loop.call_soon(self._attach, transport, context=self._context)

    def _attach(self, transport: VirtualTransport) -> None:
        if self._factory is None:
            self._waiting.append(transport)
        else:
            transport.attach(self._factory())

    def close(self) -> None:
        """Reset what waits."""
        for transport in self._waiting:
            transport.reset()
        self._waiting.clear()


class VirtualNetwork:
    """One network. `delivered` is told of each piece of data that arrives; `names` are hosts' names
    and their addresses.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, delivered: Delivered = lambda number, size: None) -> None:
        self.delivered = delivered
        self.names: dict[str, list[str]] = {"localhost": ["127.0.0.1"]}
        self.connects: dict[str, float] = {}
        """Seconds that connects to a host take longer."""
        self._listening: dict[tuple[str, int], Listening] = {}
        self._reserved: dict[tuple[str, int], int] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._open: dict[VirtualTransport, None] = {}
        self._count = 0
        self._port = _FIRST_PORT

    def __repr__(self) -> str:
        return (
            f"<VirtualNetwork {len(self._listening)} listeners, {len(self._open)} open transports>"
        )

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to a loop."""
        self.loop = loop

    # -- hosts and links

    def resolve(self, host: str) -> list[str]:
        """Return the addresses of a host; an address is its own.

        Raises:
            socket.gaierror: it is unknown.
        """
        if host in self.names:
            return self.names[host]
        try:
            socket.inet_aton(host)
        except OSError:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
        return [host]

    def link(self, source: str, target: str) -> Link:
        """Return the link from one host to another."""
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = Link(LATENCY)
        return found

    @property
    def links(self) -> Iterable[Link]:
        """All links that were used."""
        return self._links.values()

    @property
    def open(self) -> list[VirtualTransport]:
        """The transports that are open."""
        return list(self._open)

    # -- ports

    def free_port(self) -> int:
        """Return a port that nobody has had yet."""
        self._port += 1
        return self._port

    def listen(self, host: str, port: int) -> Listening:
        """Listen; connections wait until it accepts. Port 0: any free one.

        Raises:
            OSError: the port is taken.
        """
        port = port or self.free_port()
        if (host, port) in self._listening:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        found = self._listening[host, port] = Listening(self, host, port)
        return found

    def unlisten(self, host: str, port: int) -> None:
        """Refuse connections from now on; those that wait are reset."""
        if (found := self._listening.pop((host, port), None)) is not None:
            found.close()

    # -- connections

    async def connect(
        self, host: str, port: int, *, source: str | None = None, window: int = WINDOW
    ) -> VirtualTransport:
        """Return a connection, still without a protocol. `window`: bytes that may be on the way to
        the caller.

        Raises:
            ConnectionRefusedError: nothing listens there.
        """
        source = source or HOST.get()
        if (longer := self.connects.get(host)) is not None:
            await asyncio.sleep(longer)
        there, back = self.link(source, host), self.link(host, source)
        waiter: asyncio.Future[bool] = self.loop.create_future()
        names = ((source, self.free_port()), (host, port))
        made: list[VirtualTransport] = []
        context = copy_context()

        def over(link: Link, then: Callable[[], None]) -> None:
            self.loop.call_later(link.latency, partial(arrive, link, then), context=context)

        def arrive(link: Link, then: Callable[[], None]) -> None:
            if link.down:
                link.when_up(partial(arrive, link, then), context)
            else:
                then()

        def asked() -> None:
            if waiter.done():
                return
            listening = self._listening.get((host, port))
            if listening is None:
                over(back, refused)
            elif not listening.full:  # else nothing answers
                ours = self._made(there, context, WINDOW, names)
                theirs = self._made(back, listening.context, window, (names[1], names[0]))
                ours.peer, theirs.peer = theirs, ours
                made.append(ours)
                listening.connected(theirs)
                over(back, answered)

        def answered() -> None:
            if waiter.done():
                made[0].abort()
            else:
                waiter.set_result(True)

        def refused() -> None:
            if not waiter.done():
                waiter.set_result(False)

        over(there, asked)
        try:
            connected = await waiter
        except asyncio.CancelledError:
            for transport in made:
                transport.abort()
            raise
        if not connected:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {(host, port)}")
        return made[0]

    def _made(
        self,
        link: Link,
        context: Context,
        window: int,
        names: tuple[tuple[str, int], tuple[str, int]],
    ) -> VirtualTransport:
        self._count += 1
        made = VirtualTransport(self, self._count, link, context, window, names)
        self._open[made] = None
        return made

    def gone(self, transport: VirtualTransport) -> None:
        """Forget a transport: its socket is closed."""
        self._open.pop(transport, None)
