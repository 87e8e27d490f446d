"""The `kv_transfer_params` in a decode engine's whole answer: a handle of KV that it keeps. No client may see one."""

from __future__ import annotations

import msgspec

from pdproxy.wire.engine import UNREADABLE

_NAME = b'"kv_transfer_params":'


class _Answer(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_Answer)


def without_handle(body: bytes) -> tuple[bytes, bytes | None]:
    """Return a whole answer with `null` in place of its `kv_transfer_params`, and these; None if it has none.

    The rest keeps its bytes. In a text the quotes of the name would be escaped.
    """
    at = body.rfind(_NAME)
    if at < 0 or body.startswith((b"null", b" null"), at + len(_NAME)):
        return body, None
    try:
        params = bytes(_answer.decode(body).kv_transfer_params)
    except UNREADABLE:
        return body, None
    start = body.find(params, at)
    if start < 0 or params == b"null":
        return body, None
    return b"%bnull%b" % (body[:start], body[start + len(params) :]), params
