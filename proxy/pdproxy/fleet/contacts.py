"""Pairs of engines between which KV has moved: before the first time, what one reports to the
other may be late.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdproxy.fleet.engine import Engine

FIRST_CONTACT = 1.0
"""Seconds between two tries. A decode engine that has never pulled from a prefill engine must first
make a handshake with it. It reports the release in a step after the handshake, and an idle engine
has no steps: a second request causes one.
"""
MIN_CONTACTS = 64
"""Pairs of engines that are kept before any of earlier runs is dropped."""


class Contacts:
    """Pairs of runs of engines between which KV has moved. A run is that of the asking: a notice
    may come behind a restart.

    `engines`: those that are known. Pairs of earlier runs and of other engines are dropped from
    time to time.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._pairs: set[tuple[int, int]] = set()
        self._drop_at = MIN_CONTACTS

    def __repr__(self) -> str:
        return f"<Contacts {len(self._pairs)} pairs>"

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """The pairs, of earlier runs, too."""
        return frozenset(self._pairs)

    def met(self, prefill: int | None, decode: int | None) -> bool:
        """Return whether KV has moved between two runs."""
        return (prefill, decode) in self._pairs

    def add(self, prefill: int | None, decode: int | None) -> None:
        """Record that KV has moved between two runs. One that is not known (None) is no pair."""
        if prefill is None or decode is None or (prefill, decode) in self._pairs:
            return
        self._pairs.add((prefill, decode))
        if len(self._pairs) >= self._drop_at:
            self._sweep()

    def forget(self, url: str) -> None:
        """Forget an engine that is not known any more."""
        self._sweep()

    def _sweep(self) -> None:
        """Drop the pairs of earlier runs, and of engines that are not known any more."""
        runs = {engine.in_ledger.run_number for engine in self._engines.values()}
        self._pairs = {pair for pair in self._pairs if runs.issuperset(pair)}
        self._drop_at = max(MIN_CONTACTS, 2 * len(self._pairs))
