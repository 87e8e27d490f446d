"""The FastAPI application: the routes of vLLM's server and its middleware.

Owns no state but the count of requests in flight. Bodies are pydantic models, so that FastAPI's own
errors have the same texts as vLLM's.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cache
from secrets import token_hex
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Form, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from pdproxy_lab.sim import since
from pdproxy_lab.sim.api import adapters, metrics
from pdproxy_lab.sim.api.answer import answered, check_model
from pdproxy_lab.sim.api.batch import BatchBody, chat_batch
from pdproxy_lab.sim.api.chat import chat, chat_prompt
from pdproxy_lab.sim.api.cohere import CohereBody, cohere_chat, request_id
from pdproxy_lab.sim.api.completions import complete
from pdproxy_lab.sim.api.errors import RefusedRequest, failure, refusal, response, schema_message
from pdproxy_lab.sim.api.invocations import invoke
from pdproxy_lab.sim.api.messages import CountBody, MessagesBody, count, message
from pdproxy_lab.sim.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pdproxy_lab.sim.api.realtime import Realtime
from pdproxy_lab.sim.api.responses import ResponsesBody, respond
from pdproxy_lab.sim.api.scale_out import DerenderBody, derendered, rendered
from pdproxy_lab.sim.api.scoring import ScoringBody, score
from pdproxy_lab.sim.api.speech import TranscriptionBody, TranslationBody, speak
from pdproxy_lab.sim.api.token_ids import GenerateBody, generate
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.error_body import error_body
from pdproxy_lab.sim.failed import COHERE, of_cohere
from pdproxy_lab.sim.request import EngineDeadError

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_COUNTED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/generative_scoring",
    "/invocations",
    "/cohere/v2/chat",
    "/inference/v1/generate",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""The routes whose requests `/load` counts."""
_SCALE_OUT = (
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
)


def _today() -> str:
    return datetime.now(UTC).strftime("%d %B %Y")


async def _json_only(request: Request) -> None:
    if request.headers.get("content-type", "").lower().partition(";")[0] != "application/json":
        raise RequestValidationError(["Unsupported Media Type: Only 'application/json' is allowed"])


class _Load:
    """Counts the requests in flight, for `/load` of an engine that tracks them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generating = scope["type"] == "http" and scope["path"] in _COUNTED
        self.count += generating
        try:
            if scope["type"] == "http":
                scope["state"] = {**scope.get("state", {}), "load": self}
            await self._app(scope, receive, send)
        finally:
            self.count -= generating


class _Keys:
    """vLLM's `--api-key`: the guarded paths require it, OPTIONS does not."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = (
            scope["type"] in ("http", "websocket")
            and scope.get("method") != "OPTIONS"
            and scope["path"].startswith(_GUARDED)
        )
        if guarded and not self._known(dict(scope["headers"]).get(b"authorization", b"")):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _known(self, header: bytes) -> bool:
        scheme, _, given = header.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(
            hashlib.sha256(given).digest(), self._key
        )


def create_app(engine: SimEngine, date: Callable[[], str] = _today) -> FastAPI:
    """Return the application of one engine; `date` is what the `dated` template prints."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.engine, app.state.date = engine, date
    app.add_exception_handler(RequestValidationError, _schema)
    app.add_exception_handler(RefusedRequest, _refused)
    app.add_exception_handler(EngineDeadError, _dead)
    app.router.routes.extend(_generating())
    if engine.facts.enable_cohere_api:
        app.router.routes.extend(_of_cohere())
    if engine.facts.enable_scale_out:
        app.router.routes.extend(_scaling_out())
    if engine.facts.speech:
        app.router.routes.extend(_speaking())
    if engine.facts.realtime:
        app.router.routes.append(WebSocketRoute("/v1/realtime", _realtime))
    for path in _SCALE_OUT:
        _add(app, path, _disabled, ["POST"])  # behind the routes that are there
    _about(app, engine)
    if engine.facts.api_key is not None:
        app.add_middleware(_Keys, key=engine.facts.api_key)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_credentials=True,
        allow_methods=["*"],
        allow_headers=["*"],
    )
    app.add_middleware(_Vary)
    app.add_middleware(_Load)
    return app


async def _schema(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if errors and isinstance(errors[0], str):
        message, param = f"1 validation error:\n  {errors[0]}", None
    else:
        message, param = schema_message(errors)
    return _worded(request, response(error_body(message, "Bad Request", 400, param), 400))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedRequest)
    return _worded(request, refusal(error))


def _worded(request: Request, found: Response) -> Response:
    """Return an error in Cohere's words below its path, where vLLM's middleware has them."""
    if request.url.path != COHERE:
        return found
    said = msgspec.json.decode(found.body)["error"]["message"]
    return response(of_cohere(said, request_id(request)), found.status_code)


async def _dead(request: Request, _: Exception) -> Response:
    return failure(since.dead_message(_engine(request).facts.version))


@cache
def _generating() -> tuple[BaseRoute, ...]:
    """Return the routes with bodies, the same for all engines of this process: FastAPI takes 20 ms
    to make them.
    """
    router = APIRouter()
    json_only = [Depends(_json_only)]

    @router.post("/v1/completions", dependencies=json_only, response_model=None)
    async def _completions(body: CompletionBody, request: Request) -> Response:
        engine = _engine(request)
        return _with_load(
            engine, request, await answered(engine, body, request, complete(engine, body, request))
        )

    @router.post("/v1/chat/completions", dependencies=json_only, response_model=None)
    async def _chat(body: ChatBody, request: Request) -> Response:
        engine, date = _engine(request), _date(request)
        return _with_load(
            engine,
            request,
            await answered(engine, body, request, chat(engine, body, request, date)),
        )

    @router.post("/v1/chat/completions/batch", dependencies=json_only, response_model=None)
    async def _batch(body: BatchBody, request: Request) -> Response:
        engine = _engine(request)
        return await answered(
            engine, body, request, chat_batch(engine, body, request, _date(request))
        )

    @router.post("/invocations", dependencies=json_only, response_model=None)
    async def _invoked(request: Request) -> Response:
        return await invoke(
            request, lambda body: _chat(body, request), lambda body: _completions(body, request)
        )

    @router.post("/generative_scoring", dependencies=json_only, response_model=None)
    async def _scored(body: ScoringBody, request: Request) -> Response:
        engine = _engine(request)
        return await answered(engine, body, request, score(engine, body, request))

    @router.post("/tokenize", dependencies=json_only, response_model=None)
    async def _tokenize(body: TokenizeBody, request: Request) -> Response:
        return _tokenized(_engine(request), body, _date(request))

    @router.post("/detokenize", dependencies=json_only, response_model=None)
    async def _detokenize(body: DetokenizeBody, request: Request) -> Response:
        engine = _engine(request)
        check_model(body.model, engine)
        if any(token >= engine.tokenizer.vocab_size for token in body.tokens):
            raise RefusedRequest(f"Token id {max(body.tokens)} is out of vocabulary")
        return response({"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    @router.post("/v1/responses", dependencies=json_only, response_model=None)
    async def _responses(body: ResponsesBody, request: Request) -> Response:
        engine = _engine(request)
        return await answered(engine, body, request, respond(engine, body, request, _date(request)))

    @router.get("/v1/responses/{name}", response_model=None)
    @router.post("/v1/responses/{name}/cancel", response_model=None)
    async def _stored(name: str) -> Response:
        message = f"Response with id '{name}' not found."
        return response(error_body(message, "invalid_request_error", 404, "response_id"), 404)

    @router.post("/v1/messages", dependencies=json_only, response_model=None)
    async def _messages(body: MessagesBody, request: Request) -> Response:
        return await message(_engine(request), body, request, _date(request))

    @router.post("/v1/messages/count_tokens", dependencies=json_only, response_model=None)
    async def _counted(body: CountBody, request: Request) -> Response:
        return await count(_engine(request), body, _date(request))

    return tuple(router.routes)


@cache
def _of_cohere() -> tuple[BaseRoute, ...]:
    """Return the route of VLLM_ENABLE_COHERE_API=1, as `_generating`."""
    router = APIRouter()

    @router.post(COHERE, dependencies=[Depends(_json_only)], response_model=None)
    async def _cohere(body: CohereBody, request: Request) -> Response:
        return await cohere_chat(_engine(request), body, request, _date(request))

    return tuple(router.routes)


@cache
def _scaling_out() -> tuple[BaseRoute, ...]:
    """Return the routes of `--enable-scale-out`, as `_generating`."""
    router = APIRouter()
    json_only = [Depends(_json_only)]

    @router.post("/v1/chat/completions/render", dependencies=json_only, response_model=None)
    async def _rendered(body: ChatBody, request: Request) -> Response:
        return rendered(_engine(request), body, request, _date(request))

    @router.post("/v1/chat/completions/derender", dependencies=json_only, response_model=None)
    async def _derendered(body: DerenderBody, request: Request) -> Response:
        return derendered(_engine(request), body)

    @router.post("/inference/v1/generate", dependencies=json_only, response_model=None)
    async def _generated(body: GenerateBody, request: Request) -> Response:
        engine = _engine(request)
        return await answered(engine, None, request, generate(engine, body, request))

    return tuple(router.routes)


@cache
def _speaking() -> tuple[BaseRoute, ...]:
    """Return the routes of a speech model, as `_generating`."""
    router = APIRouter()

    @router.post("/v1/audio/transcriptions", response_model=None)
    async def _transcribed(
        request: Request, body: Annotated[TranscriptionBody, Form()]
    ) -> Response:
        engine = _engine(request)
        return await answered(engine, body, request, speak(engine, body, request))

    @router.post("/v1/audio/translations", response_model=None)
    async def _translated(request: Request, body: Annotated[TranslationBody, Form()]) -> Response:
        engine = _engine(request)
        return await answered(engine, body, request, speak(engine, body, request))

    return tuple(router.routes)


async def _realtime(websocket: WebSocket) -> None:
    await Realtime(websocket.app.state.engine, websocket).serve()


def _engine(request: Request) -> SimEngine:
    engine: SimEngine = request.app.state.engine
    return engine


def _date(request: Request) -> Callable[[], str]:
    date: Callable[[], str] = request.app.state.date
    return date


def _with_load(engine: SimEngine, request: Request, found: Response) -> Response:
    """Add the engine's load to a whole answer, if the client asks for it."""
    if found.status_code == 200 and found.headers["content-type"] == "application/json":
        found.headers.update(
            metrics.load_headers(engine, request.headers.get("endpoint-load-metrics-format", ""))
        )
    return found


class _Vary:
    """Adds `vary: Origin` to every answer, as vLLM does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = [name for name, _ in message["headers"]]
                if b"vary" not in names:
                    message["headers"] = [*message["headers"], (b"vary", b"Origin")]
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)


async def _disabled(_: Request) -> Response:
    message = (
        "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable "
        "them."
    )
    return response(error_body(message, "PermissionDeniedError", 403), 403)


def _add(
    app: FastAPI, path: str, endpoint: Callable[[Request], Awaitable[Response]], methods: list[str]
) -> None:
    """Add a route without parameters: Starlette's own, which is made ten times faster than
    FastAPI's.
    """
    route = Route(path, endpoint, methods=methods)
    # Starlette would answer HEAD, too; FastAPI's routes, and so vLLM's, don't
    route.methods = set(methods)
    app.router.routes.append(route)


def _tokenized(engine: SimEngine, body: TokenizeBody, date: Callable[[], str]) -> Response:
    check_model(body.model, engine)
    if body.messages is not None:
        own = set(TokenizeBody.model_fields)  # it takes what else is there, and reads none of it
        given = body.model_dump(exclude_unset=True, by_alias=True, include=own)
        ids = chat_prompt(
            engine, ChatBody.model_validate({**given, "messages": body.messages}), date
        ).ids
    elif body.prompt is None:
        missing = {
            "type": "missing",
            "msg": "Field required",
            "input": body.model_dump(exclude_unset=True),
        }
        fields = ("TokenizeCompletionRequest", "prompt"), ("TokenizeChatRequest", "messages")
        raise RequestValidationError([{**missing, "loc": ("body", *field)} for field in fields])
    else:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = engine.tokenizer.encode(body.prompt, add_special_tokens=special)
    strings = None
    if body.return_token_strs:
        strings = [engine.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    longest = engine.facts.max_model_len
    return response(
        {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings}
    )


def _about(app: FastAPI, engine: SimEngine) -> None:
    """The routes with facts about the engine."""

    async def health(_: Request) -> Response:
        return Response(status_code=503 if engine.dead else 200)

    async def models(_: Request) -> Response:
        created = int(time.time())
        permission = {
            "id": f"modelperm-{token_hex(8)}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {"id": engine.facts.model, "object": "model", "created": created, "owned_by": "vllm"}
        card |= {
            "root": "./model",
            "parent": None,
            "max_model_len": engine.facts.max_model_len,
            "permission": [permission],
        }
        loaded = [
            {**card, "id": name, "root": path, "parent": engine.facts.model, "max_model_len": None}
            for name, path in engine.adapters.items()
        ]
        return response({"object": "list", "data": [card, *loaded]})

    async def version(_: Request) -> Response:
        return response({"version": engine.facts.version})

    async def kv_event_sources(_: Request) -> Response:
        return response(msgspec.to_builtins(engine.kv_events.sources, str_keys=True))

    async def load(request: Request) -> Response:
        tracked = engine.facts.enable_server_load_tracking
        return response({"server_load": request.state.load.count if tracked else 0})

    async def tokenizer_info(_: Request) -> Response:
        special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        return response(
            {"tokenizer_class": "Tokenizer", "add_bos_token": engine.tokenizer.add_bos, **special}
        )

    async def page(_: Request) -> Response:
        return Response(metrics.page(engine), media_type=metrics.CONTENT_TYPE)

    routes: tuple[tuple[str, Callable[[Request], Awaitable[Response]], list[str]], ...] = (
        ("/health", health, ["GET"]),
        ("/ping", health, ["GET", "POST"]),
        ("/v1/models", models, ["GET"]),
        ("/version", version, ["GET"]),
        ("/load", load, ["GET"]),
        ("/kv_event_sources", kv_event_sources, ["GET"]),
        ("/metrics", page, ["GET"]),
    )
    for path, endpoint, methods in routes:
        _add(app, path, endpoint, methods)
    if engine.facts.runtime_lora:
        for path, endpoint in adapters.routes(engine):
            _add(app, path, endpoint, ["POST"])
    if engine.facts.enable_tokenizer_info_endpoint:
        _add(app, "/tokenizer_info", tokenizer_info, ["GET"])
