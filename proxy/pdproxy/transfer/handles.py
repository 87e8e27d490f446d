"""Makes handles: of a prefill engine's answer, and of KV that it is about to make. Pure."""

from __future__ import annotations

from pdproxy.transfer.contract import Dispatch, FirstToken, Handle
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.route_form import Alone

_BLANKS = (b" ", b"\t", b"\r", b"\n")
_BEGIN = ord("[")
_GROUPS = 16
"""Ends of groups of blocks that are looked at one by one. No model has so many."""


def answered(
    answer: PrefillAnswer,
    params: bytes,
    remote_request_id: str,
    *,
    cached_tokens: int | None = None,
    alone: Alone | None = None,
) -> Handle:
    """Return the handle of KV that `params` name, with the prompt's ids and lengths as the prefill
    engine's answer has them.

    `cached_tokens`, `alone`: as in `Handle`.
    """
    return Handle(
        params=params,
        token_ids=answer.token_ids(),
        prompt_tokens=answer.usage.prompt_tokens,
        remote_request_id=remote_request_id,
        created_cache_tokens=answer.details().created_cache_tokens,
        cached_tokens=cached_tokens,
        alone=alone,
    )


def promised(dispatch: Dispatch, params: bytes, remote_request_id: str) -> Handle:
    """Return the handle of KV that the prefill engine has not made yet. Without ids, the prompt's
    length is not known: 0.
    """
    ids = dispatch.prefill_ids
    return Handle(
        params=params,
        token_ids=None if ids is None else ids.json,
        prompt_tokens=0 if ids is None else ids.count,
        remote_request_id=remote_request_id,
    )


def unclaimed(
    answer: PrefillAnswer,
    token_ids: bytes | None = None,
    remote_request_id: str = "",
    first: FirstToken | None = None,
    *,
    more: int = 0,
) -> Handle:
    """Return a handle without `params`: what the prefill engine counted, and how the decode engine
    continues.

    `more`: how many tokens of the prompt the prefill engine was not sent.
    """
    details = answer.details()
    return Handle(
        params=b"",
        token_ids=token_ids,
        prompt_tokens=answer.usage.prompt_tokens + more,
        remote_request_id=remote_request_id,
        created_cache_tokens=details.created_cache_tokens,
        cached_tokens=details.cached_tokens,
        first=first,
    )


def holds_blocks(block_ids: bytes) -> bool:
    """Return whether a JSON array of block ids has some, in each of its groups if it has groups.

    A long prompt has thousands: they are searched as bytes, not decoded.
    """
    spaced = any(blank in block_ids for blank in _BLANKS)
    plain = block_ids.translate(None, b"".join(_BLANKS)) if spaced else block_ids
    if not plain.startswith(b"[") or (plain.find(b"n") >= 0 and plain.find(b"null") >= 0):
        return False
    end = 0
    for _ in range(_GROUPS):  # one byte is found many times as fast as two
        end = plain.find(b"]", end + 1)
        if end < 0 or plain[end - 1] == _BEGIN:
            return end < 0
    return plain.find(b"[]", end) < 0
