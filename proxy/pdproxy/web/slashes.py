"""A path with a slash too much is redirected to the route without it.

Starlette would write the request's `Host` into `Location`: who can choose that header for others,
or has a cache keep the answer, would send them elsewhere. Here `Location` is relative to the path,
so it is right behind every balancer.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

SLASH = b"/"


def redirect_by_path(app: FastAPI) -> None:
    """Turn off Starlette's own redirect. `redirect_of` takes its place, where the application
    answers a 404.
    """
    app.router.redirect_slashes = False


def redirect_of(app: FastAPI, request: Request) -> Response | None:
    """Return the redirect for a request without a route, None if there is none."""
    scope = request.scope
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or b""
    # clients resolve several differently
    if not raw.endswith(SLASH) or not path.endswith("/") or path.endswith("//"):
        return None
    asked = {**scope, "path": path[:-1]}
    if not any(route.matches(asked)[0] is not Match.NONE for route in app.routes):
        return None
    query: bytes = scope["query_string"]
    place = b"../" + raw[:-1].rpartition(SLASH)[2] + (b"?" + query if query else b"")
    return Response(status_code=307, headers={"location": place.decode("latin-1")})
