"""A decode engine's handle of a finished turn, and how much of it the conversation's next prompt
may use. Pure.

Source: vLLM 0.32.0 `nixl/pull_scheduler.py`, `nixl/pull_worker.py` (`bidirectional_kv_xfer`). The
prefill engine compares no tokens, and pairs blocks from the end of both lists. So a handle is used
whole, or cut to whole blocks in both of its fields. A handle stands in whole answers, and since
vLLM 0.33.0 in the last event of streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pdproxy.transfer.signs import release
from pdproxy.wire.engine import UNREADABLE

_MAX_BLOCKS = 1 << 24
_Name = msgspec.Meta(min_length=1, max_length=512)


class DecodeHandle(msgspec.Struct, frozen=True, array_like=True):
    """KV of a finished turn that a decode engine keeps.

    - `params`: the engine's `kv_transfer_params`, unchanged.
    - `request_id`: the engine's internal id of the request.
    - `tokens`: how many tokens of the prompt and the answer have KV. The last token that was
      generated has none.
    - `blocks`: KV blocks in all groups together. `groups`: groups of layers with a list of blocks
      of their own.
    """

    params: bytes
    request_id: str
    tokens: int
    blocks: int
    groups: int


class Fit(msgspec.Struct, frozen=True):
    """What a prefill engine is sent of a handle: `tokens` of its tokens, all of them unless
    `trimmed`.
    """

    params: bytes
    tokens: int
    trimmed: bool


class _Params(msgspec.Struct, frozen=True):
    do_remote_decode: bool
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[list[int]]
    remote_num_tokens: int
    do_remote_prefill: bool = False


_SHOWN_IN_STREAMS = (0, 33)


def shown_in_streams(version: str) -> bool:
    """Return whether an engine of this version of vLLM has the handle in the last event of a
    stream.
    """
    return (release(version) or (0, 0)) >= _SHOWN_IN_STREAMS


_params = msgspec.json.Decoder(_Params)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


def read(params: bytes) -> DecodeHandle | str:
    """Return the handle in a decode engine's `kv_transfer_params`, or why there is none that an
    engine may be sent.
    """
    try:
        found = _params.decode(params)
    except UNREADABLE as error:
        return f"kv_transfer_params are incomplete: {error}"
    if not found.do_remote_decode or found.do_remote_prefill:
        return "kv_transfer_params are not those of a decode engine that keeps KV"
    blocks = sum(map(len, found.remote_block_ids))
    names = (found.remote_engine_id, found.remote_request_id, found.remote_host)
    if (
        not 0 < blocks <= _MAX_BLOCKS
        or found.remote_num_tokens < 1
        or not all(0 < len(name) <= 512 for name in names)
    ):
        return "kv_transfer_params hold no blocks"
    return DecodeHandle(
        bytes(params),
        found.remote_request_id,
        found.remote_num_tokens,
        blocks,
        len(found.remote_block_ids),
    )


def fit(
    handle: DecodeHandle, *, known: int, common: int, prompt: int, block_size: int, min_tokens: int
) -> Fit | None:
    """Return what the next prompt may use of a handle, None if that is nothing, or too little to be
    worth a transfer.

    Args:
        handle: of the turn before, with one group of full attention.
        known: tokens with KV whose ids are known here.
        common: tokens at the beginning of that turn that are those of the next prompt.
        prompt: tokens of the next prompt. Its last one is never used: the prefill engine computes
            it for its output.
        block_size: tokens in a block, of both engines.
        min_tokens: fewer are not used.
    """
    if handle.groups != 1:
        return None
    usable = min(common, known, prompt - 1)
    if handle.tokens <= usable and handle.blocks == -(-handle.tokens // block_size):
        return (
            Fit(handle.params, handle.tokens, trimmed=False)
            if handle.tokens >= min_tokens
            else None
        )
    blocks = min(usable // block_size, handle.tokens // block_size, handle.blocks)
    if blocks < 1 or blocks * block_size < min_tokens:
        return None
    return Fit(
        _trimmed(handle.params, blocks, blocks * block_size), blocks * block_size, trimmed=True
    )


def _trimmed(params: bytes, blocks: int, tokens: int) -> bytes:
    fields = _fields.decode(params)
    ids = msgspec.json.decode(fields["remote_block_ids"], type=list[list[int]])
    fields["remote_block_ids"] = msgspec.Raw(_encode([ids[0][:blocks]]))
    fields["remote_num_tokens"] = msgspec.Raw(b"%d" % tokens)
    return _encode(fields)


def release_body(model: str | None, handle: DecodeHandle) -> bytes:
    """Return a completion that an engine's handler refuses (`max_tokens` 0), which frees the decode
    engine's blocks.

    To that engine, the sender of the handle is one that holds KV for it: it reports that it will
    not read it. The body must pass the schema and fail in the handler.
    """
    params = _fields.decode(handle.params)
    params["do_remote_prefill"], params["do_remote_decode"] = (
        msgspec.Raw(b"true"),
        msgspec.Raw(b"false"),
    )
    fields = {
        "prompt": msgspec.Raw(b'"x"'),
        "max_tokens": msgspec.Raw(b"0"),
        "stream": msgspec.Raw(b"false"),
    }
    if model is not None:
        fields["model"] = msgspec.Raw(_encode(model))
    fields["kv_transfer_params"] = msgspec.Raw(_encode(params))
    return _encode(fields)


def at_host(handle: DecodeHandle, host: str) -> DecodeHandle:
    """Return the handle with another host of the decode engine's side channel, to which prefill
    engines connect.
    """
    fields = _fields.decode(handle.params)
    fields["remote_host"] = msgspec.Raw(_encode(host))
    return msgspec.structs.replace(handle, params=_encode(fields))


def ids_text(ids: bytes) -> bytes | None:
    """Return token ids, a JSON array, as texts that each end with a comma: `1,256,`. None if they
    are not token ids, or none.

    Nothing is parsed: a prompt may have a million ids. Equal ids have equal texts, since JSON has
    no leading zeros.
    """
    text = ids.translate(None, b" \t\r\n")
    inner = text[1:-1]
    if not inner or text[:1] != b"[" or text[-1:] != b"]" or inner.translate(None, b"0123456789,"):
        return None
    return inner + b","


class _Fits(Protocol):
    def __call__(
        self,
        handle: DecodeHandle,
        *,
        known: int,
        common: int,
        prompt: int,
        block_size: int,
        min_tokens: int,
    ) -> Fit | None:
        """See `fit`."""


@dataclass(frozen=True, slots=True)
class TurnRules:
    """How a contract hands a finished turn's KV back to a prefill engine. All functions are pure.

    - `read(params)`: the handle in a decode engine's answer or notice, or why there is none.
    - `fit(...)`: the part of it that another prompt may use.
    - `release_body(model, handle)`: a completion that any engine refuses with 400, after it has
      reported to the decode engine that nobody will read the KV.
    - `at_host(handle, host)`: the handle with another host of the decode engine.
    """

    read: Callable[[bytes], DecodeHandle | str] = read
    fit: _Fits = fit
    release_body: Callable[[str | None, DecodeHandle], bytes] = release_body
    at_host: Callable[[DecodeHandle, str], DecodeHandle] = at_host
