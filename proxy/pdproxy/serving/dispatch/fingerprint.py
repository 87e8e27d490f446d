"""What a request is known by when its client sends it again: made of its body, and only once an
engine has been lost under some request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from pdproxy.scheduling.losses import Fingerprint
from pdproxy.wire.body_bounds import Body, TooManyFieldsError
from pdproxy.wire.fields import Fields, decode_fields

LEFT_OUT = frozenset(
    {
        "stream",
        "stream_options",
        "user",
        "request_id",
        "priority",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
    }
)
"""Fields that name a request or its sender, or that shape only how the answer gets to the
client.
"""
PART = 4 << 10
"""Bytes of each field's beginning, and of its end, that count. Of what is between, the length
does.
"""
MOST = 64 << 10
"""Bytes that are read for one fingerprint, so that the event loop is not held up. Of the fields
behind, the lengths count.
"""
MOST_FIELDS = 64
"""Fields that count, in the order of their names. Of those behind, the number does."""
MakeFingerprint = Callable[[str, Fields], Fingerprint]
"""Of a route's path and a body's fields: an answer of one route says nothing of another."""


def keyed(key: bytes) -> MakeFingerprint:
    """Return what makes fingerprints, with a secret key: nobody who does not know it can make two
    bodies that have the same one.
    """

    def fingerprint(path: str, fields: Fields) -> Fingerprint:
        found = hashlib.blake2b(key=key, digest_size=16, person=b"fingerprint")
        names = sorted(fields.keys() - LEFT_OUT)
        found.update(f"{len(path)} {path} {len(names)}".encode())
        left = MOST
        for name in names[:MOST_FIELDS]:
            value = memoryview(fields[name])
            found.update(f"{len(name)} {len(value)} {name}".encode("utf-8", "surrogatepass"))
            for part in (value[:PART], value[max(PART, len(value) - PART) :]):
                found.update(part[:left])
                left = max(0, left - len(part))
        return found.digest()

    return fingerprint


def fields_of(body: Body) -> Fields:
    """Return the fields of a body that is passed whole. One that is large, or no JSON object, is
    one field.
    """
    try:
        found = decode_fields(body) if len(body) <= MOST else None
    except TooManyFieldsError:
        found = None
    return {"": msgspec.Raw(body)} if found is None else found
