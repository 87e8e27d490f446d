"""The JSON of vLLM's errors: a body, and an event of a stream. Pure."""

from __future__ import annotations

import json


def error_body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, object]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_event(
    message: str,
    kind: str = "InternalServerError",
    status: int = 500,
    param: str | None = None,
    *,
    compact: bool = False,
) -> bytes:
    """Return the event that reports a stream's failure, with spaces in its JSON, as vLLM writes it.
    `compact`: without spaces.
    """
    separators = (",", ":") if compact else None
    body = error_body(message, kind, status, param)
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=separators).encode() + b"\n\n"
    )
