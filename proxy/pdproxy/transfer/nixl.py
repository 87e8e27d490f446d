"""NIXL, pull: the prefill engine keeps the blocks, the decode engine reads them.

Source: vLLM 0.32.0 `nixl/pull_scheduler.py`, `nixl/pull_worker.py`, `renderers/online_renderer.py`. The prefill answer's
`kv_transfer_params` go to the decode engine verbatim, with the prompt's ids beside them, so that both engines see one
prompt whatever their templates say. A handle that is incomplete, or holds no blocks, kills a decode engine's core:
such a one is never sent on.
"""

from __future__ import annotations

import dataclasses

import msgspec

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import DROPPED_ON_PREFILL, decode_fields, prefill_fields, with_ids
from pdproxy.transfer.contract import Contract, Dispatch, Handle, LegRequest, encode, raw
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer
from pdproxy.wire.notices import Notice
from pdproxy.wire.request import Parsed, Prompt, Route

_ASK = raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


class _Params(msgspec.Struct, frozen=True):
    """What must be there before a decode engine may see a handle."""

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: msgspec.Raw
    remote_num_tokens: int | None = None


_params_decoder = msgspec.json.Decoder(_Params)


def prefill(parsed: Parsed, prompt: Prompt, dispatch: Dispatch) -> LegRequest:
    """Return the prefill leg: it asks the engine to keep the KV for a remote decode. With ids it need not tokenize."""
    fields = prefill_fields(parsed, prompt)
    fields["kv_transfer_params"] = _ASK
    if dispatch.ids is not None and dispatch.prefill_takes_ids:
        with_ids(fields, parsed.route, dispatch.ids)
    return LegRequest(parsed.route, encode(fields))


def handle(_parsed: Parsed, answer: PrefillAnswer, _dispatch: Dispatch) -> Handle | str:
    """Return the handle in a prefill answer, or the reason why there is none that may be used."""
    params_json = bytes(answer.kv_transfer_params)
    if params_json == b"null":
        return (
            "the answer has no kv_transfer_params: is the engine started with a --kv-transfer-config of NixlConnector?"
        )
    params = _params_of(params_json)
    if isinstance(params, str):
        return params
    return Handle(
        params=params_json,
        token_ids=answer.token_ids(),
        prompt_tokens=answer.usage.prompt_tokens,
        remote_request_id=params.remote_request_id,
        created_cache_tokens=answer.details().created_cache_tokens,
    )


def handle_from_notice(notice: Notice) -> Handle | None:
    """Return the handle in a notice of the prefill engine's scheduler, None if it doesn't hold all of one."""
    if notice.params is None or notice.token_ids is None or notice.tokens is None:
        return None
    found = _params_of(notice.params)
    if isinstance(found, str):
        return None
    return Handle(notice.params, notice.token_ids, notice.tokens, found.remote_request_id, notice.created_cache_tokens)


def _params_of(params_json: bytes) -> _Params | str:
    """Return params that a decode engine may see, or why these may not be seen."""
    try:
        params = _params_decoder.decode(params_json)
    except UNREADABLE as error:
        return f"kv_transfer_params are incomplete: {error}"
    if not params.do_remote_prefill:
        return "kv_transfer_params say do_remote_prefill=false"
    if not _holds_blocks(bytes(params.remote_block_ids)):
        return "kv_transfer_params hold no blocks"
    return params


def _holds_blocks(block_ids: bytes) -> bool:
    """Tell whether each group has blocks. Of a long prompt they are thousands: they are not read, only looked through."""
    plain = block_ids.translate(None, b" \t\r\n")
    return plain.startswith(b"[") and plain.find(b"[]") < 0 and plain.find(b"null") < 0


def decode(parsed: Parsed, prompt: Prompt, given: Handle, dispatch: Dispatch) -> LegRequest:
    """Return the decode leg: the client's request with the handle, and the prompt's ids as the prefill engine said them.

    vLLM 0.32.0 reads ids beside a handle for chats alone, whatever its documents say. A completion's prompt becomes those ids
    where ids were made here, too; without, both engines tokenize one text, for which there is no template that could differ.
    """
    fields = decode_fields(parsed, prompt)
    params = given.params
    if given.token_ids is not None:
        if dispatch.ids is not None and parsed.route is Route.COMPLETIONS:
            # Never ours: a prompt that is not the handle's kills a decode engine.
            with_ids(fields, parsed.route, TokenIds(given.token_ids, given.prompt_tokens))
        else:
            params = params[: params.rindex(b"}")] + b',"prompt_token_ids":' + given.token_ids + b"}"
    fields["kv_transfer_params"] = raw(params)
    return LegRequest(parsed.route, encode(fields))


def release_body(model: str | None, given: Handle) -> bytes:
    """Return a completion that the decode engine's handler refuses (`max_tokens` 0), which frees the prefill's blocks.

    It must pass the schema and fail in the handler: vLLM gives a rejected request's KV back only from there.
    """
    fields = {"prompt": raw(b'"x"'), "max_tokens": raw(b"0"), "stream": raw(b"false")}
    if model is not None:
        fields["model"] = raw(msgspec.json.encode(model))
    fields["kv_transfer_params"] = raw(given.params)
    return encode(fields)


def refusal_released(error_type: str, param: str | None) -> bool:
    """Tell whether a 4xx of the decode engine has already given the handle back.

    A refusal by the handler has; one by the schema has not. The schema's own errors have the type "Bad Request"; its
    validators speak as "BadRequestError" like the handler, but can only name what the prefill leg did not carry. In
    doubt the answer is no: a second release is a log line on the prefill engine, a forgotten one holds blocks for a lease.
    """
    if error_type == "Bad Request":
        return False
    field = (param or "").split(".")[0]
    return field not in (*DROPPED_ON_PREFILL, "response_format", "")


NIXL = Contract(
    name="nixl",
    prefill=prefill,
    handle=handle,
    decode=decode,
    holds=True,
    release_body=release_body,
    refusal_released=refusal_released,
)


def nixl(*, notifier: bool = False, early: bool = False) -> Contract:
    """Return the contract. `notifier`: the engines carry pdproxy's, so that custody is known; `early`: its handle counts."""
    return dataclasses.replace(
        NIXL,
        needs_leg_id=notifier,
        handle_from_notice=handle_from_notice if notifier else None,
        early=notifier and early,
    )
