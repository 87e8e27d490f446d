"""Legs that pass a request whole to one engine, and WebSockets to engines. On aiohttp, which is
simpler: these routes are rare.

Owns one aiohttp session, and one for each WebSocket. Connections are not kept: if one closes behind
a POST, nothing shows whether the engine has begun to serve it. Answers that are read whole count in
the answer budget of all engines. Failures become `EngineError`s here, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from ssl import SSLContext

import aiohttp
from yarl import URL

from pdproxy.kit.engine_networks import USUAL, EngineNetworks
from pdproxy.kit.errors import (
    AnswerTooLargeError,
    ConnectionLostError,
    EngineError,
    EngineRefusedError,
    EngineTlsError,
    EngineUnreachableError,
    Wait,
    no_more_files,
)
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream import reach
from pdproxy.upstream.answer_budget import AnswerBudget, BudgetShare
from pdproxy.upstream.client import LOCAL_ERRORS
from pdproxy.wire.body_bounds import Body
from pdproxy.wire.realtime import MAX_EVENT

_MAX_HEADER = 4 * 2**20
"""Bytes. vLLM describes each item of a binary embedding in a header."""
PING = 20.0
"""Seconds between two pings on a WebSocket over which nothing else comes, as of vLLM's server. The
answer may take half as long.
"""
_CLOSING = 1.0
"""Seconds for an engine that reads nothing to take the end of a WebSocket."""


class PassthroughLeg:
    """An engine's answer whose head has come. `share` counts what is held of it."""

    def __init__(self, url: str, answer: aiohttp.ClientResponse, share: BudgetShare) -> None:
        self._url = url
        self.share = share
        self._answer = answer
        self.status = answer.status
        self.headers = [(name.lower(), value) for name, value in answer.raw_headers]

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return self._answer.content_type == "text/event-stream"

    def close(self) -> None:
        """Close the leg. An engine that is still at work aborts the request."""
        self._answer.close()

    async def read(self) -> bytes:
        """Return the whole body. Raises EngineError, also for one that is too large."""
        self.share.check_length(self.headers)
        with translated(self._url):
            while chunk := await self._answer.content.readany():
                self.share.add(chunk)
        return self.share.take_counted()

    async def chunk(self) -> bytes:
        """Return what has come since the last call, waiting for something; b"" at the end. Raises
        EngineError.
        """
        with translated(self._url):
            return await self._answer.content.readany()


class EngineWebSocket:
    """An engine's end of a WebSocket. An engine that answers no ping is lost."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        opened: aiohttp.ClientWebSocketResponse[bool],
    ) -> None:
        self._url = url
        self._session = session
        self._opened = opened

    async def send(self, message: bytes) -> None:
        """Send a message of text, and wait until the engine can take more. Raises EngineError."""
        with translated(self._url):
            await self._opened.send_frame(message, aiohttp.WSMsgType.TEXT)

    async def receive(self) -> bytes:
        """Return the engine's next message. It is text, or is read as text.

        Raises:
            AnswerTooLargeError: it is longer than `MAX_EVENT`.
            EngineError: the engine has closed the WebSocket, or is lost.
        """
        with translated(self._url):
            found = await self._opened.receive()
        if found.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            return bytes(found.data)
        error, code = found.data, self._opened.close_code
        if isinstance(error, aiohttp.WebSocketError) and error.code == 1009:
            raise AnswerTooLargeError(f"{self._url} sent a message of more than {MAX_EVENT} bytes")
        raise ConnectionLostError(f"{self._url} closed a WebSocket with {code}")

    async def close(self) -> None:
        """Close it, whatever the engine does."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING):
                    await self._opened.close()
        finally:
            await self._session.close()


class PassthroughLegs:
    """Opens legs. `deadlines`: that of a connection; all others belong to the caller.

    `key` and `tls` are called with an engine's URL for each request; None: it has none. `connector`
    makes the session's connector; None: aiohttp's own, which connects to `networks` alone.
    """

    def __init__(
        self,
        *,
        deadlines: Deadlines,
        budget: AnswerBudget,
        key: Callable[[str], str | None] = lambda _: None,
        tls: Callable[[str], SSLContext | None] = lambda _: None,
        connector: Callable[[], aiohttp.BaseConnector] | None = None,
        networks: EngineNetworks = USUAL,
    ) -> None:
        self._connector = connector or reach.connector(networks, force_close=True)
        self._deadlines = deadlines
        self._budget = budget
        self._key = key
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: Body
    ) -> PassthroughLeg:
        """Send a request, and return the answer once its head has come. The caller must close it.

        Raises:
            EngineUnreachableError: the engine accepted no connection, and has received nothing.
            EngineError: it sent invalid data, or closed the connection.
        """
        lines, tls = self._lines(url, headers), self._tls(url)
        with translated(url):
            answer = await self._opened().request(
                method,
                URL(url + path, encoded=True),
                data=body or None,
                headers=lines,
                allow_redirects=False,
                ssl=tls if tls is not None else True,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._deadlines.connect),
            )
        return PassthroughLeg(url, answer, self._budget.share())

    async def open_websocket(
        self, url: str, path: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> EngineWebSocket:
        """Open a WebSocket. The caller must close it.

        Raises:
            EngineUnreachableError: the engine accepted no connection.
            EngineRefusedError: it answered the handshake with an error.
            EngineError: it sent invalid data, or closed the connection.
        """
        lines, tls = self._lines(url, headers), self._tls(url)
        # a session of its own, for aiohttp takes no deadline of the connection here
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._deadlines.connect)
        session = self._session_with(timeout)
        try:
            with translated(url):
                opened = await session.ws_connect(
                    URL(url + path, encoded=True),
                    headers=lines,
                    ssl=tls if tls is not None else True,
                    timeout=aiohttp.ClientWSTimeout(ws_close=0),
                    heartbeat=PING,
                    max_msg_size=MAX_EVENT,
                    decode_text=False,
                )
        except aiohttp.WSServerHandshakeError as error:
            await session.close()
            text = f"{url} answered {error.status} to a WebSocket on {path}"
            raise EngineRefusedError(text, status=error.status, body=b"") from None
        except BaseException:
            await session.close()
            raise
        return EngineWebSocket(url, session, opened)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:  # made inside its event loop
            self._session = self._session_with(aiohttp.ClientTimeout(total=None))
        return self._session

    def _session_with(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=self._connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "User-Agent", "Content-Type"),
            auto_decompress=False,
            max_line_size=_MAX_HEADER,
            max_field_size=_MAX_HEADER,
            timeout=timeout,
            trust_env=False,
        )

    def _lines(self, url: str, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
        lines = [(name.decode("latin-1"), _text(value)) for name, value in headers]
        if (key := self._key(url)) is not None:
            lines.append(("authorization", f"Bearer {key}"))
        return lines


def _text(value: bytes) -> str:
    """Return a header's value so that aiohttp, which writes UTF-8, writes the same bytes; other
    bytes are taken for Latin-1.
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn aiohttp's exceptions into `EngineError`s and `OverloadedError`s."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError:
        raise EngineUnreachableError(
            f"{url} took no connection in time", wait=Wait.CONNECT
        ) from None
    except aiohttp.ClientConnectorSSLError as error:
        raise EngineTlsError(f"{url}: {error}") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise EngineTlsError(f"{url}: {error.certificate_error}") from None
    except aiohttp.ClientConnectorError as error:
        if error.errno in LOCAL_ERRORS:
            raise no_more_files(error) from None
        raise EngineUnreachableError(f"no connection to {url}: {error.strerror or error}") from None
    except (
        aiohttp.ServerConnectionError,
        aiohttp.ClientOSError,
        aiohttp.ClientPayloadError,
    ) as error:
        raise ConnectionLostError(f"{url}: {type(error).__name__}") from None
    except aiohttp.WSServerHandshakeError:
        raise
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise EngineError(f"{url}: {type(error).__name__}") from None
