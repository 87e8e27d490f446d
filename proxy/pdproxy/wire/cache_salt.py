"""A request's `cache_salt`: prompts with different ones share nothing in engines' prefix caches.

Owns which values go to engines, and what they are where each tenant has caches of its own: a keyed
hash of the tenant and of the client's own salt. So the salts of one tenant stay apart, and no value
that a client sends becomes the salt of another tenant. Source: vLLM 0.33.0
`entrypoints/generate/base/protocol.py`. Versions before 0.30.0 crash at values that are no text.
"""

from __future__ import annotations

import hmac

import msgspec

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire.fields import STRING, Fields, is_absent

FIELD = "cache_salt"
MAX_LENGTH = 128
"""Characters, as vLLM has it."""
_FORBIDDEN = frozenset("@/\\\0")
_MAX_JSON = 12 * MAX_LENGTH + 2
"""Bytes of such a text in JSON: a character is at most two escapes."""
_NO_TEXT = "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"
_WRONG_TEXT = (
    "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', "
    "'\\\\', or NUL."
    " (parameter=cache_salt)"
)


def check(fields: Fields) -> None:
    """Refuse a salt that is no text. Engines refuse other texts that they don't take.

    Raises:
        BadRequestError: in vLLM's words.
    """
    if FIELD in fields and not is_absent(fields, FIELD) and not _is_text(fields[FIELD]):
        raise BadRequestError(_NO_TEXT, param=FIELD)


def _is_text(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b'"'


def own_salt(fields: Fields) -> str | None:
    """Return the client's own salt, None if there is none.

    Raises:
        BadRequestError: vLLM 0.33.0 does not take it, in its words.
    """
    if is_absent(fields, FIELD):
        return None
    raw = fields[FIELD]
    if not _is_text(raw):
        raise BadRequestError(_NO_TEXT, param=FIELD)
    if memoryview(raw).nbytes > _MAX_JSON:
        raise BadRequestError(_WRONG_TEXT, param=FIELD)
    text: str | None
    try:
        text = STRING.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = None  # half a surrogate pair
    if not text:
        raise BadRequestError(_NO_TEXT, param=FIELD)
    if len(text) > MAX_LENGTH or not _FORBIDDEN.isdisjoint(text):
        raise BadRequestError(_WRONG_TEXT, param=FIELD)
    return text


class TenantSalt:
    """The salts of one tenant. `tenant` tells tenants apart, inside the proxy; `secret` is the key
    of the hash.
    """

    __slots__ = ("_key", "_usual", "tenant")

    def __init__(self, secret: bytes, tenant: str) -> None:
        self.tenant = tenant
        self._key = hmac.digest(secret, tenant.encode("utf-8", "surrogatepass"), "sha256")
        self._usual = self._salt("")

    def __repr__(self) -> str:
        return "<TenantSalt>"  # neither the tenant, which may be an address, nor the salt

    def put_into(self, fields: Fields) -> None:
        """Replace the client's salt in a request's fields with the one that engines get: 64
        hexadecimal digits.

        Raises:
            BadRequestError: as `own_salt`.
        """
        if FIELD not in fields:
            fields[FIELD] = self._usual
            return
        own = own_salt(fields)
        fields[FIELD] = self._usual if own is None else self._salt(own)

    def _salt(self, own: str) -> msgspec.Raw:
        # No client's own salt is empty: the usual one is none of theirs.
        return msgspec.Raw(b'"%b"' % hmac.digest(self._key, own.encode(), "sha256").hex().encode())


def session_within(salt: TenantSalt | None, session: str | None) -> str | None:
    """Return what names a conversation among those of all tenants. `salt`: its tenant's, None where
    tenants share caches.
    """
    return session if session is None or salt is None else f"{salt.tenant} {session}"
