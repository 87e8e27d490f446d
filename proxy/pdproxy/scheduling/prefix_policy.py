"""The policy `prefix`: the engine that has most of the prompt in its cache, weighed against its
load.

An engine's score is `matched / prompt - (requests - mean) / max(1, mean)`: the part of the prompt
that need not be computed, less its requests beyond the mean of all engines, in units of that mean.
It is the score `loadaware` of vLLM's production-stack. It has no weight to set: a prompt that is
cached as a whole outweighs twice the mean load and no more, so a prefix that everybody uses spreads
over as many engines as its load needs, and each of them then has it. Below a mean of one request,
one request more counts as much as the whole prompt: an idle engine is not left idle. Requests are
counted in both roles: prompt bytes, by which `least_load` chooses prefill engines, differ between
prompts by orders of magnitude, and one long prompt would outweigh every match.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.least_load import LeastLoad
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import Ask, Best, Cached, Policy


class Prefix(Policy):
    """`cached`: the index of prefixes; None: there is none. Prompts that no engine has a part of go
    by `least_load`.
    """

    needs_details = True

    def __init__(self, role: Role, cached: Cached | None) -> None:
        self._cached = cached
        self._least_load = LeastLoad(role)
        self._turn = 0

    def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        """See `Policy`. Engines with the same score are in the order of `least_load`."""
        ranked = self._least_load.rank(ask, engines)
        prompt = _tokens(ask)
        if self._cached is None or not prompt:
            return ranked
        matched = self._cached(ask)
        if not matched:
            return ranked
        mean = sum([engine.requests for engine in ranked]) / len(ranked)
        unit = max(1.0, mean)
        return sorted(
            ranked,
            key=lambda n: (n.requests - mean) / unit - min(matched.get(n.url, 0), prompt) / prompt,
        )

    def best_of(self, engines: Sequence[LedgerEngine]) -> Best:
        """See `Policy`. Only engines that have a part of the prompt, and one with the fewest
        requests, can be the best.
        """
        cached, least_loaded, count = self._cached, self._least_load.best_of(engines), len(engines)
        places = {engine.url: engine for engine in engines}

        def best(ask: Ask) -> LedgerEngine:
            prompt = _tokens(ask)
            matched = {} if cached is None or not prompt else cached(ask)
            if not matched or not prompt:
                return least_loaded(ask)
            requests = [engine.requests for engine in engines]
            mean, fewest = sum(requests) / count, min(requests)
            self._turn += 1
            turn = self._turn % count
            at = (
                requests.index(fewest, turn)
                if fewest in requests[turn:]
                else requests.index(fewest)
            )
            best, unit = engines[at], max(1.0, mean)
            score = (fewest - mean) / unit
            for url, tokens in matched.items():
                engine = places.get(url)
                if engine is None:
                    continue
                of_engine = (engine.requests - mean) / unit - min(tokens, prompt) / prompt
                if of_engine < score:
                    best, score = engine, of_engine
            return best

        return best

    def engines_changed(self) -> None:
        """See `Policy`."""
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

    def status(self) -> str | None:
        """See `Policy`."""
        if self._cached is not None:
            return None
        return (
            "policy prefix: nothing is known of the engines' caches, so it chooses as least_load "
            "does"
        )


def _tokens(ask: Ask) -> int | None:
    """Return a prompt's tokens, as the index estimates them if they are not known."""
    return ask.tokens or (None if ask.beginning is None else ask.beginning.tokens)
