"""The JSON of vLLM's errors: a body, and an event of a stream. Pure."""

from __future__ import annotations

import json


def error_body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, object]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_event(message: str, kind: str = "InternalServerError", status: int = 500, param: str | None = None) -> bytes:
    """Return the event that reports a stream's failure, with spaces in its JSON, as vLLM writes it."""
    return b"data: " + json.dumps(error_body(message, kind, status, param), ensure_ascii=False).encode() + b"\n\n"
