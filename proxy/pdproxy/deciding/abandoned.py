"""Abandoned requests: their clients have left before any data. They may still end the engines at
which they were under way.

Pure: `now` is an argument.
"""

from __future__ import annotations

from collections import deque

import msgspec

from pdproxy.deciding.loss import RequestLosses
from pdproxy.kit.expiring import Expiring
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.losses import Fingerprint

UNDER_WAY = 10.0
"""Seconds for which an abandoned request counts as under way at its engines."""
MOST_OF_ENGINE = 64
"""Abandoned requests of one engine: the oldest is forgotten."""
MOST_ENGINES = 1024
"""Engines, of the same kind."""


class AbandonedRequest(msgspec.Struct, frozen=True, eq=False):
    """One at one engine. `since`: when it was sent there; `until`: how long it counts as under
    way.
    """

    request_id: str
    client: bytes | str
    losses: RequestLosses
    fingerprint: Fingerprint
    since: float
    until: float


class _OfEngine(msgspec.Struct, eq=False):
    until: float
    requests: deque[AbandonedRequest]


class AbandonedRequests:
    """Those of one pool and process, by the run of an engine."""

    def __init__(self) -> None:
        self._engines: Expiring[tuple[str, int], _OfEngine] = Expiring(MOST_ENGINES)

    def __repr__(self) -> str:
        return f"<AbandonedRequests at {len(self._engines)} engines>"

    def add(self, engine: LedgerEngine, request: AbandonedRequest) -> None:
        """A client has left."""
        key = (engine.url, engine.run_number)
        found = self._engines.get(key) or _OfEngine(request.until, deque(maxlen=MOST_OF_ENGINE))
        found.until = request.until
        found.requests.append(request)
        self._engines.keep(key, found)

    def at(self, engine: LedgerEngine, now: float) -> list[AbandonedRequest]:
        """Return those that may be under way at an engine."""
        found = self._engines.get((engine.url, engine.run_number))
        return [] if found is None else [one for one in found.requests if one.until > now]

    def forget_old(self, now: float) -> None:
        """Forget those whose time is over."""
        self._engines.forget_old(now)
