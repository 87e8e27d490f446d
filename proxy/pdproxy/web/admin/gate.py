"""Who may use the admin API. Each request comes here first.

Owns the log line of each change, and the answer to a failure of the API itself.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdproxy.kit.addresses import is_loopback, read_place
from pdproxy.kit.errors import ForbiddenError, PdproxyError, RevokedError, UnauthorizedError
from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.observe.description import Label, counter
from pdproxy.observe.events import Observers
from pdproxy.serving.access.keys import CHALLENGE, Keys, ValidKey
from pdproxy.settings.errors import quote
from pdproxy.web.admin.errors import body_of
from pdproxy.web.admin.live import STILL
from pdproxy.web.admin.page import is_page
from pdproxy.web.refusals import report_refusal
from pdproxy.web.wrong_keys import ADMIN, WrongKeys
from pdproxy.wire.errors import retry_headers

logger = logging.getLogger("pdproxy.admin")

_READING = ("GET", "HEAD")
_CHECKED = "pdproxy.checked"
"""The key of an ASGI scope under which it is found who sends the request, or why it is refused."""
OPEN = ("/docs", "/openapi.json")
"""The documentation, which needs no key, as the page: a browser sends none for a page."""
ADMIN_ENDS = (
    ("done", "answered"),
    ("refused", "it was wrong, had no valid key, or is not possible for the engine (4xx)"),
    ("failed", "it failed in pdproxy itself"),
)
ADMIN_REQUESTS = counter(
    "pdproxy_admin_requests_total",
    "requests",
    "Requests to the admin API (listen.admin)",
    Label("result", ADMIN_ENDS),
)


class Gate:
    """Lets requests through to an application: those with a key, where keys are set.

    Pages that a browser shows can reach a port of its machine's loopback, which may lead to a Unix
    socket here (`ssh -L`). So requests without a key must name the loopback as their host, and may
    not come from a page of another site. `is_tcp`: how the log names who sends them.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        observers: Observers,
        wrong: WrongKeys | None = None,
        *,
        is_tcp: bool,
    ) -> None:
        self._app = app
        self._wrong = wrong
        self._keys = keys
        self._observers = observers
        self._is_tcp = is_tcp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. One whose key was taken away meanwhile does nothing, and shows nothing.

        One whose key may only read by now changes nothing.
        """
        status, digest, method = 0, None, scope["method"]
        refusal: PdproxyError | None = None

        async def received() -> Message:
            nonlocal refusal
            message = await receive()
            if message["type"] == "http.disconnect":
                return message
            if refusal is None:
                # its body, which says what is to be done, may come late
                refusal = self._why_no_more(digest, method)
            if refusal is not None:
                raise refusal
            return message

        async def watched(message: Message) -> None:
            nonlocal status, refusal
            if message["type"] == "http.response.start":
                # other workers may be asked for seconds
                refusal = refusal or self._why_no_more(digest)
                if refusal is not None:
                    drop_traceback(refusal)
                    status = refusal.status
                    await answer_of(refusal)(scope, receive, send)
                else:
                    status = message["status"]
            if refusal is None:
                await send(message)

        by = None
        try:
            found = scope.get(_CHECKED) or self.checked(scope)
            if isinstance(found, PdproxyError):
                raise found
            by, digest = found
            if (error := self._why_no_more(digest, method)) is not None:
                raise error  # it has waited behind others
            scope[STILL] = partial(self._why_no_more, digest)
            await self._app(scope, received, watched)
        except PdproxyError as error:
            drop_traceback(error)
            await answer_of(error)(scope, receive, watched)
        except Exception as error:
            logger.error("a request failed in pdproxy itself: %s", frames(error))  # noqa: TRY400
            drop_traceback(error)
            if not status:
                await answer_of(PdproxyError(type(error).__name__))(scope, receive, watched)
        self._observers.count(
            ADMIN_REQUESTS, "done" if status < 400 else "refused" if status < 500 else "failed"
        )
        if by is not None and scope["method"] not in _READING:
            logger.info("%s %s by %s: %d", scope["method"], quote(scope["path"]), by, status)

    def takes_body(self, scope: Scope) -> bool:
        """Return whether a request may send a body. Its head is complete."""
        found = scope[_CHECKED] = self.checked(scope)
        is_open = _is_open(scope["path"])
        return isinstance(found, tuple) and not is_open and scope["method"] not in _READING

    def checked(self, scope: Scope) -> tuple[str | None, bytes | None] | PdproxyError:
        """Return what `_check` returns, or why a request is refused, which is reported."""
        try:
            return self._check(scope)
        except PdproxyError as error:
            drop_traceback(error)
            address = str((scope.get("client") or ("admin",))[0])
            answer: PdproxyError = error
            if self._wrong is not None and type(error) is UnauthorizedError:
                answer = self._wrong.answer(error, address, ADMIN)
            report_refusal(self._observers, answer, address)
            return answer

    def _check(self, scope: Scope) -> tuple[str | None, bytes | None]:
        """Return who sends a request, as the log names it, and the digest of the key that lets it
        in, None if none does.

        For what is open to anybody nobody is named: there is nothing that could be changed.
        """
        headers = _first(scope)
        if _is_open(scope["path"]):
            return None, None
        if self._keys.wanted:
            key = self._keys.verified(headers.get(b"authorization"))
            if (error := _why_not(key, scope["method"])) is not None:
                raise error
            return f"key {key.name}", key.digest
        _refuse_pages(headers)
        return "the loopback" if self._is_tcp else "the socket", None

    def _why_no_more(self, digest: bytes | None, method: str = "GET") -> PdproxyError | None:
        """Return why the key that has let a request in does so no more, None if it does."""
        if digest is None:
            return None
        key = self._keys.valid.get(digest)
        if key is None or key.is_over(self._keys.wall()):
            return RevokedError("key", "revoked" if key is None else "expired")
        return _why_not(key, method)


def _is_open(path: str) -> bool:
    return path.startswith(OPEN) or is_page(path)


def _why_not(key: ValidKey, method: str) -> ForbiddenError | None:
    is_wrong = key.read_only and method not in _READING
    return ForbiddenError(f"the key {key.name} is read-only") if is_wrong else None


def answer_of(error: PdproxyError) -> Response:
    """Return an error as an answer."""
    answer = Response(body_of(error), error.status, media_type="application/json")
    answer.raw_headers += retry_headers(error)
    if isinstance(error, UnauthorizedError):
        answer.raw_headers.append(CHALLENGE)
    return answer


def _first(scope: MutableMapping[str, Any]) -> dict[bytes, bytes]:
    """Return a request's headers; of one that came twice, the first."""
    return dict(reversed(scope["headers"]))


def _refuse_pages(headers: dict[bytes, bytes]) -> None:
    host = read_place(headers.get(b"host", b"").decode("latin-1"))
    if host is None or not is_loopback(host.host):
        raise ForbiddenError(
            "without keys, only requests to localhost or an address of the loopback are taken"
        )
    origin = headers.get(b"origin")
    if origin is not None and read_place(origin.decode("latin-1").partition("://")[2]) != host:
        raise ForbiddenError("a page of another site may not use the admin API")
