"""The legs of one worker, in the scheduler process: as they were told last, among the engines'
`open_legs`. Ending one is a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from pdproxy.fleet.open_legs import OpenLegs
from pdproxy.kit.errors import EngineError, EngineTimeoutError, StandstillError
from pdproxy.workers.calls import Answer, asked, told
from pdproxy.workers.leg_messages import End, EngineLegs, Shown, ToldLeg, ToldPush
from pdproxy.workers.scheduler_clients import Holder, SchedulerClient

AT_ONCE = 64
"""Questions of one worker that are worked on at the same time. The others wait."""
Named = tuple[int, float]
"""What names a leg or a push of a worker."""


class LegsAtWorker(Protocol):
    """What a worker is told of its legs in one pool."""

    @told
    def tell_legs(self, number: int, *, legs: bool) -> None:
        """Tell what its legs have shown: call `LegsOfWorker.tell` with this number. `legs`: whether
        the legs themselves are to be told, and not only what they have moved.
        """

    @told
    def end(self, url: str, legs: Sequence[End], pushes: Sequence[End]) -> None:
        """End legs at one engine, and pushes that are lost."""


class LegOfWorker:
    """A worker's open leg, as it was told last: a `fleet.open_legs.OpenLeg`."""

    __slots__ = ("_told", "_worker", "prompt_bytes", "since", "stalled_before", "url", "waits_for")
    in_silence = False
    """Its worker looks after that."""

    def __init__(self, worker: LegsOfWorker, url: str, told: ToldLeg) -> None:
        self._worker = worker
        self.url = url
        self.take(told)

    def __repr__(self) -> str:
        return f"<LegOfWorker at {self.url}, {self._told!r}>"

    def take(self, told: ToldLeg) -> None:
        """Take what was told of it now."""
        self._told = told
        self.since, self.prompt_bytes = told.since, told.prompt_bytes
        self.stalled_before, self.waits_for = told.stalled_before, told.waits_for

    def last_sign(self) -> float:
        """See `OpenLeg`."""
        return self._told.last_sign

    phase = ""  # only traces ask for that, in the worker

    @property
    def is_counted(self) -> bool:
        """See `OpenLeg`. Its engine may have ended it, and a worker that is stopped has not seen
        it.
        """
        return self._told.is_counted and not self._worker.is_late

    @property
    def must_progress(self) -> bool:
        """See `OpenLeg`. A worker that is stopped reads nothing."""
        return self._told.must_progress and not self._worker.is_late

    def source_lost(self, why: str) -> None:
        """See `OpenLeg`."""
        self._worker.end(self, End(self._told.number, self.since, why, of_source=True))

    def fail(self, error: EngineError) -> None:
        """See `OpenLeg`."""
        wait = error.wait.value if isinstance(error, EngineTimeoutError) else None
        cause = isinstance(error, StandstillError) and error.may_be_cause
        self._worker.end(self, End(self._told.number, self.since, error.message, wait, cause))


class PushToWorker:
    """A push that a worker's leg awaits: a `serving.kv.lost_pushes.AwaitedPush`."""

    __slots__ = ("_number", "_worker", "decode", "prefill", "promised", "since")

    def __init__(self, worker: LegsOfWorker, decode: str, told: ToldPush) -> None:
        self._worker = worker
        self._number = told.number
        self.decode: str | None = decode
        self.prefill, self.since = told.prefill, told.since
        self.promised = told.promised

    def __repr__(self) -> str:
        return f"<PushToWorker from {self.prefill} to {self.decode}>"

    def push_lost(self) -> None:
        """See `AwaitedPush`."""
        why = f"{self.prefill} was lost before it had pushed the KV"
        self._worker.end(self, End(self._number, self.since, why))


class Legs(Protocol):
    """Those of all workers in one pool: what a worker tells, and asks, goes there."""

    def tell(self, worker: LegsOfWorker, number: int, engines: Sequence[EngineLegs]) -> None:
        """See `LegsOfWorker.tell`."""

    async def may_wait(self, worker: LegsOfWorker, url: str, wait: str, push: Named | None) -> bool:
        """See `LegsOfWorker.may_wait`."""

    def left(self, worker: LegsOfWorker) -> None:
        """The worker has ended."""


class LegsOfWorker(Holder):
    """What one worker has told, in the pool with number `pool`."""

    def __init__(self, of_all: Legs, client: SchedulerClient, pool: int) -> None:
        self._of_all = of_all
        self._client = client
        self._pool = pool
        self.loading: dict[str, int] = {}
        """The prompt tokens whose KV is loading, by engines."""
        self.legs: dict[str, dict[Named, LegOfWorker]] = {}
        """Its open legs, by engines."""
        self.pushes: dict[str, dict[Named, PushToWorker]] = {}
        """The pushes that they await, by decode engines."""
        self.is_late = False
        """Whether it has not answered in time."""
        self.at_once = asyncio.Semaphore(AT_ONCE)
        self._ends: dict[str, tuple[list[End], list[End]]] = {}
        """What is to end, by engines: legs and pushes."""
        client.hold(self)
        client.serve(LegsOfWorker, self, pool)

    def __repr__(self) -> str:
        return f"<LegsOfWorker {self.legs!r}>"

    def close(self) -> None:
        """See `Holder`."""
        self._of_all.left(self)

    # -- what the worker calls

    @told
    def tell(self, number: int, engines: Sequence[EngineLegs]) -> None:
        """Take what its legs have shown. Of engines that it does not name nothing has changed.
        `number`: of `LegsAtWorker.tell_legs`; 0 comes by itself, from a worker that is asked from
        now on.
        """
        self._of_all.tell(self, number, engines)

    @asked
    def may_wait(self, number: int, url: str, wait: str, push: Named | None) -> Answer[bool]:
        """Return whether a leg at an engine may go on waiting behind its deadline. `wait`: which;
        or `push`, if that may be lost.
        """
        return self._of_all.may_wait(self, url, wait, push)

    # -- what it has told

    def ask(self, number: int, *, legs: bool) -> None:
        """Have it tell: see `LegsAtWorker`."""
        self._client.tell(LegsAtWorker.tell_legs, self._pool, number, legs=legs)

    def moved(self, one: EngineLegs) -> None:
        """Add what has moved."""
        left = self.loading.pop(one.url, 0) + one.loading
        if left:
            self.loading[one.url] = left

    def show(self, url: str, open_legs: OpenLegs, shown: Shown) -> None:
        """Take what its legs at an engine show now. `open_legs`: those of the engine."""
        before, pushes = self.legs.pop(url, {}), self.pushes.pop(url, {})
        legs: dict[Named, LegOfWorker] = {}
        for one in shown.legs:
            name = one.number, one.since
            leg = before.pop(name, None)
            if leg is None:
                leg = LegOfWorker(self, url, one)
            else:
                leg.take(one)
            legs[name] = leg
        for leg in before.values():
            open_legs.legs.pop(leg, None)
        if legs:
            self.legs[url] = legs
            busy_since = min(open_legs.busy_since, shown.busy_since)
            open_legs.busy_since = busy_since if open_legs.legs else shown.busy_since
            open_legs.legs.update(dict.fromkeys(legs.values()))
        open_legs.last_sign = max(open_legs.last_sign, shown.last_sign)
        for prompt_bytes, seconds in shown.prefilled:
            open_legs.pace.prefilled(prompt_bytes, seconds)
        if shown.pushes:
            self.pushes[url] = {
                (told.number, told.since): self._push(url, told, pushes) for told in shown.pushes
            }

    def _push(self, url: str, told: ToldPush, before: dict[Named, PushToWorker]) -> PushToWorker:
        push = before.get((told.number, told.since))
        if push is None:
            return PushToWorker(self, url, told)
        push.promised = told.promised
        return push

    def push(self, name: Named) -> PushToWorker | None:
        """Return an awaited push, None if it is over."""
        return next((found[name] for found in self.pushes.values() if name in found), None)

    def end(self, what: LegOfWorker | PushToWorker, end: End) -> None:
        """Have the worker end a leg, in the order of these calls."""
        if not self._ends:
            asyncio.get_running_loop().call_soon(self._send_ends)
        url = what.url if isinstance(what, LegOfWorker) else what.decode or ""
        legs, pushes = self._ends.setdefault(url, ([], []))
        (legs if isinstance(what, LegOfWorker) else pushes).append(end)

    def _send_ends(self) -> None:
        ends, self._ends = self._ends, {}
        for url, (legs, pushes) in ends.items():
            self._client.tell(LegsAtWorker.end, self._pool, url, legs, pushes)
