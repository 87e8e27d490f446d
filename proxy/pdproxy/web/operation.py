"""The routes that say how the proxy is doing: for health checks, and for operators. Both listeners
have them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from pdproxy import __version__
from pdproxy.kit.errors import BadRequestError
from pdproxy.observe.prompt_shares import PromptShare
from pdproxy.serving.access.routes import ENTRIES, Audience
from pdproxy.settings.engines import engine_url
from pdproxy.settings.errors import SettingsError
from pdproxy.web import openapi

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
MAX_PLACE = 300
"""Characters of an engine's `host:port`: a host name has 253 at most."""


class OperationState(Enum):
    """Whether requests can be served: yes, yes but no prompt can be split, no."""

    OK = "ok"
    DEGRADED = "degraded"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request could be served now. `reason`: why not, None if it could; `details`:
    everything that is wrong; `prompts`: how the last prompts of each pool were served.
    """

    state: OperationState
    reason: str | None
    details: list[str]
    prompts: Mapping[str, PromptShare] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineWork:
    """What is left at an engine that is to end. `reason`: why the engine may not end yet, None if
    it may; `requests`: how many it has; `handles`: how many KV handles name it that have not ended.
    """

    reason: str | None = None
    requests: int = 0
    handles: int = 0

    def __add__(self, other: EngineWork) -> EngineWork:
        """Return both together, with the first reason."""
        return EngineWork(
            self.reason or other.reason,
            self.requests + other.requests,
            self.handles + other.handles,
        )


async def _nothing_left(_: str) -> EngineWork:
    return EngineWork()


@dataclass(frozen=True, slots=True)
class Operation:
    """What the routes call to make their answers, once per request."""

    load: Callable[[], Awaitable[int]]
    readiness: Callable[[], Awaitable[Readiness]]
    metrics: Callable[[], Awaitable[bytes]]
    not_taking: Callable[[], str | None] = lambda: None
    """Returns why this process takes no requests, whatever its engines do; None: it takes some."""
    engines: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns how many engines make KV, and how many use other engines' KV."""
    drained: Callable[[str], Awaitable[EngineWork]] = _nothing_left
    """Returns what is left at the engine with this `host:port`."""


def add_operation(
    app: FastAPI,
    answers: Operation,
    shows_all: Callable[[Request], bool],
    *,
    documented: bool = True,
) -> None:
    """Add the routes. `shows_all` returns whether a request gets the details that only operators
    may see.

    `documented`: whether the application's OpenAPI document has them.
    """

    async def health() -> Response:
        return Response(status_code=200)

    async def ready(request: Request) -> Response:
        state = await answers.readiness()
        is_ready = state.state is not OperationState.NOT_READY
        more = {"state": state.state.value, "reason": state.reason, "details": state.details}
        return JSONResponse(
            {"ready": is_ready, **(more if shows_all(request) else {})}, 200 if is_ready else 503
        )

    async def ready_proxy(request: Request) -> Response:
        reason = answers.not_taking()
        more = {"reason": reason} if shows_all(request) else {}
        return JSONResponse({"ready": reason is None, **more}, 200 if reason is None else 503)

    async def drained(request: Request) -> Response:
        left = await answers.drained(_engine_of(request))
        is_drained = left.reason is None
        more = {"requests": left.requests, "handles": left.handles, "reason": left.reason}
        return JSONResponse(
            {"drained": is_drained, **(more if shows_all(request) else {})},
            200 if is_drained else 409,
        )

    async def healthcheck(request: Request) -> Response:
        prefill, decode = answers.engines()
        more = (
            {"prefill_instances": prefill, "decode_instances": decode} if shows_all(request) else {}
        )
        return JSONResponse({"status": "ok", **more})

    async def load() -> Response:
        return JSONResponse({"server_load": await answers.load()})

    async def version() -> Response:
        return JSONResponse({"version": __version__})

    async def metrics() -> Response:
        return Response(await answers.metrics(), headers={"content-type": PROMETHEUS})

    def add(
        path: str,
        endpoint: Callable[..., Awaitable[Response]],
        schema: openapi.Schema | None,
        *others: int,
        media: str = openapi.JSON,
        parameters: Sequence[openapi.Schema] = (),
    ) -> None:
        entry = ENTRIES[path]
        closed = (401, 403) if entry.audience is Audience.OPERATORS else ()
        for method in reversed(entry.methods):
            app.add_api_route(
                path,
                endpoint,
                methods=[method],
                summary=entry.why[0].upper() + entry.why[1:],
                tags=["operation"],
                response_class=Response,
                responses=openapi.own_answers(schema, *others, closed=closed, media=media),
                openapi_extra={"parameters": [*parameters]} if parameters else None,
                include_in_schema=documented,
            )

    add("/ping", health, None)
    add("/health", health, None)
    add("/ready", ready, openapi.READY, 503)
    add("/ready/proxy", ready_proxy, openapi.READY_PROXY, 503)
    add("/drained", drained, openapi.DRAINED, 409, parameters=[openapi.ENGINE])
    add("/healthcheck", healthcheck, openapi.HEALTHCHECK)
    add("/load", load, openapi.object_of(server_load=openapi.COUNT))
    add("/version", version, openapi.object_of(version=openapi.TEXT))
    add("/metrics", metrics, openapi.TEXT, media=openapi.PROMETHEUS)


def _engine_of(request: Request) -> str:
    """Return the `host:port` that a request names, in its normal spelling. Raises BadRequestError
    if the request does not name one.
    """
    given = request.query_params.getlist("engine")
    if len(given) != 1:
        how = "is given twice" if given else "is missing"
        raise BadRequestError(f"engine {how}: expected ?engine=HOST:PORT", param="engine")
    try:
        url = engine_url(f"http://{given[0][:MAX_PLACE]}", ("engine",))
    except SettingsError:
        url = ""
    if not url or not given[0][:MAX_PLACE].rpartition(":")[2].isdigit():
        raise BadRequestError("engine: expected HOST:PORT, as in 10.0.0.1:8000", param="engine")
    return url.removeprefix("http://")
