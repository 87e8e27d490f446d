"""The admin API's routes under /admin/v1, and those of vllm-router. `web.admin.service` does what
they ask for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from pdproxy import __version__
from pdproxy.fleet.entries import EngineEntry
from pdproxy.kit.errors import PdproxyError
from pdproxy.observe.recent import KEPT
from pdproxy.web.admin.api import AdminApi
from pdproxy.web.admin.bodies import body_of, flag_of, number_of, query_of
from pdproxy.web.admin.changes import Change
from pdproxy.web.admin.decided import DecisionList
from pdproxy.web.admin.gate import answer_of
from pdproxy.web.admin.live import STILL, Feed, LiveResponse
from pdproxy.web.admin.openapi import describe, operation, parameter
from pdproxy.web.admin.page import add_page
from pdproxy.web.admin.shapes import (
    DrainOrder,
    EngineChanged,
    EngineList,
    EngineOrder,
    LevelShown,
    LogLevelOrder,
    RequestList,
)
from pdproxy.web.admin.workers import add_workers
from pdproxy.web.docs_page import add_docs
from pdproxy.web.operation import Operation, add_operation
from pdproxy.web.slashes import redirect_by_path, redirect_of

BASE = "/admin/v1"
MAX_SECONDS = 604_800
_NAME = parameter("name", "the engine's id, or its URL with its slashes escaped (%2F)", "path")
_AT_ONCE = parameter(
    "at_once",
    "true: it is removed now, and its requests go on; false: it is drained first",
    "query",
    "boolean",
)
_SECONDS = parameter(
    "seconds", "until its requests are ended (default: deadlines.engine_drain)", "query", "number"
)
_POOL = parameter("pool", "only engines of the pool with this name", "query")
_PAIRS = parameter("pairs", "whether entries show pairs (default: true)", "query", "boolean")
_RECENT = [
    parameter(
        "limit", f"how many at most, up to {KEPT} (default: all that are shown)", "query", "integer"
    ),
    parameter("id", "only requests with this id", "query"),
    parameter("outcome", "only requests with this outcome; running: those that run", "query"),
]


def create_admin_app(api: AdminApi, feed: Feed, shown_too: Operation | None = None) -> FastAPI:
    """Return the application. `feed`: of what the page shows; `shown_too`: makes the answers of
    what clients' listeners have for operators.
    """
    app = FastAPI(
        title="pdproxy admin",
        version=__version__,
        description="Engines, the log level and recent requests of a running pdproxy.",
        docs_url=None,
        redoc_url=None,
    )
    redirect_by_path(app)
    add_docs(app)
    if shown_too is not None:
        add_operation(app, shown_too, lambda _: True, documented=False)

    @app.exception_handler(PdproxyError)
    async def _failed(_: Request, error: PdproxyError) -> Response:
        return answer_of(error)

    @app.exception_handler(Exception)
    async def _broken(_: Request, error: Exception) -> Response:
        return answer_of(PdproxyError(type(error).__name__))  # it is raised once more, and logged

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404 and (redirect := redirect_of(app, request)) is not None:
            return redirect
        kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
        body = {
            "error": {
                "message": error.detail,
                "type": kind,
                "param": None,
                "code": error.status_code,
            }
        }
        return JSONResponse(body, error.status_code, headers=error.headers)

    _add_engines(app, api)
    _add_others(app, api)
    _add_live(app, feed)
    add_page(app)
    add_workers(app, api)
    describe(app)
    return app


def _add_engines(app: FastAPI, api: AdminApi) -> None:
    async def changed(change: Change) -> Response:
        status, answer = await api.change(change)
        return shown(answer, status)

    async def engines(request: Request) -> Response:
        query = query_of(request, ("pairs", "pool"))
        pairs = flag_of(query, "pairs", usual=True)
        of = api.service.pool(query["pool"]) if "pool" in query else None
        return shown(await api.engines(pairs=pairs, of=of))

    async def engine(request: Request) -> Response:
        query_of(request, ())
        return shown(await api.engine(_name(request)))

    async def add(request: Request) -> Response:
        query_of(request, ())
        return await changed(Change("add", "", await body_of(request)))

    async def drain(request: Request) -> Response:
        query_of(request, ())
        return await changed(Change("drain", _name(request), await body_of(request)))

    async def undrain(request: Request) -> Response:
        query_of(request, ())
        return await changed(Change("undrain", _name(request)))

    async def remove(request: Request) -> Response:
        query = query_of(request, ("at_once", "seconds"))
        seconds = number_of(query, "seconds", MAX_SECONDS)
        at_once = flag_of(query, "at_once", usual=False)
        return await changed(Change("remove", _name(request), at_once=at_once, seconds=seconds))

    one = f"{BASE}/engines/{{name:path}}"
    named = (400, 404, 409)
    _route(
        app,
        "GET",
        f"{BASE}/engines",
        engines,
        "All engines",
        {200: EngineList},
        (400,),
        [_POOL, _PAIRS],
    )
    _route(
        app,
        "POST",
        f"{BASE}/engines",
        add,
        "Add an engine",
        {201: EngineChanged, 200: EngineChanged},
        (400, 409),
        body=EngineOrder,
    )
    _route(
        app,
        "POST",
        f"{one}/drain",
        drain,
        "Drain an engine",
        {202: EngineChanged},
        named,
        [_NAME],
        body=DrainOrder,
    )
    _route(
        app,
        "POST",
        f"{one}/undrain",
        undrain,
        "Use an engine again",
        {200: EngineChanged},
        named,
        [_NAME],
    )
    _route(
        app,
        "GET",
        one,
        engine,
        "One engine, with all its pairs",
        {200: EngineEntry},
        (404,),
        [_NAME],
    )
    _route(
        app,
        "DELETE",
        one,
        remove,
        "Drain an engine, and remove it",
        {202: EngineChanged, 200: EngineChanged},
        named,
        [_NAME, _AT_ONCE, _SECONDS],
    )


def _add_others(app: FastAPI, api: AdminApi) -> None:
    async def level(request: Request) -> Response:
        query_of(request, ())
        return shown(api.service.level())

    async def set_level(request: Request) -> Response:
        query_of(request, ())
        status, answer = await api.change(Change("log_level", "", await body_of(request)))
        return shown(answer, status)

    async def requests(request: Request) -> Response:
        query = query_of(request, ("limit", "id", "outcome"))
        limit = number_of(query, "limit", KEPT, whole=True)
        most = 2 * KEPT if limit is None else int(limit)
        return shown(await api.requests(most, query.get("id"), query.get("outcome")))

    async def decisions(request: Request) -> Response:
        query_of(request, ())
        return shown(await api.decisions())

    path = f"{BASE}/log_level"
    _route(app, "GET", path, level, "The log level", {200: LevelShown})
    _route(
        app,
        "PUT",
        path,
        set_level,
        "Set the log level",
        {200: LevelShown},
        (400,),
        body=LogLevelOrder,
    )
    _route(
        app,
        "GET",
        f"{BASE}/requests",
        requests,
        "Requests that run, and the last ones",
        {200: RequestList},
        (400,),
        _RECENT,
    )
    _route(
        app,
        "GET",
        f"{BASE}/decisions",
        decisions,
        "The last decisions of the pools' placements",
        {200: DecisionList},
    )


def _add_live(app: FastAPI, feed: Feed) -> None:
    async def live(request: Request) -> Response:
        query_of(request, ())
        return LiveResponse(feed, request.scope[STILL])

    _route(
        app,
        "GET",
        f"{BASE}/live",
        live,
        "What the page at / shows, as server-sent events, for as long as they are read",
        {200: None},
        (429,),
    )


def _route(
    app: FastAPI,
    method: str,
    path: str,
    endpoint: Callable[[Request], Awaitable[Response]],
    summary: str,
    answers: dict[int, type | None],
    errors: Sequence[int] = (),
    parameters: Sequence[dict[str, Any]] = (),
    *,
    body: type | None = None,
) -> None:
    responses, extra = operation(answers, (*errors, 401), parameters, body)
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        summary=summary,
        response_model=None,
        responses=responses,
        openapi_extra=extra,
    )


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def shown(value: object, status: int = 200) -> Response:
    """Return a struct as an answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
