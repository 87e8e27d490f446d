"""Mooncake: the prefill engine keeps the blocks under a transfer id that the proxy makes, until the
decode engine asks for them.

Source: vLLM 0.32.0 `mooncake/mooncake_connector.py`, and vllm-omni's `pd_utils` (PR 1303) for the
params. The prefill engine's answer says nothing of the KV, so the decode leg can be made before it:
from the engine id and the address that the prefill engine's bootstrap server has named. What makes
an engine hang or die is never sent:

- A prefill engine keeps blocks only of a request that ended by length. So its leg can't stop at any
  token; on routes where EOS can't be masked, the decode engine is asked behind it.
- A decode engine that lacks one of three params waits for ever. They are complete, or the leg is
  not sent.
- An engine of the wrong role crashes at params of the other role.

Each dispatch has a transfer id of its own. A prefill engine that has aborted a request forgets its
transfer: who waits for it waits on, also if the id is used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import decode_fields, prefill_fields, until_length, with_ids
from pdproxy.transfer.contract import (
    ALL_ROUTES,
    Capabilities,
    Contract,
    Dispatch,
    Handle,
    LegRequest,
    PushedToDecode,
    leg,
    raw,
)
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.handles import answered, promised
from pdproxy.transfer.peers import PeerSource
from pdproxy.transfer.refusal import refusal_released, release_body
from pdproxy.transfer.signs import ContractSigns
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

LEASE = 480.0
"""Seconds for which a prefill engine keeps blocks, and lets a decode engine wait for a prompt that
it does not have. vLLM's default for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT.
"""
_answered_decoder = msgspec.json.Decoder(dict[str, Any] | None)
"""vLLM's own answers have null. Others may add params, but change none that the proxy knows: an
engine that has been taken over could name the address of any machine, or another engine's transfer.
"""
_TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_TO_DECODE = {"do_remote_decode": False, "do_remote_prefill": True}


def prefill(parsed: Parsed, prompt: Prompt, dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: one token that ends it by length, whatever token it is, on the rank
    of the dispatch.
    """
    assert dispatch.leg_id is not None
    assert dispatch.prefill_peer is not None
    fields = until_length(prefill_fields(parsed, prompt, dispatch), parsed.route.form)
    fields["kv_transfer_params"] = raw(msgspec.json.encode(prefill_params(dispatch.leg_id)))
    if (ids := dispatch.prefill_ids) is not None:
        with_ids(fields, parsed.route, ids)
    return leg(parsed, fields, dispatch.prefill_peer.headers)


def promise(_parsed: Parsed, dispatch: Dispatch) -> Handle | None:
    """Return the handle of KV that the prefill engine is about to make, None if it is not known
    where other engines reach it.
    """
    params = _params_of(dispatch)
    if params is None:
        return None
    return promised(dispatch, params, _name(dispatch))


def handle(_parsed: Parsed, answer: PrefillAnswer, dispatch: Dispatch) -> Handle | str:
    """Return the handle of the KV that a prefill engine keeps, or why it keeps none."""
    for choice in answer.choices:
        if choice.finish_reason != "length":
            return (
                f"the prefill ended by {choice.finish_reason}, not by length: such KV is not kept"
            )
    try:
        more = _answered_decoder.decode(answer.kv_transfer_params)
    except UNREADABLE as error:
        return f"kv_transfer_params can't be read: {error}"
    params = _params_of(dispatch, more)
    if params is None:
        return "its bootstrap server has not named its engine id"
    return answered(answer, params, _name(dispatch), cached_tokens=answer.details().cached_tokens)


def decode(parsed: Parsed, prompt: Prompt, given: Handle, dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request with the handle, and the prompt's ids, if they
    are known by now.

    Prefill engines do not compare prompts: one that is shorter than the prefilled one would read
    wrong KV. So both legs of a chat have the same ids where any are known. A completion's text is
    the same on both legs.
    """
    fields = decode_fields(parsed, prompt)
    fields["kv_transfer_params"] = raw(given.params)
    same_text = parsed.route is Route.COMPLETIONS and dispatch.ids is None
    if given.token_ids is not None and not same_text and not prompt.media:
        with_ids(fields, parsed.route, TokenIds(given.token_ids, given.prompt_tokens))
    peer = dispatch.decode_peer
    return leg(parsed, fields, peer.headers if peer is not None else ())


def transfer_id(request_id: str) -> str:
    """Return the name by which both engines know one transfer."""
    return f"xfer-{request_id}"


def prefill_params(request_id: str) -> dict[str, Any]:
    """Return the prefill engine's params: the flags and the transfer's name."""
    return {**_TO_PREFILL, "transfer_id": transfer_id(request_id)}


def decode_params(
    request_id: str, engine_id: str, bootstrap: str, more: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Return the decode engine's params: the transfer's name and where it is, and who prefills.

    `engine_id`: of the prefill engine's rank. `bootstrap`: the address of its bootstrap server.
    `more`: what the prefill engine answered; all other params win over what it says.
    """
    known = {
        "transfer_id": transfer_id(request_id),
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap,
    }
    return {**(more or {}), **known, **_TO_DECODE}


def _name(dispatch: Dispatch) -> str:
    assert dispatch.leg_id is not None
    return transfer_id(dispatch.leg_id)


def _params_of(dispatch: Dispatch, more: dict[str, Any] | None = None) -> bytes | None:
    """Return a decode engine's params as JSON, None if they would be incomplete. `more`: the
    prefill engine's answer.
    """
    assert dispatch.leg_id is not None
    peer = dispatch.prefill_peer
    if peer is None or not peer.engine_id or not peer.address:
        return None
    return msgspec.json.encode(decode_params(dispatch.leg_id, peer.engine_id, peer.address, more))


NAME = "mooncake"
CAPABILITIES = Capabilities(
    takes_ids=True,
    routes=ALL_ROUTES,
    media=True,
    needs_length=True,
    orders=("concurrent", "sequential"),
    peers_from=PeerSource.BOOTSTRAP,
    mixed_parallel_sizes=True,
    any_role=True,
    whole_on_prefill=True,
)
MOONCAKE = Contract(
    name=NAME,
    prefill=prefill,
    handle=handle,
    decode=decode,
    capabilities=CAPABILITIES,
    needs_leg_id=True,
    promise=promise,
    holder=PushedToDecode(
        release_body, refusal_released, stuck_for=LEASE, handshakes=False, forgets=True, lease=LEASE
    ),
)


ENTRY = Entry.of(
    MOONCAKE, kv_connectors=("MooncakeConnector",), signs=ContractSigns(bootstrap=True)
)
