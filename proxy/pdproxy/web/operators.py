"""Which routes of the clients' port are for operators alone (`listen.operator_routes`), and who is
one there.

The table of routes says which these are. A route that is not in the table is theirs, too: one that
is forgotten there is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from fastapi import FastAPI, Request
from starlette.requests import HTTPConnection
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdproxy.kit.errors import ForbiddenError
from pdproxy.serving.access.keys import Keys, digest
from pdproxy.serving.access.routes import Audience, audience_of

CLOSED = (
    "only operators may see this: ask where the admin API listens (listen.admin), or send one of "
    "auth.admin_keys; "
    "listen.operator_routes: everywhere shows it to everybody"
)


class Operators:
    """Who may see what is for operators. `keys`: theirs; `closed` returns whether others may not
    see it; `readers` returns the digests of keys that show it, and open nothing else.
    """

    def __init__(
        self,
        keys: Keys | None = None,
        closed: Callable[[], bool] = lambda: False,
        readers: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._keys = keys or Keys()
        self._closed = closed
        self.readers = readers

    def check(self, request: HTTPConnection) -> None:
        """Let a request pass.

        Raises:
            UnauthorizedError: it needs a key of operators, and has none.
            ForbiddenError: there are no such keys.
        """
        if not self._closed():
            return
        given = _authorization(request)
        if self._is_reader(given):
            return
        if not self._keys.wanted:
            raise ForbiddenError(CLOSED)
        self._keys.check(given)

    def admits(self, request: Request) -> bool:
        """Return whether a request is an operator's, where others get less of the same answer.

        Raises:
            UnauthorizedError: it shows a key that is no operator's.
        """
        if not self._closed():
            return True
        given = _authorization(request)
        if self._is_reader(given):
            return True
        if given is None or not self._keys.wanted:
            return False
        self._keys.check(given)
        return True

    def _is_reader(self, authorization: bytes | None) -> bool:
        known = self.readers()
        scheme, _, given = (authorization or b"").partition(b" ")
        return bool(known) and scheme.lower() == b"bearer" and digest(given.strip()).hex() in known

    def guard(self, app: FastAPI) -> None:
        """Have all routes of an application that are for operators check who asks. Call it behind
        the last route.
        """
        for route in app.routes:
            if isinstance(route, Route) and audience_of(route.path) in (Audience.OPERATORS, None):
                route.app = self._checked(route.app)

    def _checked(self, app: ASGIApp) -> ASGIApp:
        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            self.check(HTTPConnection(scope))
            await app(scope, receive, send)

        return checked


def _authorization(request: HTTPConnection) -> bytes | None:
    found = request.headers.get("authorization")
    return None if found is None else found.encode("latin-1")
