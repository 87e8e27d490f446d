"""API keys: which clients are let in, and what of their `Authorization` goes on to engines.

Owns the comparison: digests, all of them each time, so that neither a key's length nor its place can be measured.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

from pdproxy.kit.errors import UnauthorizedError

_MISSING = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)
_WRONG = "Incorrect API key provided."
CHALLENGE = (b"www-authenticate", b"Bearer")
"""The header that belongs to a 401."""


class Keys:
    """The keys of clients. `proxy_keys` is asked at every request, since keys change; None: everybody is let in.

    With keys, a client's `Authorization` ends here, and engines get their own key; without, the client's goes on. Never
    both: an engine that wants a key would be open to everybody through a proxy that asks for none.
    """

    def __init__(self, proxy_keys: Callable[[], Iterable[bytes]] | None = None) -> None:
        self._digests = proxy_keys

    def __repr__(self) -> str:
        return f"<Keys {'wanted' if self.wanted else 'not wanted'}>"

    @property
    def wanted(self) -> bool:
        """Whether clients have to bring a key."""
        return self._digests is not None

    def check(self, authorization: bytes | None) -> None:
        """Raise UnauthorizedError unless the header holds one of the keys, or none are wanted."""
        if self._digests is not None:
            self.known(authorization)

    def known(self, authorization: bytes | None) -> bytes:
        """Return the digest of the key that the header holds.

        Raises:
            UnauthorizedError: it holds none of the keys.
        """
        scheme, _, given = (authorization or b"").partition(b" ")
        given = given.strip()
        if scheme.lower() != b"bearer" or not given:
            raise UnauthorizedError(_MISSING, code=None)
        mine, known = digest(given), False
        for one in self._digests() if self._digests is not None else ():
            known |= hmac.compare_digest(mine, one)
        if not known:
            raise UnauthorizedError(_WRONG, code="invalid_api_key")
        return mine

    def to_engine(self, authorization: bytes | None) -> tuple[tuple[bytes, bytes], ...]:
        """Return what of a client's Authorization header goes on to engines."""
        return ((b"authorization", authorization),) if authorization is not None and not self.wanted else ()


def digest(key: bytes) -> bytes:
    """Return what keys are compared by."""
    return hashlib.sha256(key).digest()
