"""The answer to `GET /drained`: what this process still has at an engine that is to end.

An engine is drained once nothing is left there: `fleet.membership` decides that, with several
workers for all of them. So an engine that gets requests is never drained, even if it has none now:
a request may come in the next moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pdproxy.app.pool import PoolParts
from pdproxy.settings.engines import both_schemes
from pdproxy.web.operation import EngineWork

SERVES = "the engine gets requests: this proxy was not told that the engine is to end"
DRAINS = "the engine is being drained"


class DrainCheck:
    """Call it with `host:port` for what the pools of this process have at that engine."""

    def __init__(self, pools: Sequence[PoolParts]) -> None:
        self._pools = pools

    def __call__(self, place: str) -> EngineWork:
        """Return what is left at an engine. One that no pool knows has nothing."""
        work = EngineWork()
        for pool in self._pools:
            for url in _at(place, pool.membership.members):
                work += _of_member(pool, url)
            work += _of_removed(pool, place)
        return work


def _of_member(pool: PoolParts, url: str) -> EngineWork:
    drain = pool.membership.members[url].drain
    if drain is not None and drain.over:
        return EngineWork()
    requests = pool.engines[url].in_ledger.requests
    return EngineWork(SERVES if drain is None else DRAINS, requests, _handles(pool, url))


def _of_removed(pool: PoolParts, place: str) -> EngineWork:
    """Return what is left at engines that were removed at once, or too late."""
    work = EngineWork()
    for engine in pool.engines.leaving:
        if [*_at(place, [engine.url])] and pool.engines.needed(engine):
            requests, handles = engine.in_ledger.requests, _handles(pool, engine.url)
            work += EngineWork(DRAINS, requests, handles)
    return work


def _handles(pool: PoolParts, url: str) -> int:
    turns = pool.turns.named() if pool.turns is not None else ()
    return pool.custodian.count_at(url) + (url in turns)


def _at(place: str, urls: Iterable[str]) -> Iterator[str]:
    """Yield the URLs of engines at `host:port`: also of engines behind a path there."""
    whole = both_schemes(f"http://{place}")
    behind = tuple(f"{one}/" for one in whole)
    return (url for url in urls if url in whole or url.startswith(behind))
