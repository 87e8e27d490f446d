"""Numbers of the engines' runs. An engine that is removed and comes back without a restart is in
the run that it was in.
"""

from __future__ import annotations

import itertools

from pdproxy.scheduling.ledger_engine import Evidence, LedgerEngine

MAX_REMOVED = 1024
"""Removed engines whose run is kept: the latest ones."""


class RunNumbers:
    """Gives each run of each engine a number of its own, later ones higher numbers."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._removed: dict[str, tuple[float, int]] = {}
        """By URL: when the engine was started, in Unix seconds, and the number of its run."""

    def __repr__(self) -> str:
        return f"<Runs of {len(self._removed)} removed engines>"

    def next(self) -> int:
        """Return the number of a new run."""
        return next(self._numbers)

    def removed(self, engine: LedgerEngine) -> None:
        """Keep the run of an engine that is removed, if the engine has said when it was started."""
        if engine.evidence is None or not engine.evidence.started:
            # if it has answered no probe since it was added, what was kept before still holds
            return
        self._removed.pop(engine.url, None)
        self._removed[engine.url] = engine.evidence.started, engine.run_number
        while len(self._removed) > MAX_REMOVED:
            del self._removed[next(iter(self._removed))]

    def forget(self, url: str) -> None:
        """Forget a removed engine: nothing there waits for what its present process has."""
        self._removed.pop(url, None)

    def of(self, engine: LedgerEngine, evidence: Evidence) -> int:
        """Return the number of another run than `engine` was in before, where `evidence` is the
        first that is known of it.
        """
        started, number = self._removed.pop(engine.url, (0.0, 0))
        return (
            number
            if engine.evidence is None and started and started == evidence.started
            else self.next()
        )
