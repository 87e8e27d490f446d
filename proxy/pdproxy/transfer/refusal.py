"""Releasing KV that a prefill engine holds, by a request that a decode engine refuses.

Source: vLLM 0.32.0 `entrypoints/generate/base/serving.py`: for a refused request with
`do_remote_prefill` its connector is called as at an aborted one, and reports to the prefill engine
that the KV is not needed.
"""

from __future__ import annotations

import msgspec

from pdproxy.transfer.contract import Handle, encode, raw
from pdproxy.wire.routes.openai import DROPPED_ON_PREFILL


def release_body(model: str | None, given: Handle) -> bytes:
    """Return a completion that the decode engine's handler refuses (`max_tokens` 0), which frees
    the prefill engine's blocks.

    It must pass the schema and fail in the handler: only from there does vLLM release a refused
    request's KV.
    """
    fields = {"prompt": raw(b'"x"'), "max_tokens": raw(b"0"), "stream": raw(b"false")}
    if model is not None:
        fields["model"] = raw(msgspec.json.encode(model))
    fields["kv_transfer_params"] = raw(given.params)
    return encode(fields)


def refusal_released(error_type: str, param: str | None) -> bool:
    """Return whether a 400 of the decode engine has already released the handle.

    A refusal by the handler has; one by the schema has not. The schema's own errors have the type
    "Bad Request". Its validators use "BadRequestError" like the handler, but can only name fields
    that the prefill leg did not carry. In doubt the answer is no: a second release is a log line on
    the prefill engine, a missing one holds blocks for a lease.
    """
    if error_type == "Bad Request":
        return False
    field = (param or "").split(".")[0]
    return field not in (*DROPPED_ON_PREFILL, "response_format", "")
