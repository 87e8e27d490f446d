"""Makes the `kv_transfer_params` of both legs for connectors that name a transfer (Mooncake; the forms of MoRIIO are its own).

Source: vllm-omni's `pd_utils` (its PR 1303), whose rules decide what wins: what the prefill engine answered over what was known
before, and the flags that state who prefills over both. What a client sent is never part of it. Pure; arguments are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdproxy.transfer.contract import raw
from pdproxy.wire.fields import Fields

Params = dict[str, Any]

_TO_PREFILL: Params = {"do_remote_decode": True, "do_remote_prefill": False}
_TO_DECODE: Params = {"do_remote_decode": False, "do_remote_prefill": True}


def transfer_id(request_id: str) -> str:
    """Return the name by which both engines know one transfer."""
    return f"xfer-{request_id}"


def prefill_params(request_id: str) -> Params:
    """Return the prefill engine's params: the flags and the transfer's name."""
    return {**_TO_PREFILL, "transfer_id": transfer_id(request_id)}


def decode_params(
    request_id: str, engine_id: str, bootstrap: str, answered: Mapping[str, object] | None = None
) -> Params:
    """Return the decode engine's params: the transfer's name and where it is, overridden by what the prefill engine `answered`.

    `engine_id`: of the prefill engine's rank. `bootstrap`: the address of its bootstrap server. A value that the answer leaves
    empty overrides nothing.
    """
    known = {
        "transfer_id": transfer_id(request_id),
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap,
    }
    newer = {name: value for name, value in (answered or {}).items() if value or name not in known}
    return {**known, **newer, **_TO_DECODE}


def until_length(fields: Fields) -> Fields:
    """Return a prefill leg's fields so that its one token ends it by length, whatever token it is.

    Mooncake and MoRIIO keep the blocks of a request that ended by length alone. `min_tokens` 1 masks EOS and the model's own
    stop ids.
    """
    return {
        **fields,
        "stop": raw(b"[]"),
        "stop_token_ids": raw(b"[]"),
        "include_stop_str_in_output": raw(b"false"),
        "min_tokens": raw(b"1"),
    }
