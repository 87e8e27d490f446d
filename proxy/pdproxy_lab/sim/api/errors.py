"""Errors with vLLM's texts and shapes: those of a handler, of a schema, and at the end of a stream.

Owns the answers with errors. A handler raises `RefusedRequest`; the schema's errors are pydantic's
own, formatted as vLLM formats them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi.responses import Response

from pdproxy_lab.sim.error_body import error_body

_MAX_ERRORS = 10
_MAX_INPUT = 200
_MAX_ERROR = 1000
_INTERNAL = frozenset(
    (
        *(
            "function-wrap",
            "function-after",
            "function-before",
            "function-plain",
            "json-or-python",
            "lax-or-strict",
        ),
        *(
            "chain",
            "default",
            "nullable",
            "tagged-union",
            "union",
            "call",
            "arguments",
            "is-instance",
            "is-subclass",
        ),
        *(
            "callable",
            "str",
            "int",
            "float",
            "bool",
            "bytes",
            "bytearray",
            "list",
            "tuple",
            "dict",
            "set",
            "frozenset",
        ),
        *("complex", "none", "nonetype"),
    )
)


class RefusedRequest(Exception):  # noqa: N818 - vLLM's refusal, not our error
    """A request that vLLM's handler or validators refuse. `str()` is the message a client sees.

    It is not a ValueError, as in vLLM: pydantic lets it pass, and the answer has the handler's
    shape.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        kind: str = "BadRequestError",
        status: int = 400,
        **value: object,
    ) -> None:
        """Make one; `value=` is printed after the message, as in vLLM's validation errors."""
        self.plain = message
        self.param, self.kind, self.status = param, kind, status
        shown = [f"parameter={param}"] if param is not None else []
        shown += [f"value={value['value']}"] if "value" in value else []
        validated = status == 400 and kind == "BadRequestError"
        super().__init__(f"{message} ({', '.join(shown)})" if shown and validated else message)


class EngineRefused(RefusedRequest):
    """Refused by the engine, not by the handler: a stream's status has been sent by then."""


def response(body: object, status: int = 200) -> Response:
    """Return a JSON response as vLLM's server writes it."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def refusal(error: RefusedRequest) -> Response:
    """Return the answer to a refused request."""
    return response(error_body(str(error), error.kind, error.status, error.param), error.status)


def failure(message: str) -> Response:
    """Return the answer of an engine that failed."""
    return response(error_body(message, "InternalServerError", 500), 500)


def schema_message(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return the message and the `param` for pydantic's errors."""
    param = _clean(errors[0]["loc"]) if errors and errors[0].get("loc") else None
    label = "error" if len(errors) == 1 else "errors"
    lines = [f"  {_formatted(error)}" for error in errors[:_MAX_ERRORS]]
    if len(errors) > _MAX_ERRORS:
        lines.append(f"  ...and {len(errors) - _MAX_ERRORS} more {label}")
    return "\n".join([f"{len(errors)} validation {label}:", *lines]), param


def _clean(loc: Sequence[object]) -> str:
    parts = [str(part) for part in loc]
    kept = [
        part for part in parts if part.lower() not in _INTERNAL and not set(part) & set("[]{}()")
    ]
    return ".".join(kept or parts)


def _formatted(error: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in error.items() if key != "url"}
    if "input" in shown:
        shown["input"] = _summary(shown["input"])
    if "loc" in shown:
        shown["loc"] = _clean(shown["loc"])
    text = str(shown)
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + "...[truncated]"


def _summary(value: object) -> object:
    if isinstance(value, list | tuple | set | frozenset | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, bytes | bytearray):
        return f"<{type(value).__name__} of {len(value)} bytes>"
    text = str(value)
    return text if len(text) <= _MAX_INPUT else text[:_MAX_INPUT] + "...[truncated]"
