"""The answer to `GET /ready`: whether a request could be served now, and what is wrong even if it could.

Owns the three states, and the bounds of that answer: its sentences may hold text of engines.

    ok         requests are served; where the pool has prefill engines, prompts can be split. Status 200
    degraded   requests are served, and none can be split: no prefill engine can be used with any decode engine. Status 200
    not_ready  no request can be served: at the start, at the end, without an engine that answers, without a valid key. Status 503
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.kit.text import truncate
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.request.admission import Admission
from pdproxy.web.app import Readiness, State

MAX_DETAIL, MAX_DETAILS = 1000, 200
"""Characters of a sentence, and how many sentences there are."""
MAX_REASON = 20_000
"""Characters of the reason for not being ready, which names engines."""


class ReadinessCheck:
    """Call it for the answer. Each of `sources` returns sentences on what is wrong; `why_no_key`: why no client is accepted."""

    def __init__(
        self,
        admission: Admission,
        ledger: Ledger,
        now: Callable[[], float],
        why_no_key: Callable[[], str | None],
        sources: Sequence[Callable[[], Sequence[str]]],
    ) -> None:
        self._admission = admission
        self._ledger = ledger
        self._now = now
        self._why_no_key = why_no_key
        self._sources = list(sources)

    def show(self, source: Callable[[], Sequence[str]]) -> None:
        """Show what one more source says is wrong."""
        self._sources.append(source)

    def state(self) -> State:
        """Return the state, without its reasons."""
        if self._why_not() is not None:
            return State.NOT_READY
        return State.OK if self._ledger.why_degraded(self._now()) is None else State.DEGRADED

    def _why_not(self) -> str | None:
        return "shutting down" if self._admission.closed else self._why_no_key() or self._ledger.not_ready()

    def __call__(self) -> Readiness:
        """Return whether a request could be served now."""
        reason = self._why_not()
        degraded = self._ledger.why_degraded(self._now()) if reason is None else None
        details = [detail for source in self._sources for detail in source()]
        if degraded is not None:
            details.insert(0, degraded)
        shown = [truncate(detail, MAX_DETAIL) for detail in details[:MAX_DETAILS]]
        if len(details) > MAX_DETAILS:
            shown.append(f"and {len(details) - MAX_DETAILS} more")
        if reason is not None:
            return Readiness(State.NOT_READY, truncate(reason, MAX_REASON), shown)
        return Readiness(State.OK if degraded is None else State.DEGRADED, None, shown)


def ledger_source(ledger: Ledger, now: Callable[[], float]) -> Callable[[], Sequence[str]]:
    """Return the source of what is wrong with engines, at the time of each call."""
    return lambda: ledger.shortcomings(now())
