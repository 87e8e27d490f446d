"""API keys: which clients are accepted, what their keys are called in log lines, and which
`Authorization` header engines get.

Owns the look-up: by the digest of the key, in a dictionary. Its cost does not depend on the number
of keys. Its time shows nothing of a key: a dictionary compares hashes under a secret of the process
first, and digests, which nobody can choose, behind that.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from pdproxy.kit.errors import PdproxyError, RevokedError, UnauthorizedError
from pdproxy.settings.keys import KeyLimits, KeyRights

_MISSING = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header "
    "using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)
_WRONG = "Incorrect API key provided."
NO_LIMITS: Mapping[str, KeyLimits] = {}
NO_KEYS: Mapping[bytes, ValidKey] = {}
CHALLENGE = (b"www-authenticate", b"Bearer")
"""The header that a 401 needs."""


class ValidKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key that is valid. `name`: that of its line, or its place; `digest`: that of the key,
    which is not kept itself.

    `until`: when it ends, in Unix seconds, None: never. `rights`: what its requests may ask for,
    None: anything. `read_only`: of an operator's key, that it may change nothing.
    """

    name: str
    digest: bytes
    rights: KeyRights | None = None
    until: float | None = None
    read_only: bool = False

    def is_over(self, now: float) -> bool:
        """Return whether it has ended. `now`: in Unix seconds."""
        return self.until is not None and now >= self.until


class Head(Protocol):
    """The head of a request."""

    def check_head(self, rights: KeyRights) -> None:
        """Raise ForbiddenError unless a key with these rights is good for the route, and for the
        tenant that is named.
        """


class RequestHead(Protocol):
    """A request whose head was read, and what was found then."""

    @property
    def head(self) -> Head:
        """What looks at the head again."""

    @property
    def found(self) -> ValidKey | None:
        """Its key, None without one."""

    @property
    def refusal(self) -> PdproxyError | None:
        """Why its sender is refused, None if not."""


class Keys:
    """The keys of clients. `proxy_keys` returns those that are valid, by their digests.

    It is called for every request, since keys change. If it returns none, no client is accepted.
    `proxy_keys` None: all are. `wall` returns Unix seconds.

    With keys, engines get their own key instead of a client's `Authorization`. Without keys, they
    get the client's header and no other: otherwise a proxy that accepts everybody would open an
    engine that needs a key to everybody.
    """

    def __init__(
        self,
        proxy_keys: Callable[[], Mapping[bytes, ValidKey]] | None = None,
        limits: Callable[[], Mapping[str, KeyLimits]] = lambda: NO_LIMITS,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._valid = proxy_keys
        self.wall = wall
        self.limits = limits
        """Returns the limits in force, by the names that a file gives to keys. Keys without such a
        name have none.
        """
        self.changes = 0
        """How often the keys have changed."""
        self._counted = NO_KEYS
        self._seen: set[str | bytes] = set()
        """The names of all keys since the start, until there are several; of a key without a name,
        its digest.
        """

    def __repr__(self) -> str:
        return f"<Keys {'wanted' if self.wanted else 'not wanted'}>"

    @property
    def wanted(self) -> bool:
        """Whether clients need a key."""
        return self._valid is not None

    @property
    def valid(self) -> Mapping[bytes, ValidKey]:
        """The keys that are valid now, by their digests. Another object once they have changed."""
        return NO_KEYS if self._valid is None else self._valid()

    def ends(self) -> Mapping[bytes, float]:
        """Return when keys end, in Unix seconds, by their digests; those that do."""
        return {one.digest: one.until for one in self.valid.values() if one.until is not None}

    @property
    def several(self) -> bool:
        """Whether keys of several names are valid, or were since the start: engines keep what a
        former tenant has sent.
        """
        if self._valid is None:
            return False
        if self._valid() is not self._counted:
            self.note_names()
        return len(self._seen) > 1

    def note_names(self) -> None:
        """Have the names of the keys that are valid now count. To be called when keys have changed:
        requests may come later.
        """
        valid = self.valid
        if valid is not self._counted:
            self.changes += 1
            self._counted = valid
        if len(self._seen) <= 1:
            named = self.limits()
            self._seen |= {key.name if key.name in named else key.digest for key in valid.values()}

    def check(self, authorization: bytes | None) -> None:
        """Raise UnauthorizedError unless the header holds one of the keys, or no keys are
        wanted.
        """
        if self._valid is not None:
            self.verified(authorization)

    def verified(self, authorization: bytes | None) -> ValidKey:
        """Return the key in the header.

        Raises:
            UnauthorizedError: it is none of the keys, or has ended.
        """
        scheme, _, given = (authorization or b"").partition(b" ")
        given = given.strip()
        if scheme.lower() != b"bearer" or not given:
            raise UnauthorizedError(_MISSING, code=None)
        found = self._valid().get(digest(given)) if self._valid is not None else None
        if found is None:
            raise UnauthorizedError(_WRONG, code="invalid_api_key")
        if found.until is not None and found.is_over(self.wall()):
            raise RevokedError("key", "expired")
        return found

    def admit(self, sent: RequestHead) -> KeyRights | None:
        """Return what a request may ask for now, None: anything.

        Since its key was looked up, the body may have come slowly, the request may have waited
        behind others, and the key may have changed.

        Raises:
            PdproxyError: `sent.refusal`.
            UnauthorizedError: a key is wanted and there was none, or it is not valid any more.
            ForbiddenError: it is not good for the request's head any more.
        """
        refusal = sent.refusal
        if refusal is not None:
            raise refusal
        if self._valid is None:
            return None
        found = sent.found
        if found is not None and found.until is None and self._valid().get(found.digest) is found:
            return found.rights  # nearly always
        now = self.now(found)
        if now is not found and now.rights is not None:
            sent.head.check_head(now.rights)
        return now.rights

    def now(self, found: ValidKey | None) -> ValidKey:
        """Return a key that was found as it is now. Keys are wanted.

        Raises:
            UnauthorizedError: there was none, or it is not valid any more.
        """
        if found is None or self._valid is None:
            raise UnauthorizedError(_MISSING, code=None)
        now = self._valid().get(found.digest)
        if now is None:
            raise RevokedError("key", "revoked")
        if now.until is not None and now.is_over(self.wall()):
            raise RevokedError("key", "expired")
        return now

    def priorities(self, name: str | None) -> tuple[int, int] | None:
        """Return the least and the greatest priority that requests with a key of this name may
        have, None for no bounds.
        """
        limits = self.limits().get(name) if name is not None else None
        return None if limits is None else limits.priority

    def to_engine(self, authorization: bytes | None) -> tuple[tuple[bytes, bytes], ...]:
        """Return a client's `Authorization` as header lines for engines: one line, or none."""
        return (
            ((b"authorization", authorization),)
            if authorization is not None and not self.wanted
            else ()
        )


def digest(key: bytes) -> bytes:
    """Return the digest by which keys are found."""
    return hashlib.sha256(key).digest()
