"""Requests of the routes that engines have only where they are told to, and the facts of engines
that have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GENERATE = "/inference/v1/generate"
FLAGGED = (GENERATE,)
FLAGS: dict[str, Any] = {"enable_scale_out": True}
IDS = list(range(300, 350))


def generate(*, params: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A body of `/inference/v1/generate`; `params`: more of `sampling_params`."""
    asked = {"temperature": 0, "max_tokens": 4, **(params or {})}
    return {"model": "tiny", "token_ids": IDS, "sampling_params": asked, **fields}


MAKE = {GENERATE: generate}
_WORD = (
    b'data: {"request_id":"generate-tokens-a","usage":null,"output_mode":"tokens","choices":'
    b'[{"index":0,"finish_reason":null,"stop_reason":null,"token_ids":[5],"logprobs":null}]}\n\n'
)
WORDS = {GENERATE: _WORD}
"""An event with a token."""
