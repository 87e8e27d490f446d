"""Mooncake: the prefill engine keeps the blocks under a transfer id that the proxy makes, until the decode engine asks for them.

Source: vLLM 0.32.0 `mooncake/mooncake_connector.py`, and vllm-omni's `pd_utils` (PR 1303) for the params. The prefill engine's
answer says nothing of the KV, so the decode leg can be made before it: from the engine id and the address that the prefill
engine's bootstrap server has named. What makes an engine hang or die is never sent:

- A prefill engine keeps blocks only of a request that ended by length. So its leg can't stop at any token.
- A decode engine that lacks one of three params waits for ever. They are complete, or the leg is not sent.
- An engine of the wrong role dies of params of the other role.

Each dispatch has a transfer id of its own. A prefill engine that has aborted a request forgets its transfer: who waits for it
waits on, also if the id is used again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import decode_fields, prefill_fields, with_ids
from pdproxy.transfer.contract import (
    Capabilities,
    Contract,
    Dispatch,
    Handle,
    LegRequest,
    PushedToDecode,
    encode,
    raw,
)
from pdproxy.transfer.entry import Entry, NoOptions
from pdproxy.transfer.params import decode_params, prefill_params, transfer_id, until_length
from pdproxy.transfer.peers import PeerSource
from pdproxy.transfer.refusal import refusal_released, release_body
from pdproxy.transfer.signs import Signs
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer
from pdproxy.wire.request import Parsed, Prompt, Route

LEASE = 480.0
"""Seconds for which a prefill engine keeps blocks, and lets a decode engine wait for a prompt that it does not have.
vLLM's default for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT."""
_answered_decoder = msgspec.json.Decoder(dict[str, Any] | None)
"""vLLM's own answers have null. What others answer overrides what the proxy knows."""


def prefill(parsed: Parsed, prompt: Prompt, dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: one token that ends it by length, whatever token it is, on the rank of the dispatch."""
    assert dispatch.leg_id is not None
    assert dispatch.prefill_peer is not None
    fields = until_length(prefill_fields(parsed, prompt))
    fields["kv_transfer_params"] = raw(msgspec.json.encode(prefill_params(dispatch.leg_id)))
    if dispatch.ids is not None and dispatch.prefill_takes_ids:
        with_ids(fields, parsed.route, dispatch.ids)
    return LegRequest(parsed.route, encode(fields), dispatch.prefill_peer.headers)


def promise(_parsed: Parsed, dispatch: Dispatch) -> Handle | None:
    """Return the handle of KV that the prefill engine is about to make, None if it is not known where other engines reach it."""
    params = _params_of(dispatch)
    if params is None:
        return None
    ids = dispatch.ids if dispatch.prefill_takes_ids else None
    return Handle(
        params=params,
        token_ids=None if ids is None else ids.json,
        prompt_tokens=0 if ids is None else ids.count,
        remote_request_id=_name(dispatch),
    )


def handle(_parsed: Parsed, answer: PrefillAnswer, dispatch: Dispatch) -> Handle | str:
    """Return the handle of the KV that a prefill engine keeps, or why it keeps none."""
    for choice in answer.choices:
        if choice.finish_reason != "length":
            return f"the prefill ended by {choice.finish_reason}, not by length: such KV is not kept"
    try:
        answered = _answered_decoder.decode(answer.kv_transfer_params)
    except UNREADABLE as error:
        return f"kv_transfer_params can't be read: {error}"
    params = _params_of(dispatch, answered)
    if params is None:
        return "its bootstrap server has not named its engine id"
    return Handle(
        params=params,
        token_ids=answer.token_ids(),
        prompt_tokens=answer.usage.prompt_tokens,
        remote_request_id=_name(dispatch),
        created_cache_tokens=answer.details().created_cache_tokens,
        cached_tokens=answer.details().cached_tokens,
    )


def decode(parsed: Parsed, prompt: Prompt, given: Handle, dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request with the handle, and the prompt's ids, if they are known by now.

    Prefill engines do not compare prompts: one that is shorter than the prefilled one would read wrong KV. So both legs of a chat
    have the same ids where any are known. A completion's text is the same on both legs.
    """
    fields = decode_fields(parsed, prompt)
    fields["kv_transfer_params"] = raw(given.params)
    if given.token_ids is not None and (dispatch.ids is not None or parsed.route is not Route.COMPLETIONS):
        with_ids(fields, parsed.route, TokenIds(given.token_ids, given.prompt_tokens))
    peer = dispatch.decode_peer
    return LegRequest(parsed.route, encode(fields), peer.headers if peer is not None else ())


def _name(dispatch: Dispatch) -> str:
    assert dispatch.leg_id is not None
    return transfer_id(dispatch.leg_id)


def _params_of(dispatch: Dispatch, answered: dict[str, Any] | None = None) -> bytes | None:
    """Return a decode engine's params as JSON, None if they would be incomplete. `answered`: what the prefill engine answered."""
    peer = dispatch.prefill_peer
    if dispatch.leg_id is None or peer is None or not peer.engine_id or not peer.address:
        return None
    return msgspec.json.encode(decode_params(dispatch.leg_id, peer.engine_id, peer.address, answered))


NAME = "mooncake"
CAPABILITIES = Capabilities(
    takes_ids=True,
    orders=("concurrent", "sequential"),
    peers_from=PeerSource.BOOTSTRAP,
    mixed_parallel_sizes=True,
)
MOONCAKE = Contract(
    name=NAME,
    prefill=prefill,
    handle=handle,
    decode=decode,
    capabilities=CAPABILITIES,
    needs_leg_id=True,
    order="concurrent",
    promise=promise,
    holder=PushedToDecode(release_body, refusal_released, stuck_for=LEASE, handshakes=False, forgets=True),
)


def mooncake(_options: NoOptions) -> Contract:
    """Return the contract. It has no options."""
    return MOONCAKE


ENTRY = Entry(
    name=NAME,
    build=mooncake,
    capabilities=CAPABILITIES,
    kv_connectors=("MooncakeConnector",),
    signs=Signs(bootstrap=True),
)
