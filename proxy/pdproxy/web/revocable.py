"""The interface of what a client loses together with its key or its certificate."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from pdproxy.kit.errors import RevokedError

MakeError = Callable[[], RevokedError]
"""Makes the error of one request: an error refers to the frames that it was raised in."""


class ShownCertificate(NamedTuple):
    """A client's certificate: the SHA-256 digests of the authorities that vouch for it, and its end
    in seconds since 1970.
    """

    authorities: frozenset[bytes]
    ends: float


class RevocableRequest(Protocol):
    """A request."""

    def revoke(self, error: MakeError, keys: AbstractSet[bytes] | None) -> bool:
        """End it if one of these keys, given as digests, has let it in; None: whatever has. Return
        whether this has ended it.

        Its client gets the error: as the answer, or as the last event of a stream that was begun.
        """


class RevocableConnection(Protocol):
    """A connection of a client. `certificate`: what the client has shown, None if nothing."""

    certificate: ShownCertificate | None

    def revoke(self, error: MakeError, keys: AbstractSet[bytes] | None) -> int:
        """End its requests, as `RevocableRequest.revoke` does. Return how many."""

    def shut_out(self, error: MakeError) -> None:
        """End all its requests, and close it soon."""
