"""What a placement is: it decides for a request whether one engine serves it whole, or which two
share the work.

Without one, a pool splits every prompt that can be split, and the policies of the roles rank the
engines. A placement decides both at once. The ledger decides which engines may take part, leases
what was chosen, and reports what became of it. All methods are called in the event loop and must
return at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import msgspec

from pdproxy.observe.weighed import Weighed
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.slo import Slo


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The engines that may serve a request: up, serving its model, not excluded, and none whose
    breaker is open if others exist.

    `whole`: those that may serve it whole. `prefill` and `decode`: those that may share the work,
    none of them full; both empty where the prompt must not be split. `compatible(prefill, decode)`:
    whether these two may. The same object comes again until an engine changed, so a placement can
    keep what it computes for one.
    """

    whole: tuple[LedgerEngine, ...]
    prefill: tuple[LedgerEngine, ...]
    decode: tuple[LedgerEngine, ...]
    compatible: Callable[[LedgerEngine, LedgerEngine], bool]

    @property
    def engines(self) -> tuple[LedgerEngine, ...]:
        """All of them; one may come twice."""
        return (*self.whole, *self.prefill, *self.decode)

    @property
    def can_serve(self) -> bool:
        """Whether one of them may serve whole, or two may share the work."""
        if self.whole:
            return True
        return any(self.compatible(*pair) for pair in product(self.prefill, self.decode))

    def only(self, fits: Callable[[LedgerEngine], bool]) -> Candidates:
        """Return those that fit."""
        some = (self.whole, self.prefill, self.decode)
        whole, prefill, decode = (tuple(filter(fits, engines)) for engines in some)
        return Candidates(whole, prefill, decode, self.compatible)


class Placed(msgspec.Struct, frozen=True):
    """A decision: one engine, or a prefill and a decode engine. `reason` is one of a few words,
    `weighed` what it was based on.
    """

    engines: tuple[LedgerEngine] | tuple[LedgerEngine, LedgerEngine]
    reason: str
    weighed: Weighed | None = None


@dataclass(frozen=True, slots=True)
class PlacementState:
    """How well a placement predicts, and what it has decided for longer than a request.

    `errors`: by `ttft` and `tpot`, and by `whole` and `split`: the mean of (measured - predicted) /
    predicted lately, and of its size. `corrections`: by an engine's URL and `prefill` or `step`:
    what its predicted times are multiplied by. `kept`: engines that are kept for prefill. `late`:
    by URL, how many times as long as predicted prompts take at an engine where enough were
    measured.
    """

    errors: Mapping[tuple[str, str], tuple[float, float]]
    corrections: Mapping[tuple[str, str], float]
    kept: int
    late: Mapping[str, float] = field(default_factory=dict)


class NotYetError(Exception):
    """No engine should begin a request yet: it waits, is placed again at `at`, and begins at
    `until` at the latest, both in monotonic seconds.
    """

    def __init__(self, at: float, until: float) -> None:
        super().__init__(at, until)
        self.at, self.until = at, until


class Placement(ABC):
    """Decides which engines serve a request. Engines are read only."""

    @abstractmethod
    def place(self, ask: Ask, candidates: Candidates) -> Placed | None:
        """Return the engines for a request. None: none of the candidates, although there are some;
        the request is refused.

        Raises:
            NotYetError: the request waits. The next `Ask` of it says how long it has waited; the
                placement sees to it that this has an end.
        """

    def opened(self, lease: Lease, ask: Ask) -> None:
        """A lease was opened, whether this placement chose the engine or not. `lease.role` is what
        the engine does.
        """
        return

    def began(self, lease: Lease, now: float) -> None:
        """The engine of a lease has made its first token for the client, at `now`. Not reported of
        prefill leases: they end.
        """
        return

    def closed(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None) -> None:
        """A lease was closed. `tokens`: how many the client got from this engine, None where
        unknown.
        """
        return

    def engines_changed(self, engines: Sequence[LedgerEngine]) -> None:
        """An engine came up, went down or changed. `engines`: all of the pool."""
        return

    def configure(self, slo: Slo, *, refuses: bool) -> None:
        """Have another objective for the pool. `refuses`: whether a request is refused that can't
        be served within it.
        """
        return

    def use_replicas(self, replicas: int) -> None:
        """Note how many proxies the engines have now, if there may be several."""
        return

    def status(self, now: float) -> str | None:
        """Return what an operator should know, such as that nothing was measured yet; None:
        nothing. `now`: in monotonic seconds.
        """
        return None

    def state(self) -> PlacementState | None:
        """Return its numbers for operators, None if it has none."""
        return None
