"""The policy `session`: the requests of a conversation go to one engine, whose cache has its turns,
unless it has too much load.

Engines are chosen by rendezvous hashing: each has a score for each session, and the highest one
wins. So an engine that is added takes over just those sessions for which it has the highest score,
an equal share of each other engine's, and one that is removed gives its own to all others. Unlike a
ring of hashes, it needs no virtual places to be even, and nothing is built when an engine comes or
goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.least_load import LeastLoad
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import Ask, Best, Policy

BOUND = 1.25
"""An engine gets a session's request only while it then has at most so many times the mean of all
engines' requests, rounded up.

The mean counts as one request at least: an engine then has at most two. With less, in a pool with
few requests every second request of an engine would leave for one that has nothing of its
conversation, though none of them has much to do.
"""


class Session(Policy):
    """Requests without a session go where `least_load` sends them. Scores are the same in all
    processes.
    """

    needs_details = True

    def __init__(self, role: Role) -> None:
        self._least_load = LeastLoad(role)
        self._seeds: dict[str, int] = {}
        """By an engine's URL."""

    def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        """See `Policy`. Engines over the bound come last, in the order of their scores."""
        if ask.session is None:
            return self._least_load.rank(ask, engines)
        ranked = self._by_score(ask.session, engines)
        most = self._most(engines)
        return [
            *[engine for engine in ranked if engine.requests < most],
            *[engine for engine in ranked if engine.requests >= most],
        ]

    def best_of(self, engines: Sequence[LedgerEngine]) -> Best:
        """See `Policy`."""
        least_loaded = self._least_load.best_of(engines)
        seeds = [self._seed(engine) for engine in engines]

        def best(ask: Ask) -> LedgerEngine:
            if ask.session is None:
                return least_loaded(ask)
            key = stable_hash(ask.session)
            scores = [hash((key ^ seed, key)) for seed in seeds]
            engine = engines[scores.index(max(scores))]
            return engine if engine.requests < self._most(engines) else self.rank(ask, engines)[0]

        return best

    def engines_changed(self) -> None:
        """See `Policy`."""
        self._seeds.clear()
        self._least_load.engines_changed()

    def opened(self, lease: Lease, ask: Ask) -> None:
        """See `Policy`."""
        self._least_load.opened(lease, ask)

    def closed(self, lease: Lease, verdict: Verdict, now: float) -> None:
        """See `Policy`."""
        self._least_load.closed(lease, verdict, now)

    def load_changed(self, engine: LedgerEngine) -> None:
        """See `Policy`."""
        self._least_load.load_changed(engine)

    def _most(self, engines: Sequence[LedgerEngine]) -> float:
        """Return the number of requests from which on an engine gets no more: there is always an
        engine below it.
        """
        return BOUND * max(1.0, (sum([engine.requests for engine in engines]) + 1) / len(engines))

    def _by_score(self, session: str, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        key = stable_hash(session)
        return sorted(
            engines, key=lambda engine: hash((key ^ self._seed(engine), key)), reverse=True
        )

    def _seed(self, engine: LedgerEngine) -> int:
        seed = self._seeds.get(engine.url)
        if seed is None:
            seed = self._seeds[engine.url] = stable_hash(engine.url)
        return seed


def stable_hash(text: str) -> int:
    """Return a number of 56 bits that is the same in every process. Numbers, and tuples of them,
    have no random hash in Python.

    A tuple's hash mixes its items one after the other. The score of an engine (`key ^ seed`, `key`)
    has both numbers in its first item: two engines whose seeds came last would keep the same
    distance for every key, and their shares would be uneven.
    """
    return int.from_bytes(
        blake2b(text.encode(errors="surrogatepass"), digest_size=7).digest(), "big"
    )
