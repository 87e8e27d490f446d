"""Requests to engines over HTTP, each with a deadline. A failure is a result, too: the check
reports it.

Owns one aiohttp session. Every request has its own connection, so that a kept connection that the
engine has just closed does not count as a failure. No HTTP proxy of the environment is used, as
pdproxy's own legs use none.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import aiohttp

from pdproxy.check.facts import Trouble
from pdproxy.upstream.admin import describe_certificate, describe_close
from pdproxy.upstream.client import describe_os, describe_tls


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with any status. `ahead`: seconds that its Date header is ahead of our clock, 0
    without a Date header.
    """

    status: int
    body: bytes
    ahead: float = 0.0

    def summary(self) -> str:
        """Return status and body for a report: one line, the body cut at 200 characters."""
        text = " ".join(self.body.decode("utf-8", "replace").split())
        shown = "".join(letter if letter.isprintable() else "?" for letter in text[:200])
        return (
            f"{self.status}: {shown}{'...' if len(text) > 200 else ''}"
            if text
            else str(self.status)
        )


class HttpClient:
    """Sends requests to engines. `timeout` in seconds bounds each one; `key` and `tls` return what
    the engine of a URL needs.
    """

    def __init__(
        self,
        *,
        timeout: float,
        key: Callable[[str], str | None],
        tls: Callable[[str], ssl.SSLContext | None],
    ) -> None:
        self.timeout = timeout
        self._key = key
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str, path: str) -> Reply | Trouble:
        """Send a GET."""
        return await self._send("GET", url, path, None, {})

    async def post(self, url: str, path: str, body: bytes, request_id: str = "") -> Reply | Trouble:
        """Send a POST; the engine's log shows `request_id`."""
        headers = {"content-type": "application/json"} | (
            {"x-request-id": request_id} if request_id else {}
        )
        return await self._send("POST", url, path, body, headers)

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    async def _send(
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
                method,
                url + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=True if tls is None else tls,
            ) as answer:
                content = await answer.read()
        except TimeoutError:
            return Trouble("silent", f"{path} did not answer in {self.timeout:g} s")
        except aiohttp.ClientConnectorCertificateError as error:
            return Trouble("tls", describe_certificate(error.certificate_error))
        except aiohttp.ClientConnectorSSLError as error:
            return Trouble("tls", describe_certificate(error.os_error))
        except aiohttp.ClientConnectorError as error:
            return Trouble("unreachable", f"no connection: {describe_os(error.os_error)}")
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientConnectionResetError):
            return Trouble("broken", f"{path}: {describe_close(tls)}")
        except ssl.SSLError as error:
            return Trouble("tls", describe_tls(error))
        except OSError as error:
            return Trouble("broken", f"{path}: {describe_os(error)}")
        except (aiohttp.ClientError, ValueError) as error:
            return Trouble("broken", f"{path}: {type(error).__name__}: {error}")
        return Reply(answer.status, content, _ahead(answer.headers.get("date"), begun, time.time()))


def _ahead(date: str | None, begun: float, over: float) -> float:
    """Return how many seconds a Date header is at least ahead of (below 0: behind) our clock.

    The header has whole seconds, and an engine may use it for one second.
    """
    try:
        date_time = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    if date_time > over:
        return date_time - over
    return min(date_time + 2.0 - begun, 0.0)
