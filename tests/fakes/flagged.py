"""Requests of the routes that engines have only where they are told to, and the facts of engines
that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.fakes.world import PROMPT

GENERATE = "/inference/v1/generate"
COHERE = "/cohere/v2/chat"
FLAGGED = (GENERATE, COHERE)
FLAGS: dict[str, Any] = {"enable_scale_out": True, "enable_cohere_api": True}
IDS = list(range(300, 350))


def generate(*, params: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A body of `/inference/v1/generate`; `params`: more of `sampling_params`."""
    asked = {"temperature": 0, "max_tokens": 4, **(params or {})}
    return {"model": "tiny", "token_ids": IDS, "sampling_params": asked, **fields}


def cohere(**fields: Any) -> dict[str, Any]:
    """A body of `/cohere/v2/chat`."""
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


MAKE: dict[str, Callable[..., dict[str, Any]]] = {GENERATE: generate, COHERE: cohere}
_WORD = (
    b'data: {"request_id":"generate-tokens-a","usage":null,"output_mode":"tokens","choices":'
    b'[{"index":0,"finish_reason":null,"stop_reason":null,"token_ids":[5],"logprobs":null}]}\n\n'
)
WORDS = {
    GENERATE: _WORD,
    COHERE: b'data: {"index":0,"delta":{"message":{"content":{"text":"a"}}},'
    b'"type":"content-delta"}\n\n',
}
"""An event with a token."""
_START = (
    b'data: {"id":"chatcmpl-a","delta":{"message":{"role":"assistant"}},"type":"message-start"}\n\n'
)
OPENING: dict[str, list[bytes]] = {
    GENERATE: [],
    COHERE: [_START, b'data: {"index":0,"type":"content-start"}\n\n'],
}
"""The events before the first token."""
