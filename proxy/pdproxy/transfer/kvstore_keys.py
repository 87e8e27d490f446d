"""A KV store between the engines, under keys that the proxy makes: P stores a prompt's KV, D loads it.

Source: vLLM PR 12957, its `KVStoreConnector` and its proxy. Both legs carry the prompt's ids and its key: P to store under it,
D to load by it. P's answer hands over nothing, so nothing has to be given back; what the store keeps, and how long, is its own
affair. D computes the prompt itself where the store has nothing under the key, or something shorter than the prompt.

The ids must be those that the engines see, special tokens included: they are asked for before P is. The key is made from them
and from the model's name, since one store may serve several models.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdproxy.transfer.bodies import alone_body, decode_fields, prefill_fields
from pdproxy.transfer.contract import encode, raw
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.kvparams import KVTransferParams, store_keys
from pdproxy.wire.request import Parsed, Prompt

_ids_decoder = msgspec.json.Decoder(list[int])


def prefill_body(parsed: Parsed, prompt: Prompt, ids: Sequence[int]) -> bytes:
    """Return the prefill leg's body: the prompt's KV is to be stored under its key, and none to be loaded."""
    fields = prefill_fields(parsed, prompt)
    keys = store_keys(ids, parsed.model or "")
    params = KVTransferParams(prefix_prompt_ids=list(ids), kvcache_store_keys=keys)
    fields["kv_transfer_params"] = raw(params.as_json())
    return encode(fields)


def decode_body(parsed: Parsed, prompt: Prompt, ids: Sequence[int] | None) -> bytes:
    """Return the decode leg's body: the client's request, and the key to load by. `ids` None: nothing was stored."""
    if ids is None:
        return alone_body(parsed, prompt)
    fields = decode_fields(parsed, prompt)
    keys = store_keys(ids, parsed.model or "")
    params = KVTransferParams(prefix_prompt_ids=list(ids), kvcache_load_keys=keys)
    fields["kv_transfer_params"] = raw(params.as_json())
    return encode(fields)


def why_not_stored(answer: PrefillAnswer, ids: Sequence[int]) -> str | None:
    """Return why D should not be sent the key although P answered, None if it should.

    An engine that says the prompt's ids, or their number, and says other ones, has stored something that is no prefix of
    what D will see. Engines of the pull request's time say the number alone.
    """
    said = answer.token_ids()
    if said is not None:
        try:
            same = _ids_decoder.decode(said) == list(ids)
        except msgspec.MsgspecError:
            same = False
        return None if same else "P saw other token ids than those that the key was made from"
    counted = answer.usage.prompt_tokens
    if counted not in (0, len(ids)):
        return f"P counted {counted} prompt tokens, the key was made from {len(ids)}"
    return None


def release_body(model: str | None) -> None:
    """Return the body that gives KV back: there is none, P holds nothing for anyone."""


def refusal_released(error_type: str, param: str | None) -> bool:
    """Tell whether a refusal by D has ended P's claim: there was none."""
    return True
