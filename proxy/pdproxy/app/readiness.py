"""The answer to `GET /ready`: whether a request could be served now, and what is wrong even if it
could.

Owns the three states, and the bounds of that answer: its sentences may hold text of engines.

    ok         requests are served; where the pool has prefill engines, prompts can be split. Status
               200
    degraded   requests are served, and none can be split: no prefill engine can be used with any
               decode engine. Status 200
    not_ready  no request can be served: at the start, at the end, without an engine that answers,
               without a valid key. Status 503
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdproxy.kit.text import truncate
from pdproxy.observe.prompt_shares import PromptShares
from pdproxy.scheduling.admission import Admission
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.web.operation import OperationState, Readiness

MAX_DETAIL, MAX_DETAILS = 1000, 200
"""Characters of a sentence, and how many sentences there are."""
MAX_REASON = 20_000
"""Characters of the reason for not being ready, which names engines."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """What is known of one pool. `shortcomings`: each returns sentences on what is wrong with it;
    `weight`: see its settings.
    """

    name: str
    ledger: Ledger
    shares: PromptShares
    shortcomings: Sequence[Callable[[], Sequence[str]]]
    weight: Callable[[], float]


class ReadinessCheck:
    """Call it for the answer. Each of `sources` returns sentences on what is wrong; `why_no_key`:
    why no client is accepted.

    With several pools: `ok` if every pool with a weight is, `not_ready` if none is, else
    `degraded`.
    """

    def __init__(
        self,
        admission: Admission,
        pools: Sequence[PoolState],
        now: Callable[[], float],
        why_no_key: Callable[[], str | None],
        sources: Sequence[Callable[[], Sequence[str]]],
    ) -> None:
        self._admission = admission
        self._pools = pools
        self._now = now
        self._why_no_key = why_no_key
        self._sources = list(sources)
        self.leaving = False
        """Whether the process is about to stop."""
        self.why_starting: Callable[[], str | None] = lambda: None
        """Returns why this process can't know yet which engines there are, None if it can."""

    def show(self, source: Callable[[], Sequence[str]]) -> None:
        """Show what one more source says is wrong."""
        self._sources.append(source)

    def state(self) -> OperationState:
        """Return the state, without its reasons."""
        if self._why_not() is not None:
            return OperationState.NOT_READY
        return OperationState.DEGRADED if self._why_degraded() else OperationState.OK

    def not_taking(self) -> str | None:
        """Return why this process takes no requests, whatever its engines do: for balancers. None:
        it takes some.

        At the start nobody gets an answer before the engines were probed. One that knows no engine
        takes requests, too: other proxies know none either, unless a source has not answered this
        one yet.
        """
        if self.leaving or self._admission.closed:
            return "shutting down"
        return self._why_no_key() or self.why_starting()

    def engines(self) -> tuple[int, int]:
        """Return how many engines make KV for others, and how many use it."""
        roles = [engine.role for pool in self._pools for engine in pool.ledger.engines]
        makes, uses = (Role.PREFILL, Role.ANY), (Role.DECODE, Role.ANY)
        return sum(role in makes for role in roles), sum(role in uses for role in roles)

    def _why_not(self) -> str | None:
        if self.leaving or self._admission.closed:
            return "shutting down"
        reasons = [pool.ledger.not_ready() for pool in self._pools]
        if (reason := self._why_no_key()) is not None or None in reasons:
            return reason
        return "; ".join(
            self._of(pool, reason)
            for pool, reason in zip(self._pools, reasons, strict=True)
            if reason
        )

    def _why_degraded(self) -> list[str]:
        """Return why some requests can't be served, or not split, a sentence for each pool with a
        weight.
        """
        found = []
        for pool in self._pools:
            if pool.weight() or len(self._pools) == 1:
                reason = pool.ledger.not_ready() or pool.ledger.why_degraded(self._now())
                found += [self._of(pool, reason)] if reason is not None else []
        return found

    def _of(self, pool: PoolState, text: str) -> str:
        return text if len(self._pools) == 1 else f"pool {pool.name}: {text}"

    def __call__(self) -> Readiness:
        """Return whether a request could be served now. What is wrong with how prompts are served
        is not in it: see `judged`.
        """
        reason = self._why_not()
        details = self._why_degraded() if reason is None else []
        is_degraded = bool(details)
        for pool in self._pools:
            details += [
                self._of(pool, detail) for source in pool.shortcomings for detail in source()
            ]
        details += [detail for source in self._sources for detail in source()]
        shown = [truncate(detail, MAX_DETAIL) for detail in details[:MAX_DETAILS]]
        if len(details) > MAX_DETAILS:
            shown.append(f"and {len(details) - MAX_DETAILS} more")
        prompts = {pool.name: pool.shares.window() for pool in self._pools}
        if reason is not None:
            return Readiness(OperationState.NOT_READY, truncate(reason, MAX_REASON), shown, prompts)
        state = OperationState.DEGRADED if is_degraded else OperationState.OK
        return Readiness(state, None, shown, prompts)


def judged(found: Readiness) -> Readiness:
    """Return the same with what is wrong with how prompts are served: a process that serves alone
    knows all of them, and several workers only together.
    """
    wrong = [
        text if len(found.prompts) == 1 else f"pool {name}: {text}"
        for name, served in found.prompts.items()
        if (text := served.problem()) is not None
    ]
    return replace(found, details=[*found.details, *wrong]) if wrong else found


def ledger_source(ledger: Ledger, now: Callable[[], float]) -> Callable[[], Sequence[str]]:
    """Return the source of what is wrong with engines, at the time of each call."""
    return lambda: ledger.shortcomings(now())
