"""What a KV transfer contract declares, so that one exchange can run all of them.

Owns the vocabulary between `serving` and the contracts: the order of the legs, the body of each leg, what a prefill
answer hands over, and who has released what after a refusal. Another contract is another module with one `Contract`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

from pdproxy.tokens.ids import TokenIds
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.request import Fields, Parsed, Prompt


class Order(Enum):
    """When the decode leg starts."""

    PREFILL_THEN_DECODE = "prefill_then_decode"


class Handle(msgspec.Struct, frozen=True):
    """A claim on KV that a prefill engine holds for us. Exactly one party may end it.

    `params` is the engine's `kv_transfer_params` verbatim, `token_ids` the prompt's ids as a JSON array (None if the
    engine did not say them), `prompt_tokens` the prompt's length, `created_cache_tokens` how many of them were new to the
    prefill engine's prefix cache, if it tells.
    """

    params: bytes
    token_ids: bytes | None
    prompt_tokens: int
    remote_request_id: str
    created_cache_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Contract:
    """The wire shape of one KV transfer contract. All functions are pure.

        - `prefill_body(parsed, prompt, ids)`: the body of the prefill leg; `ids` are the prompt's, None if they are not known.
        - `handle(answer)`: what the prefill answer hands over; a str says why it hands over nothing usable.
        - `decode_body(parsed, prompt, handle, ids)`: the body of the decode leg; handle None: no KV, the engine computes alone.
        - `release_body(model, handle)`: the body that makes a decode engine give the handle back, None if there is none.
    - `refusal_released(error_type, param)`: whether a decode engine that refused a request with a 4xx has given
          its handle back by itself.
        - `needs_tokens`: a prompt without ids can't be split.
    """

    name: str
    order: Order
    prefill_body: Callable[[Parsed, Prompt, TokenIds | None], bytes]
    handle: Callable[[PrefillAnswer], Handle | str]
    decode_body: Callable[[Parsed, Prompt, Handle | None, TokenIds | None], bytes]
    release_body: Callable[[str | None, Handle], bytes | None]
    refusal_released: Callable[[str, str | None], bool]
    needs_tokens: bool = False


def raw(value: bytes) -> msgspec.Raw:
    """Wrap JSON that is already encoded."""
    return msgspec.Raw(value)


def encode(fields: Fields) -> bytes:
    """Put a body together again: a copy of each field's bytes, nothing is parsed."""
    return msgspec.json.encode(fields)
