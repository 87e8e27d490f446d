"""The FastAPI application: all routes but the generating ones, and the documentation of all.

`web.protocol` takes the generating routes before they get here: they are declared only for `/docs`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from pdproxy import __version__
from pdproxy.kit.errors import NotStoredError, PdproxyError, UnauthorizedError
from pdproxy.serving.access.keys import CHALLENGE, ValidKey
from pdproxy.serving.access.routes import ENTRIES, MODELS, TABLE, RouteEntry, RouteKind
from pdproxy.settings.listen import Cors
from pdproxy.web import openapi
from pdproxy.web.cors import middleware_options
from pdproxy.web.docs_page import add_docs
from pdproxy.web.passthrough_asgi import CONNECTION, PassthroughAsgi, PassthroughResponse
from pdproxy.wire.errors import error_body, retry_headers

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class State(Enum):
    """Whether requests can be served: yes, yes but no prompt can be split, no."""

    OK = "ok"
    DEGRADED = "degraded"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request could be served now. `reason`: why not, None if it could; `details`: everything that is wrong."""

    state: State
    reason: str | None
    details: list[str]


@dataclass(frozen=True, slots=True)
class Answers:
    """What the routes call to make their answers, once per request."""

    load: Callable[[], int]
    readiness: Callable[[], Awaitable[Readiness]]
    models: Callable[[bytes | None, ValidKey | None], Awaitable[bytes]]
    metrics: Callable[[], Awaitable[bytes]]
    passthrough: PassthroughAsgi
    cors: Cors
    not_taking: Callable[[], str | None] = lambda: None
    """Returns why this process takes no requests, whatever its engines do; None: it takes some."""
    engines: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns how many engines make KV, and how many use other engines' KV."""
    root_path: str = ""
    """The path before all routes, which a balancer in front may strip."""


def create_app(answers: Answers) -> FastAPI:
    """Return the application."""
    app = FastAPI(
        title="pdproxy",
        version=__version__,
        description="One OpenAI server in front of vLLM engines with prefill and decode split apart.",
        docs_url=None,
        redoc_url=None,
    )
    app.root_path = answers.root_path
    add_docs(app)
    openapi.describe(app)

    @app.exception_handler(PdproxyError)
    async def _failed(request: Request, error: PdproxyError) -> Response:
        answer = Response(error_body(error), error.status, media_type="application/json")
        answer.raw_headers += retry_headers(error)
        if isinstance(error, UnauthorizedError):
            answer.raw_headers.append(CHALLENGE)
        return answer

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        # As vLLM answers an unknown route or a wrong method.
        headers = error.headers
        if error.status_code == 405 and (entry := ENTRIES.get(request.scope["path"])) is not None:
            headers = {"allow": ", ".join(entry.methods)}  # of all routes of the path, not of the first one
        return JSONResponse({"detail": error.detail}, error.status_code, headers=headers)

    app.add_middleware(CORSMiddleware, **middleware_options(answers.cors))  # type: ignore[arg-type]

    async def health() -> Response:
        return Response(status_code=200)

    for path, method in (("/ping", "POST"), ("/ping", "GET"), ("/health", "GET")):
        app.add_api_route(
            path,
            health,
            methods=[method],
            summary="Whether the process runs",
            tags=["operation"],
            response_class=Response,
            responses=openapi.own_answers(None),
        )

    @app.get(
        "/ready",
        summary="Whether a request could be served",
        tags=["operation"],
        responses=openapi.own_answers(openapi.READY, 503),
    )
    async def ready() -> Response:
        state = await answers.readiness()
        is_ready = state.state is not State.NOT_READY
        body = {"ready": is_ready, "state": state.state.value, "reason": state.reason, "details": state.details}
        return JSONResponse(body, 200 if is_ready else 503)

    @app.get(
        "/ready/proxy",
        summary="Whether this proxy takes requests, whatever its engines do",
        tags=["operation"],
        responses=openapi.own_answers(openapi.READY_PROXY, 503),
    )
    async def ready_proxy() -> Response:
        reason = answers.not_taking()
        return JSONResponse({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    @app.get(
        "/healthcheck",
        summary="That the process runs, and its engines by role",
        tags=["operation"],
        responses=openapi.own_answers(
            openapi.object_of(status=openapi.TEXT, prefill_instances=openapi.COUNT, decode_instances=openapi.COUNT)
        ),
    )
    async def healthcheck() -> dict[str, str | int]:
        prefill, decode = answers.engines()
        return {"status": "ok", "prefill_instances": prefill, "decode_instances": decode}

    @app.get(
        "/load",
        summary="The number of requests in flight",
        tags=["operation"],
        responses=openapi.own_answers(openapi.object_of(server_load=openapi.COUNT)),
    )
    async def load() -> dict[str, int]:
        return {"server_load": answers.load()}

    @app.get(
        "/version",
        summary="The version of pdproxy",
        tags=["operation"],
        responses=openapi.own_answers(openapi.object_of(version=openapi.TEXT)),
    )
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get(
        "/metrics",
        summary="Prometheus metrics",
        tags=["operation"],
        response_class=Response,
        responses=openapi.own_answers(openapi.TEXT, media=openapi.PROMETHEUS),
    )
    async def metrics() -> Response:
        return Response(await answers.metrics(), headers={"content-type": PROMETHEUS})

    @app.get(
        "/v1/models",
        summary="The models that the engines serve",
        tags=["OpenAI"],
        response_class=Response,
        responses=openapi.listing_answers(),
    )
    async def models(request: Request) -> Response:
        key = _authorize(request, answers, MODELS)
        given = request.headers.get("authorization")
        page = await answers.models(None if given is None else given.encode("latin-1"), key)
        return Response(page, media_type="application/json")

    for entry in TABLE:
        if entry.kind is not RouteKind.OWN:
            _add(app, entry, answers)
    return app


def _authorize(request: Request, answers: Answers, path: str) -> ValidKey | None:
    """Return the key of a request, None if no keys are wanted. `path`: in the table of routes.

    Raises:
        UnauthorizedError, LimitError, ForbiddenError: it has none that is good for that.
    """
    scope = request.scope
    found = answers.passthrough.identify.find(scope[CONNECTION], scope["headers"], path)
    if found.error is not None:
        raise found.error
    return found.key


def _add(app: FastAPI, entry: RouteEntry, answers: Answers) -> None:
    async def passed(_: Request) -> Response:
        return PassthroughResponse(answers.passthrough, entry)

    async def refused(request: Request) -> Response:
        _authorize(request, answers, entry.path)
        name = request.path_params["response_id"]
        raise NotStoredError(f"Response with id '{name}' not found: {entry.why}", param="response_id")

    endpoint = {RouteKind.SPLIT: _not_installed, RouteKind.PASSED: passed, RouteKind.REFUSED: refused}[entry.kind]
    app.add_api_route(
        entry.path,
        endpoint,
        methods=list(entry.methods),
        summary=entry.why[0].upper() + entry.why[1:],
        tags=["OpenAI" if entry.kind is RouteKind.SPLIT else "one engine alone"],
        openapi_extra=openapi.request_of(entry),
        response_class=Response,
        response_model=None,
        status_code=404 if entry.kind is RouteKind.REFUSED else 200,
        responses=openapi.answers_of(entry),
    )


async def _not_installed(_: Request) -> Response:
    """Answer for a server that was started without the data path's protocol class."""
    raise PdproxyError("the data path is not installed")
