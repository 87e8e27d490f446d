"""Questions to engines over HTTP, each with a deadline. What goes wrong is an answer, too: it is what the check is about.

Owns one aiohttp session. Every question has a connection of its own, so that a kept one that the engine has just closed is
never taken for a failure, and no proxy of the environment is used: the proxy's own legs use none.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import aiohttp

from pdproxy.lab.check.facts import Trouble
from pdproxy.upstream.admin import describe_certificate


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with any status. `ahead`: seconds that its Date header is ahead of our clock, 0 where it has none."""

    status: int
    body: bytes
    ahead: float = 0.0

    def words(self) -> str:
        """Return status and body for a report: one line, not too long."""
        text = " ".join(self.body.decode("utf-8", "replace").split())
        shown = "".join(letter if letter.isprintable() else "?" for letter in text[:200])
        return f"{self.status}: {shown}{'...' if len(text) > 200 else ''}" if text else str(self.status)


class Asker:
    """Asks engines. `timeout` in seconds bounds each question; `key` and `tls` say by URL what an engine wants."""

    def __init__(
        self, *, timeout: float, key: Callable[[str], str | None], tls: Callable[[str], ssl.SSLContext | None]
    ) -> None:
        self.timeout = timeout
        self._key = key
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str, path: str) -> Reply | Trouble:
        """Ask with GET."""
        return await self._ask("GET", url, path, None, {})

    async def post(self, url: str, path: str, body: bytes, request_id: str = "") -> Reply | Trouble:
        """Ask with POST; `request_id` is what the engine's log will show."""
        headers = {"content-type": "application/json"} | ({"x-request-id": request_id} if request_id else {})
        return await self._ask("POST", url, path, body, headers)

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    async def _ask(
        self, method: str, url: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> Reply | Trouble:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.timeout),
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                trust_env=False,
            )
        if (key := self._key(url)) is not None:
            headers = {**headers, "authorization": f"Bearer {key}"}
        tls = self._tls(url)
        begun = time.time()
        try:
            async with self._session.request(
                method, url + path, data=body, headers=headers, allow_redirects=False, ssl=True if tls is None else tls
            ) as answer:
                content = await answer.read()
        except TimeoutError:
            return Trouble("silent", f"{path} did not answer in {self.timeout:g} s")
        except aiohttp.ClientConnectorCertificateError as error:
            return Trouble("unreachable", describe_certificate(error.certificate_error))
        except aiohttp.ClientConnectorError as error:
            return Trouble("unreachable", f"no connection: {_words(error.os_error)}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Trouble("broken", f"{path}: {type(error).__name__}: {error}")
        return Reply(answer.status, content, _ahead(answer.headers.get("date"), begun, time.time()))


def _words(error: OSError) -> str:
    # asyncio repeats the address in the text; the report names it already.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def _ahead(date: str | None, begun: float, over: float) -> float:
    """Return how far a Date header is surely ahead of (or behind) our clock: it has whole seconds, and is kept for one."""
    try:
        told = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    if told > over:
        return told - over
    return min(told + 2.0 - begun, 0.0)
