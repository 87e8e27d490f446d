"""The client for one engine: a pool of kept connections, and the two ways to use one.

Owns the engine's connections. `ask` waits for a whole answer (prefill legs, releases); `send`
passes the answer to a sink as it comes (decode legs). Connecting has a deadline here; every other
deadline belongs to the caller. The answer budget of all engines limits the memory of whole answers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from pdproxy.kit.clock import Clock
from pdproxy.kit.engine_networks import USUAL, EngineNetworks
from pdproxy.kit.errors import (
    EngineError,
    EngineTimeoutError,
    EngineTlsError,
    EngineUnreachableError,
    StaleConnectionError,
    Wait,
    no_more_files,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.upstream.addresses import Addresses, Resolve, by_system
from pdproxy.upstream.answer_budget import AnswerBudget, BudgetShare
from pdproxy.upstream.answer_form import AnswerForm
from pdproxy.upstream.connection import EngineConnection, Headers, Leg, Message, Sink
from pdproxy.upstream.reach import NotAllowedError, check
from pdproxy.upstream.sockets import watch_peer
from pdproxy.wire.sent_body import SentBody

LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL})
"""Errors at connecting that this process or machine causes, not the engine."""
_PLAIN_HTTP = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST"})
"""What OpenSSL calls it when the bytes of the other side are no TLS."""


JOINED = 64 << 10
"""Bytes of a body that is written together with its head. Copying a larger one costs more than
a second buffer.
"""
MAX_RELEASE_ANSWER = 1 << 20
"""Bytes of an answer to `EngineClient.whole`: a token, or a refusal."""

Request = Message | Callable[[], Message]
"""A request's bytes, or a function that makes them once there is a connection: waiting requests
then hold no bodies.
"""


class Answer(msgspec.Struct, frozen=True):
    """A whole answer of an engine. Header names are in lower case."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of that name, None if there is none."""
        return next((value for key, value in self.headers if key == name), None)


class Pending(msgspec.Struct, eq=False):
    """A request whose whole answer is awaited. Its owner may await `answered`, several times one
    after the other, or close it.
    """

    _share: BudgetShare
    _outcome: Answer | EngineError | None = None
    _waiter: asyncio.Future[None] | None = None
    _status: int = 0
    _headers: Headers = []
    _leg: Leg | None = None

    def attach(self, leg: Leg) -> None:
        """Set the leg of the request."""
        self._leg = leg

    def close(self) -> None:
        """Close the leg. An engine that is still at work aborts the request."""
        if self._leg is not None:
            self._leg.close()

    def fail(self, error: EngineError) -> None:
        """Close the leg, and give the one who waits an error. Once there is an outcome, this
        changes nothing.
        """
        if self._outcome is None:
            self.close()
            self.failed(error)

    async def answered(self) -> Answer:
        """Wait for the answer, one caller at a time. A cancelled wait does not close the leg.

        Raises:
            EngineError: there will be none.
        """
        if self._outcome is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if isinstance(self._outcome, EngineError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    async def answered_or(self, other: asyncio.Future[None]) -> Answer | None:
        """Wait for the answer, or for `other`: None if that comes first. Both go on.

        Raises:
            EngineError: there will be no answer.
        """
        if self._outcome is None and not other.done():
            waiter = self._waiter = asyncio.get_running_loop().create_future()

            def wake(_: asyncio.Future[None]) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            other.add_done_callback(wake)
            try:
                await waiter
            finally:
                other.remove_done_callback(wake)
        return None if self._outcome is None else await self.answered()

    def head(self, status: int, headers: Headers) -> None:
        self._share.check_length(headers)
        self._status, self._headers = status, headers

    def data(self, chunk: bytes) -> None:
        self._share.add(chunk)

    def end(self) -> None:
        self._set(Answer(self._status, self._headers, self._share.take_counted()))

    def failed(self, error: EngineError) -> None:
        self._share.drop()
        self._set(error)

    def _set(self, outcome: Answer | EngineError) -> None:
        self._outcome = outcome
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def describe_tls(error: ssl.SSLError) -> str:
    """Return why there is no TLS with an engine. The text may name hosts."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if error.reason in _PLAIN_HTTP:
        return "no TLS: it answers plain HTTP, so its URL begins with http://"
    return f"no TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"


def describe_os(error: OSError) -> str:
    """Return why there is no connection with an engine. asyncio repeats the address in its text;
    the caller has it already.
    """
    if isinstance(error, NotAllowedError):
        return str(error.strerror)
    return (
        os.strerror(error.errno)
        if error.errno and error.errno > 0
        else error.strerror or str(error)
    )


class EngineClient:
    """All connections to one engine at `url` (`http://host:port` or `https://host:port`, perhaps
    with a path before its routes).

    Kept connections are reused for `keepalive` seconds, and closed once they are older; vLLM closes
    idle ones after 5. `key` and `tls` are called for each request and connection, since both may
    change: the bearer token, and the context of an engine with TLS. `clock` keeps the deadlines,
    `budget` limits whole answers. `unacknowledged`: see `sockets.watch_peer`. `resolve` returns the
    addresses of a name (`upstream.addresses`). `networks`: where the engine may be, whatever its
    name resolves to.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float,
        keepalive: float,
        clock: Clock,
        budget: AnswerBudget,
        key: Callable[[], str | None] = lambda: None,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        unacknowledged: float = 0.0,
        resolve: Resolve = by_system,
        networks: EngineNetworks = USUAL,
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._netloc = parts.netloc.encode()
        self._prefix = parts.path
        self.configure(connect_timeout, keepalive, unacknowledged)
        self._clock = clock
        self._budget = budget
        self._key = key
        self._tls = tls
        self._networks = networks
        self._form = AnswerForm()
        self._idle: list[EngineConnection] = []
        self._all: OrderedSet[EngineConnection] = OrderedSet()
        self._addresses = Addresses(self._host, self._port, self._close_former, resolve)

    def configure(self, connect_timeout: float, keepalive: float, unacknowledged: float) -> None:
        """Use these times from now on. Connections that are open keep theirs."""
        self._connect_timeout = connect_timeout
        self._keepalive = keepalive
        self._unacknowledged = unacknowledged

    def __repr__(self) -> str:
        return f"<EngineClient {self.url}: {len(self._all)} connections, {len(self._idle)} idle>"

    def request(
        self, path: str, headers: tuple[tuple[bytes, bytes], ...], body: SentBody
    ) -> Message:
        """Return a POST of JSON, with the engine's key if there is one."""
        if (key := self._key()) is not None:
            headers = (*headers, (b"authorization", b"Bearer " + key.encode()))
        size = sum(map(len, body)) if isinstance(body, tuple) else len(body)
        lines = b""
        for header in headers:
            lines += b"%b: %b\r\n" % header
        head = (
            b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: "
            b"%d\r\n%b\r\n"
            % (
                (self._prefix + path).encode(),
                self._netloc,
                size,
                lines,
            )
        )
        if isinstance(body, tuple):
            return (head, *body)
        return head + body if size <= JOINED else (head, body)

    async def send(self, request: Request, sink: Sink, *, fresh: bool = False) -> Leg:
        """Send a request and return its leg at once; the answer goes to `sink`.

        Raises:
            EngineUnreachableError: the engine refused the connection, or did not accept it in time.
        """
        connection = (None if fresh else self._kept()) or await self._connect()
        try:
            message = request() if callable(request) else request
        except BaseException:
            self._free(connection)
            raise
        return connection.send(message, sink)

    async def ask(self, request: Request, *, max_bytes: int | None = None) -> Pending:
        """Send a request whose whole answer, of at most `max_bytes` bytes, is awaited.

        Raises:
            EngineUnreachableError: as `send`.
        """
        pending = Pending(self._budget.share(max_bytes))
        pending.attach(await self.send(request, pending))
        return pending

    async def whole(self, request: Message, timeout: float, wait: Wait) -> Answer:
        """Send a request and wait up to `timeout` seconds for its whole answer, of
        `MAX_RELEASE_ANSWER` bytes.

        Raises:
            EngineTimeoutError: the deadline named by `wait` passed; the request was closed.
            EngineError: the engine could not be reached, closed the connection or sent a too large
                answer.
        """
        for last in (False, True):
            pending = Pending(self._budget.share(MAX_RELEASE_ANSWER))
            try:
                with self._clock.within(timeout):
                    pending.attach(await self.send(request, pending, fresh=last))
                    return await pending.answered()
            except StaleConnectionError as stale:
                if last:
                    raise
                drop_traceback(stale)  # its frames refer to `pending`, which refers to it
            except TimeoutError:
                raise EngineTimeoutError(
                    f"{self.url} did not answer in {timeout:g} s", wait=wait
                ) from None
            finally:
                pending.close()
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Drop every connection."""
        self._addresses.close()
        for connection in list(self._all):
            connection.close()

    def retire(self) -> None:
        """Close idle connections, and from now on every connection once its answer is whole. Legs
        under way go on.
        """
        self._keepalive = -1.0  # all are too old
        for connection in list(self._idle):
            connection.close()

    def _kept(self) -> EngineConnection | None:
        if not self._idle and self._addresses.is_fixed:
            return None
        now = (self._clock.loop or asyncio.get_running_loop()).time()
        if now >= self._addresses.due:
            self._addresses.refresh()
        oldest = now - self._keepalive
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> EngineConnection:
        """Connect to one of the engine's addresses.

        The addresses whose turn it is come first, and share the time for connecting. The other
        addresses get the time that is left.

        Raises:
            EngineUnreachableError: none of them took a connection in time.
        """
        if self._addresses.is_fixed:
            return await self._connect_to(self._host, self._connect_timeout)
        now = self._clock.now
        end = now() + self._connect_timeout
        usable, others = await self._in_turn()
        for number, address in enumerate(usable + others, 1):
            try:
                return await self._connect_to(
                    address, (end - now()) / max(1, len(usable) - number + 1)
                )
            except EngineTlsError:
                raise  # the machine is there
            except EngineUnreachableError:
                self._addresses.failed(address)
                if number == len(usable) + len(others) or now() >= end:
                    raise
        raise AssertionError("unreachable")

    async def _in_turn(self) -> tuple[list[str], list[str]]:
        try:
            with self._clock.within(self._connect_timeout):
                return await self._addresses.in_turn()
        except TimeoutError:
            raise EngineUnreachableError(
                f"{self.url}: its name did not resolve in {self._connect_timeout:g} s",
                wait=Wait.CONNECT,
            ) from None
        except OSError as error:
            raise EngineUnreachableError(
                f"{self.url} took no connection: {describe_os(error)}"
            ) from None

    async def _connect_to(self, address: str, timeout: float) -> EngineConnection:
        loop = asyncio.get_running_loop()
        tls = self._tls()
        # This is a timer of the event loop, which runs before sockets are read. So the clock's
        # deadline must come first.
        handshake = 2 * self._connect_timeout + 1 if tls is not None else None
        try:
            check(self._networks, address)
            with self._clock.within(timeout):
                transport, connection = await loop.create_connection(
                    lambda: EngineConnection(self.url, self._free, self._lost, self._form),
                    address,
                    self._port,
                    ssl=tls,
                    server_hostname=None if tls is None else self._host,
                    ssl_handshake_timeout=handshake,
                )
        except TimeoutError:
            raise EngineUnreachableError(
                f"{self.url} took no connection in {timeout:.4g} s", wait=Wait.CONNECT
            ) from None
        except ssl.SSLError as error:
            raise EngineTlsError(f"{self.url}: {describe_tls(error)}") from None
        except OSError as error:
            if error.errno in LOCAL_ERRORS:
                raise no_more_files(error) from None
            raise EngineUnreachableError(
                f"{self.url} took no connection: {describe_os(error)}"
            ) from None
        watch_peer(transport, self._unacknowledged)
        if not self._addresses.is_fixed:
            connection.address = address
            self._addresses.took(address)
        self._all.add(connection)
        return connection

    def _is_former(self, connection: EngineConnection) -> bool:
        """Return whether a connection goes to an address that the engine's name has no more."""
        return connection.address is not None and connection.address not in self._addresses

    def _close_former(self) -> None:
        for connection in list(self._idle):
            if self._is_former(connection):
                connection.close()

    def _free(self, connection: EngineConnection) -> None:
        if connection.address is not None and self._is_former(connection):
            connection.close()
            return
        now = connection.loop.time()
        connection.idle_since = now
        self._idle.append(connection)
        # the first is the oldest
        while self._idle and self._idle[0].idle_since < now - self._keepalive:
            self._idle.pop(0).close()

    def _lost(self, connection: EngineConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        elif connection.is_stale:
            # what closes one kept connection has mostly closed the others, too
            for kept in list(self._idle):
                kept.close()
