"""A KV store between the engines, under keys that the proxy makes: P stores a prompt's KV, D loads
it.

Source: vLLM PR 12957, its `KVStoreConnector` and its proxy. Both legs carry the prompt's ids and
its key: P stores under it, D loads by it. P's answer holds no claim on KV, so nothing has to be
released. The store itself decides what it keeps, and how long. D computes the prompt itself if the
store has nothing under the key, or something shorter than the prompt.

The ids must be those that the engines use, special tokens included: the proxy gets them before it
asks P. The key is made from them, from the model's name, since one store may serve several models,
and from the prompt's `cache_salt`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdproxy.transfer.bodies import decode_fields, prefill_fields
from pdproxy.transfer.contract import (
    Capabilities,
    Contract,
    Dispatch,
    Handle,
    LegRequest,
    leg,
    raw,
)
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.handles import unclaimed
from pdproxy.transfer.signs import ContractSigns
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.fields import is_absent
from pdproxy.wire.kvparams import KVTransferParams, store_keys
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Prompt

_ids_decoder = msgspec.json.Decoder(list[int])


def prefill(parsed: Parsed, prompt: Prompt, dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: store the prompt's KV under its key, load none."""
    fields = prefill_fields(parsed, prompt, dispatch)
    ids = _numbers(dispatch)
    params = KVTransferParams(
        prefix_prompt_ids=ids, kvcache_store_keys=store_keys(ids, _scope(parsed))
    )
    fields["kv_transfer_params"] = raw(params.as_json())
    return leg(parsed, fields)


def handle(_parsed: Parsed, answer: PrefillAnswer, dispatch: Dispatch) -> Handle | str:
    """Return a handle without `params`, or why the decode engine should not be sent the key."""
    return why_not_stored(answer, _numbers(dispatch)) or unclaimed(answer)


def decode(parsed: Parsed, prompt: Prompt, _given: Handle, dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request, and the key to load by."""
    fields = decode_fields(parsed, prompt)
    ids = _numbers(dispatch)
    params = KVTransferParams(
        prefix_prompt_ids=ids, kvcache_load_keys=store_keys(ids, _scope(parsed))
    )
    fields["kv_transfer_params"] = raw(params.as_json())
    return leg(parsed, fields)


def _scope(parsed: Parsed) -> str:
    """Return what separates KV of equal ids: the model, since one store may serve several, and the
    prompt's salt.
    """
    model = parsed.model or ""
    if is_absent(parsed.fields, "cache_salt"):
        return model
    return msgspec.json.encode((model, parsed.fields["cache_salt"])).decode()


def _numbers(dispatch: Dispatch) -> list[int]:
    assert dispatch.ids is not None
    return dispatch.ids.numbers()


def why_not_stored(answer: PrefillAnswer, ids: Sequence[int]) -> str | None:
    """Return why D should not be sent the key although P answered, None if it should.

    If an engine returns other ids than these, or another number of them, it has stored something
    that is no prefix of what D will look for. Engines with the pull request's version of vLLM
    return the number only.
    """
    returned = answer.token_ids()
    if returned is not None:
        try:
            same = _ids_decoder.decode(returned) == list(ids)
        except msgspec.MsgspecError:
            same = False
        return None if same else "P used other token ids than those that the key was made from"
    counted = answer.usage.prompt_tokens
    if counted not in (0, len(ids)):
        return f"P counted {counted} prompt tokens, the key was made from {len(ids)}"
    return None


NAME = "kvstore-keys"
CAPABILITIES = Capabilities(needs_ids=True, takes_ids=True)
KVSTORE_KEYS = Contract(
    name=NAME, prefill=prefill, handle=handle, decode=decode, capabilities=CAPABILITIES
)
ENTRY = Entry.of(
    KVSTORE_KEYS, kv_connectors=("MooncakeStoreConnector",), signs=ContractSigns(last_version="0.9")
)
