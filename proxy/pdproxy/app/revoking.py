"""Ends the running requests of keys that are not valid any more: of those that were taken away, and
of those that have expired.

Owns when that is looked at: whenever files were checked, once per second, and whenever other
settings come into force. Requests cost nothing here: at a change, all connections are walked.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from pdproxy.kit.errors import RevokedError
from pdproxy.serving.access.keys import Keys
from pdproxy.web.connections import Connections

logger = logging.getLogger("pdproxy.files")

_NO_ENDS: Mapping[bytes, float] = {}


class Revoking:
    """Watches the keys of clients. `ends` returns when keys expire, in seconds of `now`, by their
    digests.
    """

    def __init__(
        self,
        keys: Keys,
        connections: Connections,
        ends: Callable[[], Mapping[bytes, float]] = lambda: _NO_ENDS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._connections = connections
        self._ends_of = ends
        self._now = now
        self._valid = keys.valid
        at = now()
        self._over = {digest for digest, end in ends().items() if end <= at}
        """Keys whose end has come: their requests were ended."""
        self._ends = self._other_ends()
        """The ends of all other keys, the last one first."""

    def __repr__(self) -> str:
        return f"<Revoking {len(self._valid)} keys, {len(self._ends)} ends>"

    def look(self) -> None:
        """End the requests of keys that are not valid any more."""
        valid = self._keys.valid
        if valid is not self._valid:
            gone, self._valid = self._valid.keys() - valid.keys(), valid
            self._ends = self._other_ends()
            self._end(gone, "revoked")
        expired = set()
        while self._ends and self._ends[-1][0] <= self._now():
            expired.add(self._ends.pop()[1])
        self._over |= expired
        self._end(expired, "expired")

    def _other_ends(self) -> list[tuple[float, bytes]]:
        """Return the ends of the keys that are not over. A change of the file may have moved an
        end, also to before now.
        """
        now, ends = self._now(), self._ends_of()
        self._over = {digest for digest in self._over if ends.get(digest, math.inf) <= now}
        return sorted(
            ((end, digest) for digest, end in ends.items() if digest not in self._over),
            reverse=True,
        )

    def _end(self, keys: AbstractSet[bytes], how: str) -> None:
        if not keys:
            return
        ended = sum(one.revoke(lambda: RevokedError("key", how), keys) for one in self._connections)
        logger.info(
            "%d keys are not valid any more: %s, and %d requests of theirs were ended",
            len(keys),
            how,
            ended,
        )
