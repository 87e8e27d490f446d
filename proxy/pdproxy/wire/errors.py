"""OpenAI-shaped error bodies: for each fault, what a client may read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import assert_never

import msgspec

from pdproxy.kit.errors import (
    EngineRefusedError,
    Fault,
    PdproxyError,
    UnparsableError,
    UnreadableError,
)
from pdproxy.wire.engine import error_of
from pdproxy.wire.inside import error_without_inside

MAX_RETRY_AFTER = 60.0
"""Seconds."""
_ENGINE_URL = re.compile(r"https?://[^\s,;]+")


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int | str | None
    reason: str | msgspec.UnsetType = msgspec.UNSET


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


class _Detail(msgspec.Struct, frozen=True):
    detail: str


def error_body(error: PdproxyError, engines: Sequence[str] = ()) -> bytes:
    """Return the JSON body for an error, in the shape that vLLM and OpenAI use. `engines`: URLs
    that no client may see.
    """
    if isinstance(error, EngineRefusedError) and error_of(error.body) is not None:
        body = error_without_inside(error.body, error.status, engines)
        # On one line, since it may become an event of a stream.
        return msgspec.json.format(body, indent=-1) if b"\n" in body else body
    if isinstance(error, UnparsableError):
        return msgspec.json.encode(_Detail(error.message))
    if isinstance(
        error, UnreadableError
    ):  # an engine's own text about the client's body: it holds nothing that has to be hidden
        return msgspec.json.encode(
            _ErrorBody(_Error(error.message, error.type, error.param, error.status))
        )
    match error.fault:
        case Fault.CLIENT | Fault.CAPACITY | Fault.ENGINE | Fault.CLIENT_LEFT:
            # Clients don't need the engines' addresses: the log has them.
            message = error.public or _ENGINE_URL.sub("an engine", error.message)
        case Fault.OURS:
            message = "Internal error in pdproxy"  # the log has the rest
        case _:
            assert_never(error.fault)
    reason = msgspec.UNSET if error.reason is None else error.reason.value
    return msgspec.json.encode(
        _ErrorBody(_Error(message, error.type, error.param, error.code, reason))
    )


def retry_headers(error: PdproxyError) -> list[tuple[bytes, bytes]]:
    """Return the header `Retry-After` of an error for want of capacity, in whole seconds from 1 to
    60; no header for others.

    Clients wait no longer than a minute: their libraries ignore longer times, and the load will
    have changed by then.
    """
    if error.fault is not Fault.CAPACITY:
        return []
    seconds = min(max(error.retry_after or 0.0, 1.0), MAX_RETRY_AFTER)
    return [(b"retry-after", b"%d" % math.ceil(seconds))]
