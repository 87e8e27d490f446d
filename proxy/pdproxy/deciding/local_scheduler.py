"""The scheduler of one pool, for requests of the same process.

Owns no state: engines and leases are the ledger's. Between a choice and its leases there is no
`await`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs

from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.turns import PoolTurns
from pdproxy.fleet.slow_engines import SlowEngines
from pdproxy.fleet.transfers import Transfers
from pdproxy.kit.errors import TooLateError
from pdproxy.observe.description import Label, MergeRule, counter, gauge
from pdproxy.observe.events import Decided, NodeChanged, Observers
from pdproxy.scheduling.decisions import LATE, REFUSED, Decision, Decisions, choice_of
from pdproxy.scheduling.leases import FAILED, GOOD, NEUTRAL, Assignment, Lease, Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import DECODE, ENCODE, PREFILL, LedgerEngine, Role
from pdproxy.scheduling.outliers import Outliers
from pdproxy.scheduling.placement import NotYetError
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.prefix.knowledge import Knowledge
from pdproxy.scheduling.prefix.prompts import PromptBeginning
from pdproxy.scheduling.scheduler import ANY, Constraints

PAIR = (Role.PREFILL, Role.DECODE)
"""The roles that a split prompt needs an engine of. The last one answers the client."""
_ENCODERS = (ENCODE,)
CHOICES = (
    ("whole", "one engine serves the request"),
    ("split", "a prefill and a decode engine share the work"),
    ("refused", "503: no engine can serve it in time (policy.refuse_late)"),
)
MAX_REASONS = 32
"""How many reasons are labels. Further ones are counted as "other": a placement has a few."""
DECISIONS = counter(
    "pdproxy_decisions_total",
    "decisions",
    "Decisions of the pool's placement (policy.placement); a request has one for each attempt",
    Label("choice", CHOICES),
    Label(
        "reason",
        text="the placement's reason, one of a few words of its own; or late: no engine could "
        "serve it in time, so it was refused or has waited",
        most=MAX_REASONS,
    ),
    of=Decided,
)

WAITING_LATE = gauge(
    "pdproxy_waiting_late",
    "requests",
    "Requests that the pool's placement has wait, because no engine could begin them within their "
    "objective",
    workers=MergeRule.SUM,
)


class LocalScheduler:
    """A `scheduling.scheduler.Scheduler` that is called. `decisions`: where they are kept, None
    where nobody is shown them. `knowledge`: of engines' caches, None where nothing asks for it.
    `turns`: those that are kept, None where none are.
    """

    def __init__(
        self,
        ledger: Ledger,
        outliers: Outliers,
        buffers: ReceiveBuffers,
        transfers: Transfers,
        observers: Observers,
        now: Callable[[], float],
        decisions: Decisions | None,
        knowledge: Knowledge | None,
        turns: PoolTurns | None = None,
        slow: SlowEngines | None = None,
    ) -> None:
        self._ledger = ledger
        self._outliers = outliers
        self._buffers = buffers
        self._transfers = transfers
        self._observers = observers
        self._now = now
        self._decisions = decisions
        self._knowledge = knowledge
        self._turns = turns
        self._slow = slow
        self._late = asyncio.Lock()
        """What has to wait waits for its turn, so that one request at a time is placed again."""
        self._waiting_late = 0
        observers.show(WAITING_LATE, lambda: [((), self._waiting_late)])

    def __repr__(self) -> str:
        return f"<LocalScheduler {self._ledger!r}>"

    # -- choosing

    @property
    def waits(self) -> bool:
        """Whether a choice may have to wait."""
        return self._buffers.bounded

    async def choose(
        self,
        request_id: str,
        ask: Ask,
        constraints: Constraints = ANY,
        turn: bytes | None = None,
    ) -> Assignment | None:
        """See `Scheduler`."""
        try:
            return await self.choose_now(request_id, ask, constraints, turn)
        except NotYetError as later:
            return await self.choose_later(request_id, ask, constraints, turn, later)

    async def choose_later(
        self,
        request_id: str,
        ask: Ask,
        constraints: Constraints,
        turn: bytes | None,
        later: NotYetError,
    ) -> Assignment | None:
        """Do as `choose` once the placement lets the request begin. `later`: what it said.

        A request whose engine has failed begins now: its client has waited, or reads a stream. One
        whose turn comes too late does not wait for its turn: those before it may have longer.
        """
        begins = structs.replace(ask, waited=math.inf)
        if constraints.without or constraints.avoid:
            return await self.choose_now(request_id, begins, constraints, turn)
        self._waiting_late += 1
        try:
            try:
                async with asyncio.timeout(later.until - self._now()):
                    await self._late.acquire()
            except TimeoutError:
                begins = structs.replace(begins, now=self._now())
                return await self.choose_now(request_id, begins, constraints, turn)
            try:
                while True:
                    await asyncio.sleep(max(later.at - self._now(), 0.0))
                    now = self._now()
                    again = structs.replace(ask, now=now, waited=now - ask.now)
                    try:
                        return await self.choose_now(request_id, again, constraints, turn)
                    except NotYetError as again_later:
                        later = again_later
            finally:
                self._late.release()
        finally:
            self._waiting_late -= 1

    async def choose_now(
        self, request_id: str, ask: Ask, constraints: Constraints, turn: bytes | None
    ) -> Assignment | None:
        """Do as `choose`.

        Raises:
            NotYetError: the placement has the request wait (`choose_later`).
        """
        turns, near = self._turns, None
        if turn is not None and turns is not None and self._ledger.revisions.several:
            near = turns.kept.keeper(turn)
        if self._ledger.has_placement:
            chosen = await self._placed(request_id, ask, constraints, near)
        elif constraints.must_be_whole is not None:
            lease = self._one(ask, constraints.without, constraints.avoid)
            chosen = None if lease is None else Assignment((lease,))
        elif self._buffers.bounded:
            chosen = await self._with_space(ask, constraints, partial(self._pair, near=near))
        else:
            chosen = self._pair(ask, constraints.without, constraints.avoid, near)
        if chosen is not None and len(chosen.leases) == 1:
            self._look_beside(chosen.leases[0])
        if chosen is not None and ask.beginning is not None and self._knowledge is not None:
            self._knowledge.sent(ask.beginning, chosen.leases, self._now())
        if turn is not None and turns is not None and chosen is not None and len(chosen.leases) > 1:
            chosen.turn = turns.find(turn, chosen.leases[0].engine)
        return chosen

    def _pair(
        self, ask: Ask, without: Sequence[str], avoid: Sequence[str], near: str | None = None
    ) -> Assignment | None:
        """Lease a prefill and a decode engine. `near`: see `Ledger.assign`."""
        assign = self._ledger.assign
        if avoid:
            found = assign(PAIR, ask, without=(*without, *avoid), near=near)
            if found is not None:
                return found
        return assign(PAIR, ask, without=without, near=near)

    async def choose_one(
        self, ask: Ask, without: Sequence[str] = (), avoid: Sequence[str] = ()
    ) -> Lease | None:
        """See `Scheduler`."""
        lease = self._one(ask, without, avoid)
        if lease is not None:
            self._look_beside(lease)
        return lease

    def _look_beside(self, lease: Lease) -> None:
        """Note whether an engine for decode serves a whole request beside an idle one."""
        engine = lease.engine
        if engine.role is DECODE:
            lease.beside_idle = self._ledger.works_beside_idle(engine.url, lease.since)

    def _one(self, ask: Ask, without: Sequence[str], avoid: Sequence[str]) -> Lease | None:
        assign = self._ledger.assign_alone
        lease = assign(ask, without=(*without, *avoid)) if avoid else None
        # An engine that failed is better than no answer.
        return lease or assign(ask, without=without) or (assign(ask) if without else None)

    async def choose_encoders(
        self, asks: Sequence[Ask], without: Sequence[str], *, proven: bool
    ) -> list[Lease]:
        """See `Scheduler`."""
        leases: list[Lease] = []
        for ask in asks:
            poor = self._ledger.poor_encoders(ask.now) if proven else ()
            assignment = self._ledger.assign(_ENCODERS, ask, without=(*without, *poor))
            if assignment is None:
                break  # the others get none, either
            leases += assignment.leases
        return leases

    def fits(self, tokens: int) -> bool:
        """See `Scheduler`."""
        return not self._buffers.bounded or self._buffers.fits(tokens)

    # -- as the pool's placement chooses

    async def _placed(
        self, request_id: str, ask: Ask, constraints: Constraints, near: str | None
    ) -> Assignment | None:
        """Lease the engines that the placement chooses. `near`: see `Ledger.assign`. Raises as
        `choose`.
        """
        ledger, split = self._ledger, constraints.must_be_whole is None

        def place(ask: Ask, without: Sequence[str], avoid: Sequence[str]) -> Assignment | None:
            placed = ledger.place(ask, split=split, without=without, avoid=avoid, near=near)
            if placed is None and ledger.is_placeable(ask, split=split, without=without):
                self._decided(Decision(ask.now, request_id, REFUSED, LATE, tokens=ask.tokens))
                raise TooLateError("no engine can serve this request in time now")
            return placed

        placed = place(ask, constraints.without, constraints.avoid)
        if placed is not None and len(placed.leases) > 1 and self._buffers.bounded:
            # It waits behind other prompts, and is placed when its turn comes. What one engine
            # serves whole does not wait for them.
            self._give_up(placed)
            placed = await self._with_space(ask, constraints, place)
        if placed is not None:
            urls = tuple([lease.engine.url for lease in placed.leases])
            decision = Decision(
                self._now(),
                request_id,
                choice_of(urls),
                placed.reason,
                urls,
                constraints.must_be_whole,
                ask.tokens,
                placed.weighed,
            )
            self._decided(decision)
        return placed

    def _decided(self, decision: Decision) -> None:
        self._observers.notify(Decided(decision.choice, decision.reason))
        if self._decisions is not None:
            self._decisions.add(decision)

    # -- where receive buffers are bounded

    async def _with_space(
        self,
        ask: Ask,
        constraints: Constraints,
        choose: Callable[[Ask, Sequence[str], Sequence[str]], Assignment | None],
    ) -> Assignment | None:
        """Lease what `choose` leases. Wait until the decode engine has space for the prompt's KV.

        Raises:
            OverloadedError: no decode engine had space in time.
        """
        buffers, count = self._buffers, self._buffers.chunks(constraints.kv_tokens)
        without, avoid = constraints.without, constraints.avoid

        def chosen_now(excluded: Sequence[str]) -> Assignment | None:
            return choose(structs.replace(ask, now=self._now()), excluded, avoid)

        def choose_with_space(full: tuple[str, ...]) -> Assignment | None:
            chosen = chosen_now((*without, *full))
            if chosen is not None and len(chosen.leases) > 1:
                url = chosen.leases[-1].engine.url
                if url in full:  # a placement falls back to engines that are excluded
                    self._give_up(chosen)
                    return None
                chosen.space = buffers.take(url, count)
            return chosen

        def possible() -> bool:
            chosen = chosen_now(without)
            if chosen is not None:
                self._give_up(chosen)
            return chosen is not None

        return await buffers.wait_for_space(count, choose_with_space, possible)

    def _give_up(self, assignment: Assignment) -> None:
        now, wanted = self._now(), self._ledger.wanted
        for lease in assignment.leases:
            if wanted is not None:
                wanted.never_sent(lease)
            self.close(lease, NEUTRAL, now)

    # -- what engines have in their caches

    def measure(self, beginning: PromptBeginning) -> None:
        """Estimate the tokens of a text as answers have shown lately: another process knows only
        a first estimate.
        """
        if beginning.of_text and self._knowledge is not None:
            beginning.measure(self._knowledge.text_per_token)

    def counted(self, lease: Lease, prompt: int, cached: int | None) -> None:
        """See `Scheduler`."""
        if (wanted := self._ledger.wanted) is not None:
            wanted.counted(lease, prompt)
        if cached is not None and lease.prediction is not None and self._knowledge is not None:
            self._knowledge.answered(lease.prediction, cached, prompt)

    def prefilled(self, lease: Lease, tokens: int, seconds: float) -> None:
        """See `Scheduler`."""
        if self._turns is not None:
            self._turns.speeds.measured(lease.engine.run_number, tokens, seconds)

    def refuses_reports(self, url: str) -> None:
        """See `Scheduler`."""
        if self._knowledge is not None:
            self._knowledge.refuses_reports(url)

    # -- what legs show

    def began(self, lease: Lease, at: float) -> None:
        """See `Scheduler`."""
        self._ledger.began(lease, at)

    def close(
        self,
        lease: Lease,
        verdict: Verdict,
        at: float,
        *,
        pace: float | None = None,
        tokens: int | None = None,
        beside: int = 0,
    ) -> None:
        """See `Scheduler`."""
        engine = lease.engine
        if (failed := verdict is FAILED) or verdict is GOOD:
            seconds = None
            if lease.role is PREFILL:
                seconds, beside = at - lease.since, engine.requests
                if self._slow is not None and pace is not None:
                    self._slow.prefilled(engine.url, at, seconds, lease.prompt_bytes)
            self._outliers.ended(
                engine.url,
                lease.role,
                at,
                failed=failed,
                pace=None if failed else pace,
                seconds=seconds,
                beside=beside,
            )
        if self._ledger.close(lease, verdict, at, tokens):
            self._out_of_use(engine)

    def failed(self, lease: Lease, at: float) -> None:
        """See `Scheduler`."""
        self._outliers.ended(lease.engine.url, lease.role, at, failed=True)
        if self._ledger.failed(lease, at):
            self._out_of_use(lease.engine)

    def kv_took(self, prefill: str, decode: str, at: float, seconds: float) -> None:
        """See `Scheduler`."""
        if self._ledger.get(prefill) is not None and self._ledger.get(decode) is not None:
            if not self._ledger.has_placement:  # it loads engines unevenly: none is left out for it
                self._outliers.loaded(prefill, decode, at, seconds)
            if self._slow is not None:
                self._slow.kv_took(prefill, decode, at, seconds)

    def kv_failed(self, prefill: str, decode: str, at: float, *, first: bool = True) -> None:
        """See `Scheduler`."""
        self._transfers.failed(prefill, decode, at, first=first)

    def kv_not_made(self, prefill: str, at: float) -> None:
        """See `Scheduler`."""
        self._transfers.not_made(prefill, at)

    def kv_loaded(self, prefill: str, decode: str, since: float) -> None:
        """See `Scheduler`."""
        self._transfers.loaded(prefill, decode, since)

    def left_out(self, prefill: str, decode: str, failed: Sequence[tuple[str, str]]) -> str:
        """See `Scheduler`."""
        return self._ledger.left_out(prefill, decode, failed)

    def lost_model(self, url: str, model: str) -> None:
        """See `Scheduler`."""
        self._ledger.lost_model(url, model)

    def found_gone(self, url: str, why: str, at: float) -> None:
        """See `Scheduler`."""
        engine = self._ledger.get(url)
        if engine is not None and self._ledger.mark_down(url, why, at):
            self._out_of_use(engine)

    def _out_of_use(self, engine: LedgerEngine) -> None:
        reason, state = engine.down_because, "down"
        if reason is None:
            reason, state = (
                f"failed {engine.failures} times in a row: its breaker is open",
                "excluded",
            )
        self._observers.notify(
            NodeChanged(engine.url, engine.role.value, up=False, reason=reason, state=state)
        )
