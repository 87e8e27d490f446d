"""The OpenAPI document of the admin API. The schemas are those of the structs that are read and
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI

from pdproxy.fleet.entries import EngineEntry
from pdproxy.web.admin.decided import DecisionList
from pdproxy.web.admin.shapes import (
    DrainOrder,
    EngineChanged,
    EngineList,
    EngineOrder,
    LevelShown,
    LogLevelOrder,
    RequestList,
)

_TEMPLATE = "#/components/schemas/{name}"
_STRUCTS = (
    EngineOrder,
    DrainOrder,
    LogLevelOrder,
    EngineEntry,
    EngineList,
    EngineChanged,
    LevelShown,
    RequestList,
    DecisionList,
)
_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "description": "OpenAI's shape of an error.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string", "null"]},
                "owner": {
                    **_TEXT,
                    "description": "the source that has added the engine, if that is why",
                },
            },
        }
    },
}


def parameter(name: str, words: str, where: str, kind: str = "string") -> dict[str, Any]:
    """Return a parameter of a route."""
    return {
        "name": name,
        "in": where,
        "required": where == "path",
        "description": words,
        "schema": {"type": kind},
    }


def operation(
    answers: dict[int, type | None],
    errors: Sequence[int],
    parameters: Sequence[dict[str, Any]],
    body: type | None,
) -> tuple[dict[int | str, dict[str, Any]], dict[str, Any]]:
    """Return a route's responses and the rest of its description. Structs are named by their
    schemas.
    """
    found: dict[int | str, dict[str, Any]] = {}
    for status, struct in answers.items():
        found[status] = {"description": HTTPStatus(status).phrase}
        if struct is not None:
            found[status]["content"] = _content(struct.__name__)
    for status in sorted(errors):
        found[status] = {"description": HTTPStatus(status).phrase, "content": _content("Error")}
    extra: dict[str, Any] = {}
    if parameters:
        extra["parameters"] = list(parameters)
    if body is not None:
        name = body.__name__
        extra["requestBody"] = {"required": name != "DrainOrder", "content": _content(name)}
    return found, extra


def _content(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _TEMPLATE.format(name=name)}}}


def describe(app: FastAPI) -> None:
    """Have the application's document hold the schemas."""
    make = app.openapi

    def document() -> dict[str, Any]:
        made = make()
        if "EngineEntry" not in made.setdefault("components", {}).setdefault("schemas", {}):
            _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_TEMPLATE)
            for schema in schemas.values():
                if "description" in schema:  # a docstring, with its lines and their indent
                    schema["description"] = " ".join(schema["description"].split())
            made["components"]["schemas"] = {**schemas, "Error": _ERROR}
            made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{"key": []}, {}]
        return made

    app.openapi = document  # type: ignore[method-assign]
