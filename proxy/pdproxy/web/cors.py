"""Cross-origin rules: the headers of answers for browsers on other sites.

Starlette's middleware, which vLLM uses as well, decides. The FastAPI application has it as a
middleware; the data path, which is not an ASGI application, asks it for the headers of its answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware

from pdproxy.settings.listen import Cors

Line = tuple[bytes, bytes]


def middleware_options(cors: Cors) -> dict[str, object]:
    """Return the arguments of Starlette's middleware."""
    return {
        "allow_origins": cors.allowed_origins,
        "allow_credentials": cors.allow_credentials,
        "allow_methods": cors.allowed_methods,
        "allow_headers": cors.allowed_headers,
        # A page's script may read no other headers than these and a few that every browser shows.
        "expose_headers": ["X-Request-Id", "Retry-After"] if cors.allowed_origins else [],
    }


class CorsHeaders:
    """The headers of an answer by those of its request. One for the whole process."""

    def __init__(self, cors: Cors) -> None:
        self._rules = CORSMiddleware(_nothing, **middleware_options(cors))  # type: ignore[arg-type]

    def __call__(self, request_headers: Iterable[Line]) -> list[Line]:
        """Return the lines to add to the answer."""
        for name, value in request_headers:
            if name == b"origin":
                return self._for(value.decode("latin-1"))
        return _VARY

    def may_connect(self, request_headers: Iterable[Line]) -> bool:
        """Return whether a WebSocket may be opened: by what is no page, by a page of this server,
        or by one of a site that is allowed. Browsers ask no server before.
        """
        found = dict(request_headers)
        origin = found.get(b"origin")
        return (
            origin is None
            or origin.partition(b"://")[2] == found.get(b"host")
            or self._rules.is_allowed_origin(origin.decode("latin-1"))
        )

    def _for(self, origin: str) -> list[Line]:
        rules, found = self._rules, MutableHeaders(Headers(self._rules.simple_headers))
        if rules.is_allowed_origin(origin) and (
            not rules.allow_all_origins or rules.allow_credentials
        ):
            found["Access-Control-Allow-Origin"] = origin
        return [*found.raw, *_VARY]


_VARY: list[Line] = [(b"vary", b"Origin")]


async def _nothing(*_: object) -> None:
    """Stand in for the application: this middleware serves none."""
