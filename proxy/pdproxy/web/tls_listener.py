"""A listener with TLS: connections are counted from when they are accepted, and reach HTTP once
their handshake is done.

A handshake costs far more than what its client sends for it. So handshakes have a limit of their
own and a deadline, and at the limit the client that has the most of them loses the oldest one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import OverloadedError, PdproxyError, RevokedError, Wait
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import DeadlinePassed
from pdproxy.serving.access.clients import address_name
from pdproxy.web.client_certificates import ClientCertificates, ListenerTls
from pdproxy.web.connections import Connections
from pdproxy.web.guard import GuardedProtocol
from pdproxy.web.refusals import report_refusal
from pdproxy.web.revocable import MakeError, ShownCertificate

SHARE, MIN_HANDSHAKES = 4, 64
"""One connection of so many may be a handshake, and at least so many may be."""
BACKSTOP = 30.0
"""Seconds that the event loop's own limit on a handshake is longer than ours, which counts no time
of hold-ups.
"""


class TlsListener:
    """Makes the connections of a listener for uvicorn, in place of the protocol class `http`.

    `newest`: see `ClientCertificates`.
    """

    def __init__(self, http: type[GuardedProtocol], newest: Callable[[], ListenerTls]) -> None:
        self._http = http
        bounds = self.bounds = http.bounds
        self.observers = http.observers
        self.certificates = ClientCertificates(newest, bounds.connections)
        self.handshakes = Connections(MIN_HANDSHAKES, self.observers)

    def __repr__(self) -> str:
        return f"<TlsListener {self.handshakes!r}>"

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> TlsArrival:
        """Return the protocol of a connection that was accepted. The arguments: those of uvicorn's
        protocols.
        """
        self.handshakes.max_open = max(MIN_HANDSHAKES, self.bounds.connections.max_open // SHARE)
        return TlsArrival(self, lambda: self._http(config, server_state, app_state, _loop))


class TlsArrival(asyncio.Protocol):
    """A connection until its handshake is done. `http` makes the protocol that then gets it."""

    idle = True
    certificate: ShownCertificate | None = None

    def __init__(self, listener: TlsListener, http: Callable[[], GuardedProtocol]) -> None:
        self._listener = listener
        self._http = http
        self._early = b""
        """What has come before the handshake began."""
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None] | None = None
        self._timer: Timer | None = None

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102 - asyncio's
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        bounds = self._listener.bounds
        self._peer = bounds.clients.enter(
            address_name(str(peer[0]) if isinstance(peer, tuple) else "")
        )
        self._task = asyncio.get_running_loop().create_task(self._arrive())
        try:
            self._listener.handshakes.opened(self._peer, self)
            bounds.connections.opened(self._peer, self)
        except OverloadedError as error:  # without TLS it can get no answer
            report_refusal(self._listener.observers, error, str(self._peer.name))
            drop_traceback(error)
            transport.abort()

    def data_received(self, data: bytes) -> None:  # noqa: D102 - asyncio's
        self._early += data

    # -- for the counts

    def evict(self, error: PdproxyError) -> None:
        """Close it: another client needs its place."""
        self._transport.abort()

    def drop(self) -> None:
        """Close it."""
        self._transport.abort()

    def revoke(self, error: MakeError, keys: AbstractSet[bytes] | None) -> int:
        """Do nothing: it has no request."""
        return 0

    def shut_out(self, error: MakeError) -> None:
        """Do nothing: what its client shows is checked once the handshake is done."""

    # -- the handshake

    async def _arrive(self) -> None:
        bounds, began = self._listener.bounds, self._listener.certificates.begin()
        self._timer = bounds.slow_readers.clock.after(bounds.head_timeout, self._late)
        first = _FirstData()
        shown: ShownCertificate | None = None
        tls: asyncio.Transport | None = None
        try:
            tls = await self._shaken(began.context, first)
            shown = self._listener.certificates.shown(tls.get_extra_info("ssl_object"), began)
        except RevokedError as error:
            report_refusal(self._listener.observers, error, str(self._peer.name))
            drop_traceback(error)
            assert tls is not None
            tls.abort()
            tls = None
        except (
            OSError,
            RuntimeError,
        ):  # its client speaks no TLS, shows no certificate, or has left: the loop has closed it
            tls = None
        finally:
            self._timer.cancel()
            self._listener.handshakes.closed(self._peer, self)
            bounds.connections.closed(self._peer, self)
            bounds.clients.leave(self._peer)
        if tls is not None and not tls.is_closing():
            http = self._http()
            http.certificate = shown
            tls.set_protocol(http)
            http.connection_made(tls)
            first.hand_on(http)

    async def _shaken(self, context: ssl.SSLContext, first: _FirstData) -> asyncio.Transport:
        """Return the connection's transport with TLS. Raises OSError and RuntimeError, as
        `loop.start_tls` does.
        """
        loop, seconds = asyncio.get_running_loop(), self._listener.bounds.head_timeout + BACKSTOP
        shaking = loop.create_task(
            loop.start_tls(
                self._transport, first, context, server_side=True, ssl_handshake_timeout=seconds
            )
        )
        try:
            # the task has its first step: then TLS gets what comes, and learns of the end
            await asyncio.sleep(0)
            if self._transport.is_closing():
                raise ConnectionResetError
            if self._early:
                loop.call_soon(self._pass_early)
            tls = await shaking
        finally:
            shaking.cancel()
        if tls is None or tls.is_closing():
            raise ConnectionResetError
        return tls

    def _pass_early(self) -> None:
        """Give TLS what uvloop has read before the handshake began."""
        protocol, data = (
            cast("asyncio.BufferedProtocol", self._transport.get_protocol()),
            memoryview(self._early),
        )
        self._early = b""
        while data:
            space = memoryview(protocol.get_buffer(len(data)))
            size = min(len(space), len(data))
            space[:size] = data[:size]
            protocol.buffer_updated(size)
            data = data[size:]

    def _late(self) -> None:
        self._listener.observers.notify(DeadlinePassed(Wait.CLIENT_HEAD.value))
        self._transport.abort()


class _FirstData(asyncio.Protocol):
    """Takes what comes in the step in which a handshake ends: only behind it HTTP's protocol can be
    told of its connection.
    """

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._ended = False

    def data_received(self, data: bytes) -> None:
        self._data.append(data)

    def eof_received(self) -> None:
        self._ended = True

    def hand_on(self, http: GuardedProtocol) -> None:
        """Give HTTP's protocol what has come."""
        for data in self._data:
            http.data_received(data)
        if self._ended:
            http.eof_received()
