"""API keys: which clients are accepted, what their keys are called in log lines, and which `Authorization` header engines get.

Owns the comparison. It always compares the digests of all keys, so that its time shows neither a key's length nor its position.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping

from pdproxy.kit.errors import UnauthorizedError
from pdproxy.settings.key_lines import KeyLimits

_MISSING = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)
_WRONG = "Incorrect API key provided."
NO_LIMITS: Mapping[str, KeyLimits] = {}
NO_KEYS: Mapping[bytes, str] = {}
CHALLENGE = (b"www-authenticate", b"Bearer")
"""The header that a 401 needs."""


class Keys:
    """The keys of clients. `proxy_keys` returns the digests of the valid keys with the keys' names.

    It is called for every request, since keys change. If it returns none, no client is accepted. `proxy_keys` None: all are.

    With keys, engines get their own key instead of a client's `Authorization`. Without keys, they get the client's header and no
    other: otherwise a proxy that accepts everybody would open an engine that needs a key to everybody.
    """

    def __init__(
        self,
        proxy_keys: Callable[[], Mapping[bytes, str]] | None = None,
        limits: Callable[[], Mapping[str, KeyLimits]] = lambda: NO_LIMITS,
    ) -> None:
        self._digests = proxy_keys
        self.limits = limits
        """Returns the limits in force, by the names that a file gives to keys. Keys without such a name have none."""
        self._counted = NO_KEYS
        self._several = False
        """Whether those that were counted last have several names."""

    def __repr__(self) -> str:
        return f"<Keys {'wanted' if self.wanted else 'not wanted'}>"

    @property
    def wanted(self) -> bool:
        """Whether clients need a key."""
        return self._digests is not None

    @property
    def valid(self) -> Mapping[bytes, str]:
        """The keys that are valid now: their names by their digests. Another object once they have changed."""
        return NO_KEYS if self._digests is None else self._digests()

    @property
    def several(self) -> bool:
        """Whether keys of several names are valid."""
        if (valid := self.valid) is not self._counted:
            self._counted, self._several = valid, len(set(valid.values())) > 1
        return self._several

    def check(self, authorization: bytes | None) -> None:
        """Raise UnauthorizedError unless the header holds one of the keys, or no keys are wanted."""
        if self._digests is not None:
            self.verified(authorization)

    def verified(self, authorization: bytes | None) -> bytes:
        """Return the digest of the key in the header.

        Raises:
            UnauthorizedError: it is none of the keys.
        """
        scheme, _, given = (authorization or b"").partition(b" ")
        given = given.strip()
        if scheme.lower() != b"bearer" or not given:
            raise UnauthorizedError(_MISSING, code=None)
        found, matches = digest(given), False
        for one in self._digests() if self._digests is not None else ():
            matches |= hmac.compare_digest(found, one)
        if not matches:
            raise UnauthorizedError(_WRONG, code="invalid_api_key")
        return found

    def name(self, found: bytes) -> str | None:
        """Return the name of a key by its digest: that of its line, or its place. None for a key that is not valid now."""
        return self._digests().get(found) if self._digests is not None else None

    def priorities(self, name: str | None) -> tuple[int, int] | None:
        """Return the least and the greatest priority that requests with a key of this name may have, None for no bounds."""
        limits = self.limits().get(name) if name is not None else None
        return None if limits is None else limits.priority

    def to_engine(self, authorization: bytes | None) -> tuple[tuple[bytes, bytes], ...]:
        """Return a client's `Authorization` as header lines for engines: one line, or none."""
        return ((b"authorization", authorization),) if authorization is not None and not self.wanted else ()


def digest(key: bytes) -> bytes:
    """Return the digest by which keys are compared."""
    return hashlib.sha256(key).digest()
