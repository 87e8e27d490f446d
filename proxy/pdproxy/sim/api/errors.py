"""Errors in vLLM's words and shapes: what a handler refuses, what a schema refuses, what a stream ends with.

Owns the error bodies. A handler raises `Refused`; the schema's errors are pydantic's own, formatted as vLLM formats them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi.responses import Response

from pdproxy.sim.error_body import error_body

_MOST_ERRORS = 10
_MOST_INPUT = 200
_MOST_ERROR = 1000
_INTERNAL = frozenset(
    (
        *("function-wrap", "function-after", "function-before", "function-plain", "json-or-python", "lax-or-strict"),
        *("chain", "default", "nullable", "tagged-union", "union", "call", "arguments", "is-instance", "is-subclass"),
        *("callable", "str", "int", "float", "bool", "bytes", "bytearray", "list", "tuple", "dict", "set", "frozenset"),
        *("complex", "none", "nonetype"),
    )
)
INTERNAL = "Internal server error"


class Refused(Exception):  # noqa: N818 - not an error of ours
    """A request that vLLM's handler or validators refuse. `str()` is the message a client sees.

    Not a ValueError, as vLLM's own is none: pydantic lets it through, and it is answered in the handler's shape.
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
        """Name what is wrong; `value=` is printed behind it, as vLLM's validation errors do."""
        self.plain = message
        self.param, self.kind, self.status = param, kind, status
        shown = [f"parameter={param}"] if param is not None else []
        shown += [f"value={value['value']}"] if "value" in value else []
        super().__init__(f"{message} ({', '.join(shown)})" if shown and status == 400 else message)


class EngineRefused(Refused):
    """Refused by the engine itself, not by the handler before it: so late that a stream has its status already."""


def response(body: object, status: int = 200) -> Response:
    """Return a JSON response as vLLM's server writes it."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def refusal(error: Refused) -> Response:
    """Return the answer to a refused request."""
    return response(error_body(str(error), error.kind, error.status, error.param), error.status)


def failure(message: str) -> Response:
    """Return the answer of an engine that failed."""
    return response(error_body(message, "InternalServerError", 500), 500)


def schema_message(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return the message and the `param` for pydantic's errors."""
    param = _clean(errors[0]["loc"]) if errors and errors[0].get("loc") else None
    label = "error" if len(errors) == 1 else "errors"
    lines = [f"  {_formatted(error)}" for error in errors[:_MOST_ERRORS]]
    if len(errors) > _MOST_ERRORS:
        lines.append(f"  ...and {len(errors) - _MOST_ERRORS} more {label}")
    return "\n".join([f"{len(errors)} validation {label}:", *lines]), param


def _clean(loc: Sequence[object]) -> str:
    parts = [str(part) for part in loc]
    kept = [part for part in parts if part.lower() not in _INTERNAL and not set(part) & set("[]{}()")]
    return ".".join(kept or parts)


def _formatted(error: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in error.items() if key != "url"}
    if "input" in shown:
        shown["input"] = _summary(shown["input"])
    if "loc" in shown:
        shown["loc"] = _clean(shown["loc"])
    text = str(shown)
    return text if len(text) <= _MOST_ERROR else text[:_MOST_ERROR] + "...[truncated]"


def _summary(value: object) -> object:
    if isinstance(value, list | tuple | set | frozenset | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, bytes | bytearray):
        return f"<{type(value).__name__} of {len(value)} bytes>"
    text = str(value)
    return text if len(text) <= _MOST_INPUT else text[:_MOST_INPUT] + "...[truncated]"
