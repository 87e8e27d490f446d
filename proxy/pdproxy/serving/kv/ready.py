"""Waits for the notices that KV is ready, and the notices that come before their wait.

Owns both. A wait is for one prefill leg, identified by an id that was made for it, and is over once
each of the engine's ranks has sent its notice. Early notices are kept, with limits on their time
and number. Notices of an id whose wait is over are late; early ones whose wait never begins expire
as unknown. Everything that is kept here has a limit, whatever is sent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import Wait
from pdproxy.observe.description import NODE, Label, MergeRule, counter, gauge, histogram
from pdproxy.observe.events import DeadlinePassed, KvNoticed, KvWaited, Observers
from pdproxy.wire.notices import Notice, NoticeEvent

KEPT = 4096
"""Early notices that are kept, and ids whose wait is over that are remembered."""
MAX_MISSING = 64
"""How many missing ranks are named: an engine decides how many ranks there are."""
KEPT_FOR = 30.0
"""Seconds for which both are kept. A notice comes milliseconds before or after the prefill's
answer.
"""
NOTICES = ("ready", "loaded", "failed", "released", "expired", "kept")
NOTICE_RESULTS = (
    ("awaited", "a prompt waited for it"),
    ("double", "its rank had sent one already"),
    ("early", "nothing waits for it yet"),
    ("late", "nothing waits for it any more"),
    ("unknown", "it was early, and nothing waited for it later"),
    ("undecodable", "it is not a notice"),
    ("known", "it is about a handle that has not ended"),
    ("over", "it is about a handle that has ended"),
    ("given_up", "its client had left, and the KV is released"),
    ("not_passed", "its worker had not read too many others"),
)
_READY_RESULTS = ("awaited", "double", "early", "late", "unknown")
_TOGETHER = (
    *(("ready", result) for result in _READY_RESULTS),
    *((event, result) for event in NOTICES for result in ("known", "over", "given_up")),
    *((event, "not_passed") for event in NOTICES),
    ("unknown", "undecodable"),
)
KV_NOTICES = counter(
    "pdproxy_kv_notices_total",
    "notices",
    "Notices of KV transfers, by what pdproxy did with them",
    Label(
        "event",
        (
            *((event, f"the engine's event {event}") for event in NOTICES),
            ("unknown", "not decodable"),
        ),
    ),
    Label("result", NOTICE_RESULTS),
    together=_TOGETHER,
    of=KvNoticed,
)
KV_NOTICES_KEPT = gauge(
    "pdproxy_kv_notices_kept",
    "notices",
    "Notices that nobody has waited for yet",
    workers=MergeRule.SUM,
)
KV_READY_WAITS = gauge(
    "pdproxy_kv_ready_waits", "prompts", "Prompts whose notices are expected", workers=MergeRule.SUM
)
KV_READY_WAIT = histogram(
    "pdproxy_kv_ready_wait_seconds",
    "Seconds from the prefill's answer to the last notice that its KV is ready; 0 if all came "
    "before",
    Label(
        "result",
        (("ready", "all ranks sent one"), ("timeout", "some did not before deadlines.kv_ready")),
    ),
    of=KvWaited,
    by="seconds",
)
MAX_RANKS = 64
"""Ranks of an engine that are labels."""
SILENT_RANKS = counter(
    "pdproxy_kv_silent_ranks_total",
    "notices",
    "Notices that did not come before deadlines.kv_ready, by the rank that did not send one",
    NODE,
    Label("rank", text='the rank\'s number; "unnamed" if notices name none, "more" after 64'),
    of=KvWaited,
    counts=lambda event: [
        ((event.node, rank if at < MAX_RANKS else "more"), 1)
        for at, rank in enumerate(event.missing)
    ],
)


class ExpectedNotices:
    """One wait for the notices of a prefill leg's ranks. It is over when all have come, or when it
    is closed.

    `ranks`: how many ranks send a notice; None: the notices state it, otherwise one. Of a rank that
    states its number, only the first notice counts. Notices without a rank's number count each.
    """

    __slots__ = ("_named", "_unnamed", "_where", "done", "leg_id", "notice", "ranks", "since")

    def __init__(self, where: ReadyWaits, leg_id: str, ranks: int | None, since: float) -> None:
        self._where = where
        self.leg_id = leg_id
        self.ranks = ranks
        self.since = since
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.notice: Notice | None = None
        """The last one."""
        self._named: set[int] = set()
        self._unnamed = 0

    def __repr__(self) -> str:
        return (
            f"<Expected {self.leg_id}, {len(self._named) + self._unnamed} of {self.ranks or '?'} "
            f"ranks received>"
        )

    def receive(self, notice: Notice) -> bool:
        """Count a notice. Return whether it was new."""
        self.notice = notice
        if self.ranks is None and notice.world is not None:
            self.ranks = notice.world
        if notice.rank is None:
            self._unnamed += 1
        elif notice.rank in self._named:
            return False
        else:
            self._named.add(notice.rank)
        if len(self._named) + self._unnamed >= (self.ranks or 1) and not self.done.done():
            self.done.set_result(None)
        return True

    def missing(self) -> list[str]:
        """Return the first missing ranks: their numbers if notices state numbers, otherwise
        "unnamed" for each.
        """
        ranks = min(self.ranks or 1, len(self._named) + self._unnamed + MAX_MISSING)
        missing = max(0, ranks - len(self._named) - self._unnamed)
        if self._unnamed or (not self._named and ranks > 1):
            return ["unnamed"] * missing
        return [str(rank) for rank in range(ranks) if rank not in self._named]

    def close(self) -> None:
        """End the wait. Notices that come from now on are late. Closing twice changes nothing."""
        self._where.over(self)


class ReadyWaits:
    """All waits of one proxy."""

    def __init__(self, clock: Clock, observers: Observers, now: Callable[[], float]) -> None:
        self._clock = clock
        self._observers = observers
        self._now = now
        self._expected: dict[str, ExpectedNotices] = {}
        self._early: OrderedDict[str, tuple[float, list[Notice]]] = OrderedDict()
        self._early_count = 0
        self._over: OrderedDict[str, float] = OrderedDict()
        observers.show(KV_READY_WAITS, lambda: [((), self.waiting)])
        observers.show(KV_NOTICES_KEPT, lambda: [((), self.kept)])

    def __repr__(self) -> str:
        return f"<KvReady {len(self._expected)} waits, {self._early_count} early notices>"

    @property
    def waiting(self) -> int:
        """Number of waits."""
        return len(self._expected)

    @property
    def kept(self) -> int:
        """Number of early notices that are kept."""
        return self._early_count

    def knows(self, leg_id: str) -> bool:
        """Return whether notices of a leg are expected here, or were."""
        return leg_id in self._expected or leg_id in self._over

    def expect(self, leg_id: str, ranks: int | None) -> ExpectedNotices:
        """Begin a wait. Call it before the leg is sent, and close what it returns."""
        expected = self._expected[leg_id] = ExpectedNotices(self, leg_id, ranks, self._now())
        _, early = self._early.pop(leg_id, (0.0, ()))
        self._early_count -= len(early)
        for notice in early:
            expected.receive(notice)
        return expected

    async def wait(self, expected: ExpectedNotices, timeout: float, engine: str) -> bool:
        """Wait until all ranks of `engine` have sent their notice, `timeout` seconds at most.
        Return whether they have.
        """
        begun = self._now()
        try:
            if not expected.done.done():
                with self._clock.within(timeout):
                    await asyncio.shield(expected.done)
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.KV_READY.value, engine))
            self._observers.notify(
                KvWaited(engine, "timeout", self._now() - begun, expected.missing())
            )
            return False
        self._observers.notify(KvWaited(engine, "ready", self._now() - begun))
        return True

    def receive(self, notice: Notice) -> None:
        """Process a notice that KV is ready."""
        expected = self._expected.get(notice.request_id)
        if expected is not None:
            self._report("awaited" if expected.receive(notice) else "double")
            return
        now = self._now()
        self._expire(now)
        if notice.request_id in self._over:
            self._report("late")
            return
        self._report("early")
        _, kept = self._early.setdefault(notice.request_id, (now, []))
        # Anyone who reaches the port can send them: fields that may be long are not kept.
        kept.append(msgspec.structs.replace(notice, params=None, token_ids=None))
        self._early_count += 1
        while self._early_count > KEPT:
            self._forget_oldest()

    def undecodable(self) -> None:
        """Count a message that is no notice."""
        self._observers.notify(KvNoticed("unknown", "undecodable"))

    def over(self, expected: ExpectedNotices) -> None:
        """End a wait. Called by `ExpectedNotices.close` alone."""
        if self._expected.get(expected.leg_id) is expected:
            del self._expected[expected.leg_id]
            self._over[expected.leg_id] = self._now()
            if len(self._over) > KEPT:
                self._over.popitem(last=False)

    def _expire(self, now: float) -> None:
        while self._early and next(iter(self._early.values()))[0] < now - KEPT_FOR:
            self._forget_oldest()
        while self._over and next(iter(self._over.values())) < now - KEPT_FOR:
            self._over.popitem(last=False)

    def _forget_oldest(self) -> None:
        _, (_, notices) = self._early.popitem(last=False)
        self._early_count -= len(notices)
        for _ in notices:
            self._report("unknown")

    def _report(self, result: str) -> None:
        self._observers.notify(KvNoticed(NoticeEvent.READY.value, result))
