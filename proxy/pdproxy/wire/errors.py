"""OpenAI-shaped error bodies: one exhaustive match from a fault to what a client may read."""

from __future__ import annotations

from typing import assert_never

import msgspec

from pdproxy.kit.errors import EngineRefusedError, Fault, PdproxyError


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


def error_body(error: PdproxyError) -> bytes:
    """Return the JSON body for an error, in the shape that vLLM and OpenAI use."""
    if isinstance(error, EngineRefusedError) and error.body:
        return error.body
    match error.fault:
        case Fault.CLIENT | Fault.CAPACITY | Fault.ENGINE | Fault.CLIENT_LEFT:
            message = error.message
        case Fault.OURS:
            message = "Internal error in pdproxy"  # the log has the rest
        case _:
            assert_never(error.fault)
    return msgspec.json.encode(_ErrorBody(_Error(message, error.type, error.param, error.status)))
