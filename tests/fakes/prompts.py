"""Requests that may be split, and prefill engines' answers to them, as contracts read them."""

from __future__ import annotations

import json
from typing import Any

from pdproxy.wire.engine import PrefillAnswer, prefill_answer
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route


def parsed(route: Route = Route.COMPLETIONS, **fields: Any) -> Parsed:
    """A client's request."""
    text = "p" * 50
    prompt = (
        {"prompt": text}
        if route is Route.COMPLETIONS
        else {"messages": [{"role": "user", "content": text}]}
    )
    return parse(route, json.dumps({"model": "tiny", **prompt, **fields}).encode())


def read(answer: bytes | dict[str, Any]) -> PrefillAnswer:
    """A prefill engine's answer, which it must be."""
    found = prefill_answer(answer if isinstance(answer, bytes) else json.dumps(answer).encode())
    assert found is not None
    return found


def answered(params: Any, ids: list[int] | None = None) -> PrefillAnswer:
    """An answer with these `kv_transfer_params` to a prompt of these ids."""
    ids = [1, 2, 3, 4] if ids is None else ids
    choice = {"index": 0, "text": "x", "finish_reason": "length", "prompt_token_ids": ids}
    usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
    return read({"choices": [choice], "usage": usage, "kv_transfer_params": params})


def nixl_params(**changes: Any) -> dict[str, Any]:
    """The params of a NIXL prefill engine's answer."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "p",
        "remote_request_id": "cmpl-x-0-12345678",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "remote_num_tokens": 4,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "transfer_mode": "pull",
        **changes,
    }


def moriio_params(**changes: Any) -> dict[str, Any]:
    """The params of a MoRIIO prefill engine's answer: `request_finished` of vLLM 0.32.0."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "10.0.0.1:6301",
        "remote_host": "10.0.0.1",
        "remote_handshake_port": "6301",
        "remote_notify_port": 61005,
        "remote_dp_rank": 1,
        "remote_dp_rank_override": True,
        "remote_dp_size": 2,
        "remote_dp_size_local": 2,
        "tp_size": 8,
        "transfer_id": f"tx-{'0123456789abcdef' * 2}",
        **changes,
    }
