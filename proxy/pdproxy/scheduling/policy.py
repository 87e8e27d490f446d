"""What a scheduling policy is: it ranks the engines that may serve a request.

The ledger decides which engines may serve it, and does all the bookkeeping. A policy belongs to one
role. All its methods are called in the event loop and must return at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.prefix.prompts import PromptBeginning
from pdproxy.scheduling.slo import Slo


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What a request asks of the scheduler. Made for each choice, and not kept.

    `model`: None matches every engine. `prompt_bytes`: the prompt's size, as prefill load. `now`:
    monotonic seconds. `tokens`: the prompt's tokens, None while unknown. `spares_decode`: no engine
    of role decode may serve it whole.

    The rest is only there for policies and placements that need details. `keys`: what an index of
    prefixes knows the prompt by, empty where there is none. `session`: what the requests of one
    conversation have in common, None where it is unknown. `slo`: the bounds that the request's
    client has named itself, None if it has named none. `beginning`: the prompt as the proxy's own
    index knows it, with what that has found; None where nothing asks the index. `limit`: how many
    tokens its answer may have, None while unknown. `is_silent`: nothing may be seen of its answer
    before its end. `waited`: seconds since it came, of one that a placement had wait; infinite: it
    waits no more.
    """

    model: str | None
    prompt_bytes: int
    now: float
    tokens: int | None = None
    spares_decode: bool = False
    keys: Sequence[int] = ()
    session: str | None = None
    slo: Slo | None = None
    beginning: PromptBeginning | None = None
    limit: int | None = None
    is_silent: bool = False
    waited: float = 0.0


Best = Callable[[Ask], LedgerEngine]
"""Returns the best of a fixed set of engines for a request."""


class Policy(ABC):
    """Ranks engines of one role. Subclasses must define `rank`; everything else has a default.

    Engines are read only. Their counters (`requests`, `prompt_bytes`) are up to date in every call.
    """

    needs_details = False
    """Whether it reads what `Ask` has only for those that do, or its tokens."""

    @abstractmethod
    def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        """Return `engines`, two or more, with the best for this request first."""

    def best_of(self, engines: Sequence[LedgerEngine]) -> Best:
        """Return a function whose result is what `rank` would put first among `engines`, two or
        more.

        It serves most requests, and is in use until `engines_changed`: a policy can prepare what
        makes it fast.
        """
        return lambda ask: self.rank(ask, engines)[0]

    def engines_changed(self) -> None:
        """An engine came up, went down or changed. No function that `best_of` returned before is
        called again.
        """
        return

    def forget(self, engine: LedgerEngine) -> None:
        """An engine was removed: it gets no more leases. Those that are open are closed later."""
        return

    def opened(self, lease: Lease, ask: Ask) -> None:
        """A lease was opened on an engine of this role, whether this policy chose it or not."""
        return

    def closed(self, lease: Lease, verdict: Verdict, now: float) -> None:
        """A lease on an engine of this role was closed, at `now` in monotonic seconds."""
        return

    def load_changed(self, engine: LedgerEngine) -> None:
        """The counters of an engine have changed otherwise: other replicas are estimated to have
        more there, or less.
        """
        return

    def status(self) -> str | None:
        """Return what an operator should know, such as that the policy lacks what it ranks by;
        None: nothing.
        """
        return None


class Turns:
    """Has engines that a policy ranks alike take turns: a stable sort of `of(engines)` puts another
    one of them first each time. A policy without turns sends all its first requests to one engine.
    """

    def __init__(self) -> None:
        self._number = 0

    def of(self, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        """Return the engines, beginning one further than at the last call."""
        self._number += 1
        turn = self._number % len(engines)
        return [*engines[turn:], *engines[:turn]]


Cached = Callable[[Ask], Mapping[str, int]]
"""Returns how many tokens of a request's prompt engines should have in their caches, by URL; those
without may be left out.
"""


def no_chance() -> float:
    """Stand for a source of chance where none was given.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("this policy needs a source of chance")


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is made of. `role`: whose engines it ranks. `chance`: returns a number from 0
    to 1, without 1.

    `cached`: the index of prefixes, None where there is none.
    """

    role: Role
    chance: Callable[[], float] = no_chance
    cached: Cached | None = None


PolicyFactory = Callable[[PolicyContext], Policy]
"""Makes the policy for a role."""
