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
from pdproxy.kit.errors import NotServedError, NotStoredError, PdproxyError, UnauthorizedError
from pdproxy.serving.access.keys import CHALLENGE, ValidKey
from pdproxy.serving.access.routes import ENTRIES, MODELS, TABLE, RouteEntry, RouteKind
from pdproxy.settings.listen import Cors
from pdproxy.web import openapi
from pdproxy.web.cors import middleware_options
from pdproxy.web.docs_page import add_docs
from pdproxy.web.operation import Operation, add_operation
from pdproxy.web.operators import Operators
from pdproxy.web.passthrough_asgi import CONNECTION, PassthroughAsgi, PassthroughResponse
from pdproxy.web.slashes import redirect_by_path, redirect_of
from pdproxy.wire.errors import error_body, retry_headers

_REPORTED = "pdproxy.reported"
"""The key of an ASGI scope that says that the refusal of its request was reported."""


@dataclass(frozen=True, slots=True)
class AnswerMakers:
    """What the routes call to make their answers, once per request."""

    operation: Operation
    models: Callable[[bytes | None, ValidKey | None], Awaitable[bytes]]
    passthrough: PassthroughAsgi
    cors: Cors
    root_path: str = ""
    """The path before all routes, which a balancer in front may strip."""
    operators: Operators = field(default_factory=Operators)
    """Who may see what is for operators."""


def create_app(answers: AnswerMakers) -> FastAPI:
    """Return the application."""
    app = FastAPI(
        title="pdproxy",
        version=__version__,
        description="One OpenAI server in front of vLLM engines with prefill and decode split "
        "apart.",
        docs_url=None,
        redoc_url=None,
    )
    app.root_path = answers.root_path
    redirect_by_path(app)
    add_docs(app)
    openapi.describe(app)

    @app.exception_handler(PdproxyError)
    async def _failed(request: Request, error: PdproxyError) -> Response:
        scope = request.scope
        if isinstance(error, UnauthorizedError) and CONNECTION in scope and _REPORTED not in scope:
            # of operators
            error = answers.passthrough.identify.refused(error, scope[CONNECTION], scope["headers"])
        answer = Response(error_body(error), error.status, media_type="application/json")
        answer.raw_headers += retry_headers(error)
        if isinstance(error, UnauthorizedError):
            answer.raw_headers.append(CHALLENGE)
        return answer

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        # As vLLM answers an unknown route or a wrong method.
        headers = error.headers
        if error.status_code == 404 and (redirect := redirect_of(app, request)) is not None:
            return redirect
        if error.status_code == 405 and (entry := ENTRIES.get(request.scope["path"])) is not None:
            # of all routes of the path, not of the first one
            headers = {"allow": ", ".join(entry.methods)}
        return JSONResponse({"detail": error.detail}, error.status_code, headers=headers)

    app.add_middleware(CORSMiddleware, **middleware_options(answers.cors))  # type: ignore[arg-type]

    def shows_all(request: Request) -> bool:
        try:
            return answers.operators.admits(request)
        except UnauthorizedError as error:
            if CONNECTION in (scope := request.scope):
                answers.passthrough.identify.note_wrong(error, scope[CONNECTION], scope["headers"])
            return False

    add_operation(app, answers.operation, shows_all)

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
        listed = await answers.models(None if given is None else given.encode("latin-1"), key)
        return Response(listed, media_type="application/json")

    for entry in TABLE:
        if entry.kind is not RouteKind.OWN:
            _add(app, entry, answers)
    answers.operators.guard(app)
    return app


def _authorize(request: Request, answers: AnswerMakers, path: str) -> ValidKey | None:
    """Return the key of a request, None if no keys are wanted. `path`: in the table of routes.

    Raises:
        UnauthorizedError, LimitError, ForbiddenError: it has none that is good for that.
    """
    scope = request.scope
    found = answers.passthrough.identify.find(scope[CONNECTION], scope["headers"], path)
    if found.error is not None:
        scope[_REPORTED] = True
        raise found.error
    return found.key


def _add(app: FastAPI, entry: RouteEntry, answers: AnswerMakers) -> None:
    async def passed(_: Request) -> Response:
        return PassthroughResponse(answers.passthrough, entry)

    async def refused(request: Request) -> Response:
        _authorize(request, answers, entry.path)
        if entry.kind is RouteKind.WEBSOCKET:
            raise NotServedError(f"{entry.path} is a WebSocket: the request must open one")
        name = request.path_params.get("response_id")
        if name is None:
            raise NotServedError(f"{entry.path} is not served: {entry.why}")
        raise NotStoredError(
            f"Response with id '{name}' not found: {entry.why}", param="response_id"
        )

    endpoint = {
        RouteKind.SPLIT: _not_installed,
        RouteKind.PASSED: passed,
        RouteKind.WEBSOCKET: refused,
        RouteKind.REFUSED: refused,
    }[entry.kind]
    app.add_api_route(
        entry.path,
        endpoint,
        methods=list(entry.methods),
        summary=entry.why[0].upper() + entry.why[1:],
        tags=["OpenAI" if entry.kind is RouteKind.SPLIT else "one engine alone"],
        openapi_extra=openapi.request_of(entry),
        response_class=Response,
        response_model=None,
        status_code=404 if endpoint is refused else 200,
        responses=openapi.answers_of(entry),
    )


async def _not_installed(_: Request) -> Response:
    """Answer for a server that was started without the data path's protocol class."""
    raise PdproxyError("the data path is not installed")
