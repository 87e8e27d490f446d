"""What `/openapi.json` says of the routes: requests, answers with their media types, and errors.

Requests are described as far as they are the same for all engines: which other fields count, and
which values, each engine decides; engines read values of another type where they can, such as "5"
for 5. Owns the document's schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from pdproxy.kit.errors import RefusalReason
from pdproxy.serving.access.routes import RouteEntry, RouteKind
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.route import Route

Schema = dict[str, Any]
JSON, FORM, EVENTS, BINARY, PROMETHEUS = (
    "application/json",
    "multipart/form-data",
    "text/event-stream",
    "application/octet-stream",
    "text/plain",
)

_ANY: Schema = {"type": "object"}
_TEXT: Schema = {"type": "string"}
_TEXT_OR_NONE: Schema = {"type": ["string", "null"]}
_FIELDS_OF_ERROR: Schema = {
    "message": _TEXT,
    "type": _TEXT,
    "param": {"type": ["string", "null"], "description": "The field that is wrong"},
    "code": {
        "type": ["integer", "string", "null"],
        "description": "The status, or OpenAI's word for the error",
    },
    "reason": {
        "enum": [one.value for one in RefusalReason],
        "description": "Why the request is refused now, if it may be served later",
    },
}
_ERROR: Schema = {
    "type": "object",
    "description": "OpenAI's shape of an error.",
    "required": ["error"],
    "properties": {
        "error": {"type": "object", "required": ["message", "type"], "properties": _FIELDS_OF_ERROR}
    },
}
_MESSAGES_ERROR: Schema = {
    "type": "object",
    "description": "Anthropic's shape of an error.",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": _TEXT, "type": _TEXT},
        },
    },
}
_COHERE_ERROR: Schema = {
    "type": "object",
    "description": "Cohere's shape of an error.",
    "required": ["message"],
    "properties": {"message": _TEXT, "id": _TEXT},
}
_DETAIL: Schema = {
    "type": "object",
    "description": "The server's own error: no such route or method, or a body that is not JSON.",
    "required": ["detail"],
}
_EVENT: Schema = {
    "type": "object",
    "description": "A server-sent event. Comments may come between events.",
    "required": ["data"],
    "properties": {"event": _TEXT, "data": _TEXT},
}
_SCHEMAS = {
    "Error": _ERROR,
    "MessagesError": _MESSAGES_ERROR,
    "CohereError": _COHERE_ERROR,
    "Detail": _DETAIL,
}
_OWN_ERRORS = {Dialect.MESSAGES: ["MessagesError"], Dialect.COHERE: ["CohereError"]}

_OF_CONNECTION = {
    400: "No request of HTTP, or a wrong query",
    408: "The request came too slowly",
    431: "The head is too large",
}
"""Statuses that any route may have: they come before the route is known."""
_OF_ENGINES = {
    400: "The request is wrong",
    401: "No valid API key",
    403: "The engine was started without this route",
    404: "No engine has the model, or the route",
    408: "The request came too slowly",
    413: "The body is too large",
    429: "Over the client's own limit or share",
    431: "The head is too large",
    500: "An engine has failed",
    501: "An engine can not do this",
    502: "All engines that were tried have failed",
    503: "No engine, no place, or shutting down",
    504: "An engine missed a deadline",
}
_MAY_COME_LATER = (429, 503)
_RETRY_AFTER = {"Retry-After": {"description": "Seconds, 1 to 60", "schema": {"type": "integer"}}}


# -- answers


def own_answers(
    schema: Schema | None, *others: int, media: str = JSON, closed: Sequence[int] = ()
) -> dict[int | str, Any]:
    """Return the answers of a route of pdproxy's own: 200 and `others` with that schema (None:
    without a body), and errors.

    `closed`: the statuses with which it refuses those that are no operators.
    """
    content = {} if schema is None else {"content": {media: {"schema": schema}}}
    found: dict[int | str, Any] = {
        status: _answer(_phrase(status), content) for status in (200, *others)
    }
    refused = dict.fromkeys(closed, "For operators alone (listen.operator_routes)")
    return {
        **_errors(Dialect.OPENAI, {**_OF_CONNECTION, **refused, 503: "Too many connections"}),
        **found,
    }


def listing_answers() -> dict[int | str, Any]:
    """Return the answers of `/v1/models`."""
    schema = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"data": {"type": "array", "items": _ANY}},
    }
    statuses = {
        status: text for status, text in _OF_ENGINES.items() if status not in (404, 413, 501)
    }
    return {
        **_errors(Dialect.OPENAI, statuses),
        200: _answer("Models", {"content": {JSON: {"schema": schema}}}),
    }


def answers_of(entry: RouteEntry) -> dict[int | str, Any]:
    """Return the answers of a route that engines serve, or that is refused; of a WebSocket's, those
    to other requests.
    """
    if entry.kind in (RouteKind.REFUSED, RouteKind.WEBSOCKET):
        why = entry.why if entry.kind is RouteKind.REFUSED else "The route is a WebSocket"
        return _errors(
            entry.dialect,
            {**_OF_CONNECTION, 401: _OF_ENGINES[401], 404: why, 503: _OF_ENGINES[503]},
        )
    content = {JSON: {"schema": _WHOLE.get(entry.path, _ANY)}}
    if _streams(entry):
        content[EVENTS] = {"schema": _EVENT}
    if entry.path in _BINARY_TOO:
        content[BINARY] = {"schema": {**_TEXT, "format": "binary"}}
    return {
        **_errors(entry.dialect, _OF_ENGINES),
        200: _answer("The engine's answer", {"content": content}),
    }


def _errors(dialect: Dialect, statuses: dict[int, str]) -> dict[int | str, Any]:
    names = [*_OWN_ERRORS.get(dialect, []), "Error", "Detail"]
    schema = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in names]}
    found: dict[int | str, Any] = {}
    for status, text in sorted(statuses.items()):
        found[status] = _answer(text, {"content": {JSON: {"schema": schema}}})
        if status in _MAY_COME_LATER:
            found[status]["headers"] = _RETRY_AFTER
    return found


def _answer(text: str, more: Schema) -> Schema:
    return {"description": text, **more}


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase


def object_of(**properties: Schema) -> Schema:
    """Return the schema of an object that has all of these."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _with_more(schema: Schema, **properties: Schema) -> Schema:
    """Return the schema of an object that has more properties, for operators alone."""
    return {**schema, "properties": {**schema["properties"], **properties}}


TEXT, COUNT = _TEXT, {"type": "integer", "minimum": 0}
READY = _with_more(
    object_of(ready={"type": "boolean"}),
    state={"enum": ["ok", "degraded", "not_ready"]},
    reason=_TEXT_OR_NONE,
    details={"type": "array", "items": _TEXT},
)
READY_PROXY = _with_more(object_of(ready={"type": "boolean"}), reason=_TEXT_OR_NONE)
DRAINED = _with_more(
    object_of(drained={"type": "boolean"}), requests=COUNT, handles=COUNT, reason=_TEXT_OR_NONE
)
ENGINE: Schema = {
    "name": "engine",
    "in": "query",
    "required": True,
    "description": "HOST:PORT of the engine, as in its URL",
    "schema": _TEXT,
}
HEALTHCHECK = _with_more(object_of(status=_TEXT), prefill_instances=COUNT, decode_instances=COUNT)


# -- requests

_MESSAGES: Schema = {"type": "array", "minItems": 1, "items": _ANY}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT: Schema = {
    "description": "A text, token ids, or a list of either",
    "type": ["string", "array"],
}
_MODEL: Schema = {"type": ["string", "null"], "description": "Without it, that of the engines"}
_MAX_TOKENS: Schema = {"description": "The most tokens of the answer"}
_FIELDS: dict[str, dict[str, Schema]] = {
    Route.CHAT.path: {"messages": _MESSAGES},
    Route.BATCH.path: {"messages": {"type": "array", "minItems": 1, "items": _MESSAGES}},
    "/v1/responses": {"input": {"anyOf": [_TEXT, {"type": "array"}]}},
    "/v1/messages": {
        "model": {**_TEXT, "minLength": 1},
        "messages": _MESSAGES,
        "max_tokens": _MAX_TOKENS,
    },
    "/v1/messages/count_tokens": {"model": {**_TEXT, "minLength": 1}, "messages": _MESSAGES},
    Route.COHERE.path: {"model": {**_TEXT, "minLength": 1}, "messages": _MESSAGES},
    Route.GENERATE.path: {"token_ids": {**_IDS, "minItems": 1}, "sampling_params": _ANY},
    "/detokenize": {"tokens": {"description": "Token ids", "type": "array"}},
}
"""The fields that a route's requests must have."""
_ONE_OF: dict[str, dict[str, Schema]] = {
    Route.COMPLETIONS.path: {
        "prompt": _PROMPT,
        "prompt_embeds": {"description": "Tensors in base64, or a list of them"},
    },
    "/tokenize": {"prompt": _TEXT_OR_NONE, "messages": {**_MESSAGES, "type": ["array", "null"]}},
}
"""Fields of which a route's requests must have one."""
_STREAM: Schema = {"description": "true: the answer comes as server-sent events", "default": False}
_BINARY_TOO = frozenset({"/v1/embeddings", "/pooling", Route.INVOCATIONS.path})
"""Where `encoding_format` may ask for bytes."""
_CHOICES: Schema = {
    "type": "object",
    "required": ["id", "object", "choices", "usage"],
    "properties": {"choices": {"type": "array"}},
}
_WHOLE: dict[str, Schema] = {
    Route.COMPLETIONS.path: _CHOICES,
    Route.CHAT.path: _CHOICES,
    Route.GENERATE.path: object_of(request_id=_TEXT, choices={"type": "array"}, usage=_ANY),
    "/tokenize": object_of(count={"type": "integer"}, tokens=_IDS),
    "/detokenize": object_of(prompt=_TEXT),
    "/v1/messages/count_tokens": object_of(input_tokens={"type": "integer"}),
}
"""Schemas of answers that are not streamed."""


def _streams(entry: RouteEntry) -> bool:
    return entry.kind is RouteKind.SPLIT or entry.form


def request_of(entry: RouteEntry) -> dict[str, Any]:
    """Return the description of a route's requests: what is in the path, and the body."""
    names = [part[1:-1] for part in entry.path.split("/") if part.startswith("{")]
    found: dict[str, Any] = {}
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]
    if not entry.has_body or entry.kind is RouteKind.REFUSED:
        return found
    required, choice = _FIELDS.get(entry.path, {}), _ONE_OF.get(entry.path, {})
    if entry.form:
        required = {"file": {**_TEXT, "format": "binary", "description": "The audio"}}
    schema: Schema = {
        "type": "object",
        "description": (
            "Every field that vLLM knows is passed on; what it may hold, the engine decides."
        ),
        "properties": {
            "model": _MODEL,
            **required,
            **choice,
            **({"stream": _STREAM} if _streams(entry) else {}),
        },
    }
    if required:
        schema["required"] = list(required)
    if choice:
        schema["anyOf"] = [{"required": [name]} for name in choice]
    media = FORM if entry.form else JSON
    found["requestBody"] = {"required": True, "content": {media: {"schema": schema}}}
    return found


def describe(app: FastAPI) -> None:
    """Have the application's document hold the schemas that routes refer to."""
    make = app.openapi

    def document() -> dict[str, Any]:
        made = make()
        made.setdefault("components", {})["schemas"] = _SCHEMAS
        return made

    app.openapi = document  # type: ignore[method-assign]
