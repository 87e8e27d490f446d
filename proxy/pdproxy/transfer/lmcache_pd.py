"""LMCache's own PD: the prefill engine pushes KV to the decode engine that was chosen before, and
each rank sends a notice.

Source: LMCache 0.5.6 `v1/storage_backend/pd_backend.py`, `examples/disagg_prefill`;
production-stack's pull requests 841 and 913. The prefill leg is a completion of token ids with a
`disagg_spec`: where the decode engine's ranks receive, and the leg's own id, which the notices
repeat. Either engine may make the answer's first token. If the prefill engine does, the decode
engine continues behind it, as a completion too, and `transfer.splice` makes one answer of both. If
the decode engine does, it gets the client's own request and computes one token more.

What was pushed stays in the decode engine's buffer until that engine reads it. So if no decode leg
will read a prompt, the proxy has it read by a completion of its own. The prefill leg is never
closed before its answer: if the request is aborted before its first token, the engine crashes,
since it looks for that token anyway. If no notice came, the chunks may have names but no KV yet:
nothing is decoded from them.

The prefill engine makes the first token only if the answer does not change when another engine
continues after it. If anything depends on the output so far, or parses it from its beginning
(penalties, stop strings, seeds, grammars, tools, reasoning), one engine decodes all of it.

A decode engine frees space in its buffer only when it looks for what was pushed. It looks for its
prompt without the last token (`skip_last_n_tokens`: 1, as in LMCache's examples), in chunks; the
last chunk may be partial, and is found only by exactly its tokens. So no more than that is pushed:
where the decode engine makes the first token, the prefill engine gets the prompt without its last
token.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import structs

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import decode_fields
from pdproxy.transfer.contract import (
    OPENAI_ROUTES,
    Capabilities,
    Channel,
    Contract,
    Dispatch,
    FirstToken,
    Handle,
    HeldByDecode,
    LegRequest,
    encode,
    leg,
    raw,
)
from pdproxy.transfer.entry import Entry
from pdproxy.transfer.handles import unclaimed
from pdproxy.transfer.signs import ContractSigns
from pdproxy.wire.continuable import NEUTRAL, PENALTIES, PROMPT_ONLY, SAME_IN_COMPLETIONS
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed, limit_of
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone, Prompt

_NULL = raw(b"null")
_ONE = raw(b"1")
_FALSE = raw(b"false")
_TRUE = raw(b"true")


class _Params(msgspec.Struct, frozen=True):
    first_tok: int


_params_decoder = msgspec.json.Decoder(_Params)
_int_decoder: msgspec.json.Decoder[int | None] = msgspec.json.Decoder(int | None)


class _Spec(msgspec.Struct, frozen=True):
    req_id: str
    receiver_host: str
    receiver_init_port: tuple[int, ...]
    receiver_alloc_port: tuple[int, ...]


class _Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    ret_first_tok: bool
    disagg_spec: _Spec | None = None


def may_begin_on_prefill(parsed: Parsed) -> bool:
    """Return whether the answer stays the same if the prefill engine makes its first token."""
    if b"continuous_usage_stats" in bytes(parsed.fields.get("stream_options", _NULL)):
        return False
    for name, value in parsed.fields.items():
        if name in SAME_IN_COMPLETIONS or name in PROMPT_ONLY:
            continue
        text = bytes(value)
        if text != b"null" and text not in NEUTRAL.get(name, ()):
            return False
    return True


def _passed(parsed: Parsed) -> Fields:
    return {
        name: parsed.fields[name]
        for name in (*SAME_IN_COMPLETIONS, *PENALTIES)
        if name in parsed.fields
    }


def release_leg(model: str | None, given: Handle) -> LegRequest:
    """Return a completion that makes the decode engine read what was pushed: only a read frees its
    buffer.
    """
    fields = {
        "prompt": raw(given.params),
        "max_tokens": _ONE,
        "stream": _FALSE,
        "temperature": raw(b"0"),
    }
    if model is not None:
        fields["model"] = raw(msgspec.json.encode(model))
    return LegRequest(Route.COMPLETIONS, encode(fields))


def _with(ids: bytes, token: int) -> bytes:
    """Return a JSON array of ids with one more at its end."""
    return ids[: ids.rindex(b"]")] + b",%d]" % token


class LMCacheOptions(msgspec.Struct, frozen=True):
    """The configuration of LMCache's PD mode. Names and defaults are LMCache's.

    `first_token`: whose token is the answer's first, where it can be the prefill engine's.
    `chunk_size`: tokens in a chunk. `save_unfull_chunk`: partial chunks are moved, too.
    `first_rank_only`: only the first rank stores (models with one latent KV for all heads), and so
    sends the only notice.
    """

    first_token: Literal["prefill", "decode"] = "prefill"  # noqa: S105 - a token of text
    chunk_size: int = 256
    save_unfull_chunk: bool = False
    first_rank_only: bool = False


_DEFAULTS = LMCacheOptions()
NAME = "lmcache-pd"
CAPABILITIES = Capabilities(
    needs_ids=True,
    takes_ids=True,
    needs_receiver=True,
    notices_over=Channel.ZMQ,
    routes=OPENAI_ROUTES | {Route.GENERATE},
)


def lmcache_pd(options: LMCacheOptions = _DEFAULTS) -> Contract:
    """Return the contract with these options."""
    first_on_prefill = options.first_token == "prefill"  # noqa: S105 - a token of text
    chunk_size = options.chunk_size

    def begins(parsed: Parsed) -> bool:
        # A completion continues behind the first token, and no value of its limit means the whole
        # context.
        return first_on_prefill and limit_of(parsed) is not None and may_begin_on_prefill(parsed)

    def pushed(parsed: Parsed, ids: TokenIds) -> TokenIds:
        """Return the ids whose KV is pushed: what the decode engine looks for, all but the last of
        what it is sent.
        """
        return ids if begins(parsed) else ids.less_one()

    def min_tokens(parsed: Parsed) -> int:
        return (1 if options.save_unfull_chunk else chunk_size) + (0 if begins(parsed) else 1)

    def prefill(parsed: Parsed, _prompt: Prompt, dispatch: Dispatch) -> LegRequest:
        """Return the prefill leg: one token behind the prompt's ids, with the KV pushed to the
        receiver.
        """
        assert dispatch.leg_id is not None
        assert dispatch.ids is not None
        assert dispatch.receiver is not None
        receiver = dispatch.receiver
        fields = _passed(parsed)
        if "min_tokens" in fields and (_int_decoder.decode(fields["min_tokens"]) or 0) > 1:
            fields["min_tokens"] = _ONE
        fields["prompt"] = raw(pushed(parsed, dispatch.ids).json)
        fields["max_tokens"] = _ONE
        fields["stream"] = _FALSE
        spec = _Spec(dispatch.leg_id, receiver.host, receiver.init_ports, receiver.alloc_ports)
        fields["kv_transfer_params"] = raw(
            msgspec.json.encode(_Ask(ret_first_tok=True, disagg_spec=spec))
        )
        return LegRequest(Route.COMPLETIONS, encode(fields))

    def handle(parsed: Parsed, answer: PrefillAnswer, dispatch: Dispatch) -> Handle | str:
        """Return the handle: the ids to read the KV by, and the first token, if it is to be the
        client's first.
        """
        try:
            token = _params_decoder.decode(answer.kv_transfer_params).first_tok
        except UNREADABLE:
            # Without the token there is nothing to continue behind; and an engine without LMCache
            # pushes nothing.
            return (
                "the answer has no first_tok: is the engine started with LMCache's connector and "
                "pd_role sender?"
            )
        ids = dispatch.ids
        assert ids is not None
        leg_id = dispatch.leg_id or ""
        read = _with(
            pushed(parsed, ids).json, token
        )  # what the decode engine must be sent, so that it looks for all of it
        if not begins(parsed):  # the prefill engine was sent one token less than the prompt
            return structs.replace(unclaimed(answer, ids.json, leg_id, more=1), params=read)
        choice = answer.choices[0] if answer.choices else None
        ended = None
        if choice is not None and (choice.finish_reason != "length" or limit_of(parsed) == 1):
            ended = choice.finish_reason
        if choice is None or (ended is None and (not choice.text or "\ufffd" in choice.text)):
            # A part of a letter, or a token without text, becomes text with the next token: one
            # engine must make both.
            return structs.replace(
                unclaimed(answer, ids.json, leg_id), params=read, alone=Alone.FIRST_TOKEN
            )
        first = FirstToken(token, choice.text, ended, bytes(choice.stop_reason))
        return structs.replace(unclaimed(answer, ids.json, leg_id, first), params=read)

    def decode(parsed: Parsed, prompt: Prompt, given: Handle, _dispatch: Dispatch) -> LegRequest:
        """Return the decode leg: what comes behind the first token, or the client's own request."""
        if given.first is None:
            return leg(parsed, decode_fields(parsed, prompt))
        fields = _passed(parsed)
        for name in ("stream", "return_token_ids"):
            if name in parsed.fields:
                fields[name] = parsed.fields[name]
        if parsed.adds_ids:
            fields["return_token_ids"] = _TRUE
        if (minimum := _int_decoder.decode(fields.get("min_tokens", _NULL))) is not None:
            fields["min_tokens"] = raw(b"%d" % max(0, minimum - 1))
        limit = limit_of(parsed)
        assert limit is not None
        fields["max_tokens"] = raw(b"%d" % (limit - 1))
        fields["prompt"] = raw(given.params)
        if parsed.adds_usage:
            fields["stream_options"] = raw(b'{"include_usage":true}')
        elif "stream_options" in parsed.fields:
            fields["stream_options"] = parsed.fields["stream_options"]
        return LegRequest(Route.COMPLETIONS, encode(fields))

    def notices(dispatch: Dispatch) -> int | None:
        assert dispatch.receiver is not None
        if (
            not options.save_unfull_chunk
            and dispatch.ids is not None
            and dispatch.ids.count < chunk_size
        ):
            return 0
        return 1 if options.first_rank_only else len(dispatch.receiver.init_ports)

    return Contract(
        name=NAME,
        prefill=prefill,
        handle=handle,
        decode=decode,
        capabilities=CAPABILITIES,
        needs_leg_id=True,
        min_tokens=min_tokens,
        notices=notices,
        holder=HeldByDecode(release_leg),
    )


ENTRY = Entry(
    name=NAME,
    build=lmcache_pd,
    options=LMCacheOptions,
    section="pool.lmcache",
    capabilities=CAPABILITIES,
    kv_connectors=("LMCacheConnectorV1", "LMCacheConnectorV1Dynamic"),
    signs=ContractSigns(metrics=("lmcache:",)),
    ignores_salt=True,
)
