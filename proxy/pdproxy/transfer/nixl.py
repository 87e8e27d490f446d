"""NIXL, pull: the prefill engine keeps the blocks, the decode engine reads them.

Source: vLLM 0.32.0 `nixl/pull_scheduler.py`, `nixl/pull_worker.py`, `renderers/online_renderer.py`.
The prefill answer's `kv_transfer_params` go to the decode engine unchanged, with the prompt's ids
beside them: so both engines work on the same prompt, whatever their templates are. A handle that is
incomplete, or names no blocks, makes a decode engine's core crash: it is never sent.
"""

from __future__ import annotations

import dataclasses

import msgspec

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import decode_fields, prefill_fields, with_ids
from pdproxy.transfer.contract import (
    ALL_ROUTES,
    Capabilities,
    Channel,
    Contract,
    Dispatch,
    Handle,
    HeldByPrefill,
    LegRequest,
    leg,
    raw,
)
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.handles import answered, holds_blocks
from pdproxy.transfer.refusal import refusal_released, release_body
from pdproxy.transfer.signs import ContractSigns, SignQuestion
from pdproxy.transfer.turns import TurnRules
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer
from pdproxy.wire.fields import Fields
from pdproxy.wire.notices import Notice
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

LEASE = 30.0
"""Seconds for which a prefill engine keeps blocks that no decode engine reads: vLLM's default for
`kv_lease_duration`.
"""
_ASK = raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


class _Params(msgspec.Struct, frozen=True):
    """The fields that a handle must have before a decode engine may be sent it."""

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: msgspec.Raw
    remote_num_tokens: int | None = None


_params_decoder = msgspec.json.Decoder(_Params)


def prefill(parsed: Parsed, prompt: Prompt, dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: it asks the engine to hold the KV for another engine. With ids it
    need not tokenize.

    With a decode engine's handle of the turn before, the engine pulls the KV of that beginning, and
    then holds all of it.
    """
    fields = prefill_fields(parsed, prompt, dispatch)
    fields["kv_transfer_params"] = _ASK if dispatch.turn is None else raw(dispatch.turn)
    if (ids := dispatch.prefill_ids) is not None:
        with_ids(fields, parsed.route, ids)
    return leg(parsed, fields)


def handle(_parsed: Parsed, answer: PrefillAnswer, _dispatch: Dispatch) -> Handle | str:
    """Return the handle in a prefill answer, or why there is none that may be used."""
    params_json = bytes(answer.kv_transfer_params)
    if params_json == b"null":
        return (
            "the answer has no kv_transfer_params: is the engine started with a "
            "--kv-transfer-config of NixlConnector?"
        )
    params = _params_of(params_json)
    if isinstance(params, str):
        return params
    return answered(answer, params_json, params.remote_request_id)


def handle_from_notice(notice: Notice) -> Handle | None:
    """Return the handle in a notice of the prefill engine's scheduler, None if the notice has no
    complete one.
    """
    if notice.params is None or notice.token_ids is None or notice.tokens is None:
        return None
    found = _params_of(notice.params)
    if isinstance(found, str):
        return None
    return Handle(
        notice.params,
        notice.token_ids,
        notice.tokens,
        found.remote_request_id,
        notice.created_cache_tokens,
    )


def _params_of(params_json: bytes) -> _Params | str:
    """Return params that a decode engine may be sent, or why these may not be sent."""
    try:
        params = _params_decoder.decode(params_json)
    except UNREADABLE as error:
        return f"kv_transfer_params are incomplete: {error}"
    if not params.do_remote_prefill:
        return "kv_transfer_params say do_remote_prefill=false"
    if not holds_blocks(bytes(params.remote_block_ids)):
        return "kv_transfer_params hold no blocks"
    return params


def decode(parsed: Parsed, prompt: Prompt, given: Handle, dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request with the handle, and the prompt's ids as the
    prefill engine returned them.

    vLLM 0.32.0 reads ids beside a handle for chats only, though its documents say otherwise. A
    completion's prompt becomes those ids if the proxy made ids, too. If not, both engines tokenize
    the same text: no template can differ.
    """
    fields = decode_fields(parsed, prompt)
    if dispatch.answer_ids:
        fields["return_token_ids"] = raw(b"true")
    ids = None
    if given.token_ids is not None and not prompt.media:  # engines ignore them beside media
        if parsed.route is not Route.COMPLETIONS:
            ids = given.token_ids
        elif dispatch.ids is not None:
            # Never our own ids: a decode engine crashes if its prompt is not the handle's.
            with_ids(fields, parsed.route, TokenIds(given.token_ids, given.prompt_tokens))
    fields["kv_transfer_params"] = raw(given.params)
    return leg(parsed, fields, ids=ids)


def at_host(given: Handle, host: str) -> Handle:
    """Return the handle with another host of the prefill engine's side channel: the engine may not
    know how others reach it.
    """
    fields = msgspec.json.decode(given.params, type=Fields)
    fields["remote_host"] = raw(msgspec.json.encode(host))
    return msgspec.structs.replace(given, params=msgspec.json.encode(fields))


class NixlOptions(msgspec.Struct, frozen=True):
    """`notifier`: the engines carry pdproxy's notifier, which reports handles and loads. `early`:
    use its handles at once.
    """

    notifier: bool = False
    early: bool = False


NAME = "nixl"
CAPABILITIES = Capabilities(
    takes_ids=True,
    notices_over=Channel.ZMQ,
    names_host=True,
    routes=ALL_ROUTES,
    media=True,
    caches_loaded=True,
    hands_back=True,
    any_role=True,
    whole_on_prefill=True,
    mixed_parallel_sizes=True,
)
NIXL = Contract(
    name=NAME,
    prefill=prefill,
    handle=handle,
    decode=decode,
    capabilities=CAPABILITIES,
    holder=HeldByPrefill(release_body, refusal_released, lease=LEASE),
    at_host=at_host,
    turns=TurnRules(),
)


def nixl(options: NixlOptions) -> Contract:
    """Return the contract with these options."""
    return dataclasses.replace(
        NIXL,
        needs_leg_id=options.notifier,
        handle_from_notice=handle_from_notice if options.notifier else None,
        early=options.notifier and options.early,
    )


def signs(mode: str, first_version: str = "") -> ContractSigns:
    """Return what NIXL's engines show. `mode`: their `transfer_mode`, which engines before vLLM
    0.32.0 do not name.
    """
    ask = SignQuestion(
        params=bytes(_ASK),
        keys=("remote_engine_id", "remote_block_ids"),
        values=(("transfer_mode", mode),),
    )
    return ContractSigns(metrics=("vllm:nixl_",), always=True, ask=ask, first_version=first_version)


ENTRY = Entry(
    name=NAME,
    build=nixl,
    options=NixlOptions,
    section="kv_ready",
    capabilities=CAPABILITIES,
    kv_connectors=("NixlConnector", "NixlPullConnector"),
    signs=signs("pull"),
)
