"""The answer to `GET /ready`: whether a request could be served now, and what is wrong even if it could.

Owns the bounds of that answer: its sentences may hold text of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.kit.text import truncate
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.request.admission import Admission
from pdproxy.web.app import Readiness

MAX_DETAIL, MAX_DETAILS = 1000, 200
"""Characters of a sentence, and how many sentences there are."""
MAX_REASON = 20_000
"""Characters of the reason for not being ready, which names engines."""


class ReadinessCheck:
    """Call it for the answer. Each of `sources` returns sentences on what is wrong."""

    def __init__(self, admission: Admission, ledger: Ledger, sources: Sequence[Callable[[], Sequence[str]]]) -> None:
        self._admission = admission
        self._ledger = ledger
        self._sources = sources

    def __call__(self) -> Readiness:
        """Return whether a request could be served now."""
        reason = "shutting down" if self._admission.closed else self._ledger.not_ready()
        details = [detail for source in self._sources for detail in source()]
        shown = [truncate(detail, MAX_DETAIL) for detail in details[:MAX_DETAILS]]
        if len(details) > MAX_DETAILS:
            shown.append(f"and {len(details) - MAX_DETAILS} more")
        return Readiness(truncate(reason, MAX_REASON) if reason is not None else None, shown)


def ledger_source(ledger: Ledger, now: Callable[[], float]) -> Callable[[], Sequence[str]]:
    """Return the source of what is wrong with engines, at the time of each call."""
    return lambda: ledger.shortcomings(now())
