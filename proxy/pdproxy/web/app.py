"""The FastAPI application: all routes but the generating ones, and the documentation of all.

`web.protocol` takes the generating routes before they get here: they are declared only for `/docs`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from pdproxy import __version__
from pdproxy.kit.errors import BadRequestError, BodyTooLargeError, NotStoredError, PdproxyError, UnauthorizedError
from pdproxy.serving.access.keys import CHALLENGE
from pdproxy.serving.access.routes import ENTRIES, TABLE, RouteEntry, RouteKind
from pdproxy.settings.listen import Cors
from pdproxy.web import openapi
from pdproxy.web.cors import middleware_options
from pdproxy.web.docs_page import add_docs
from pdproxy.web.operation import Operation, add_operation
from pdproxy.web.operators import Operators
from pdproxy.web.passthrough_asgi import CONNECTION, PassthroughAsgi, PassthroughResponse
from pdproxy.web.slashes import redirect_by_path, redirect_of
from pdproxy.wire import lmcache_telemetry
from pdproxy.wire.errors import error_body, retry_headers


@dataclass(frozen=True, slots=True)
class Answers:
    """What the routes call to make their answers, once per request."""

    authorize: Callable[[bytes | None], None]
    operation: Operation
    models: Callable[[bytes | None], Awaitable[bytes]]
    passthrough: PassthroughAsgi
    cors: Cors
    root_path: str = ""
    """The path before all routes, which a balancer in front may strip."""
    telemetry: Callable[[bytes], bool] | None = None
    """Takes the body of a telemetry request; returns whether it was LMCache's telemetry. None: there is no such route."""
    refused: Callable[[PdproxyError, str], None] = lambda error, client: None
    """Reports a request without a valid key: the error, and the client's address."""
    operators: Operators = field(default_factory=Operators)
    """Who may see what is for operators."""


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
    redirect_by_path(app)
    add_docs(app)
    openapi.describe(app)

    @app.exception_handler(PdproxyError)
    async def _failed(request: Request, error: PdproxyError) -> Response:
        answer = Response(error_body(error), error.status, media_type="application/json")
        answer.raw_headers += retry_headers(error)
        if isinstance(error, UnauthorizedError):
            if (connection := request.scope.get(CONNECTION)) is not None:
                answers.refused(error, answers.passthrough.identify.address(connection, request.scope["headers"]))
            answer.raw_headers.append(CHALLENGE)
        return answer

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        # As vLLM answers an unknown route or a wrong method.
        headers = error.headers
        if error.status_code == 404 and (redirect := redirect_of(app, request)) is not None:
            return redirect
        if error.status_code == 405 and (entry := ENTRIES.get(request.scope["path"])) is not None:
            headers = {"allow": ", ".join(entry.methods)}  # of all routes of the path, not of the first one
        return JSONResponse({"detail": error.detail}, error.status_code, headers=headers)

    app.add_middleware(CORSMiddleware, **middleware_options(answers.cors))  # type: ignore[arg-type]

    add_operation(app, answers.operation, answers.operators.admits)

    @app.get(
        "/v1/models",
        summary="The models that the engines serve",
        tags=["OpenAI"],
        response_class=Response,
        responses=openapi.listing_answers(),
    )
    async def models(request: Request) -> Response:
        given = _authorize(request, answers)
        listed = await answers.models(given)
        answers.authorize(given)  # the key may have been taken away while engines were asked
        return Response(listed, media_type="application/json")

    for entry in TABLE:
        if entry.kind is not RouteKind.OWN:
            _add(app, entry, answers)
    answers.operators.guard(app)
    if answers.telemetry is not None:
        _add_telemetry(app, answers.telemetry)  # for engines
    return app


def _authorize(request: Request, answers: Answers) -> bytes | None:
    """Return a request's `Authorization`.

    Raises:
        UnauthorizedError: the proxy has keys, and it is none of them.
    """
    authorization = request.headers.get("authorization")
    given = authorization.encode("latin-1") if authorization is not None else None
    answers.authorize(given)
    return given


def _add_telemetry(app: FastAPI, take: Callable[[bytes], bool]) -> None:
    @app.post(lmcache_telemetry.PATH, summary="Where LMCache reports that KV is stored", tags=["engines"])
    async def stored(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > lmcache_telemetry.MAX_BYTES:
                raise BodyTooLargeError(f"telemetry is over {lmcache_telemetry.MAX_BYTES} bytes")
        if not take(bytes(body)):
            raise BadRequestError("expected LMCache's telemetry: event, request_ids_set, world_size, kv_rank")
        return JSONResponse({"status": "ok"})


def _add(app: FastAPI, entry: RouteEntry, answers: Answers) -> None:
    async def passed(_: Request) -> Response:
        return PassthroughResponse(answers.passthrough, entry)

    async def refused(request: Request) -> Response:
        _authorize(request, answers)
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
