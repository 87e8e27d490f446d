"""All live handles of one pool: every handle from a prefill engine is loaded or released in the
end, and none is forgotten.

Owns the handles and the background work that ends them: the releases (`serving.kv.release`), and
the prefill legs whose client has left (`serving.kv.orphans`). That work may last longer than the
request; a shutdown waits for it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping

from pdproxy.fleet.contacts import Contacts
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.kit.clock import Clock
from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import NODE, Label, MergeRule, counter, gauge, histogram
from pdproxy.observe.events import HandleEnded, KvNoticed, KvTransferred, Observers
from pdproxy.scheduling.engine_states import EngineStates
from pdproxy.serving.kv.custody import Custody, CustodyState, End
from pdproxy.serving.kv.orphans import Orphans, PrefillRecord
from pdproxy.serving.kv.release import OngoingRelease, ReleaseResources, release_for
from pdproxy.serving.kv.stuck import StuckKv
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import Contract, Handle
from pdproxy.wire.notices import Notice, NoticeEvent

logger = logging.getLogger("pdproxy.kv")
ENDS = (
    ("loaded", "the decode engine has it"),
    ("released", "pdproxy released it"),
    ("refused", "the decode engine refused the request and released it"),
    ("aborted", "the decode engine had it when its request was closed, and frees it"),
    ("lost", "it could not be released: the prefill engine frees it after its own time"),
    ("expired", "the prefill engine reported that its time is over"),
    (
        "not_made",
        (
            "the prefill failed or was closed while a decode engine was asked at the same time: "
            "there was no KV"
        ),
    ),
    (
        "stuck",
        (
            "it was not made, or not pushed, and the decode engine may wait for it: see "
            "pdproxy_kv_stuck"
        ),
    ),
)
_STATES = (
    (
        "promised",
        "both engines were asked at the same time, and the prefill engine has not answered yet",
    ),
    ("held", "no decode engine was asked"),
    ("asked", "a decode engine was sent the handle, and has shown nothing yet"),
    ("releasing", "it is being released"),
)
HANDLES_ENDED = counter(
    "pdproxy_kv_handles_ended_total",
    "handles",
    "KV handles that have ended",
    Label("end", ENDS),
    of=HandleEnded,
)
KV_HANDLES = gauge(
    "pdproxy_kv_handles",
    "handles",
    "KV handles that have not ended, by state",
    Label("state", _STATES),
    workers=MergeRule.SUM,
)
NODE_KV_HANDLES = gauge(
    "pdproxy_node_kv_handles",
    "handles",
    "KV handles of a prefill engine that have not ended. Engines that have none are not shown",
    NODE,
    workers=MergeRule.SUM,
)
KV_HANDLE_AGE = gauge(
    "pdproxy_kv_handle_age_seconds",
    "seconds",
    "Age of the oldest KV handle in a state",
    Label("state", _STATES),
    workers=MergeRule.MOST,
    pools=MergeRule.MOST,
)
KV_SECONDS = histogram(
    "pdproxy_kv_transfer_seconds",
    "Seconds of KV transfers, as decode engines reported them",
    of=KvTransferred,
    counts=lambda event: [] if event.seconds is None else [((), event.seconds)],
)
KV_BYTES = counter(
    "pdproxy_kv_transfer_bytes_total",
    "bytes",
    "Bytes of KV that decode engines reported as loaded",
    of=KvTransferred,
    counts=lambda event: [] if event.bytes is None else [((), event.bytes)],
)
KV_STUCK = gauge(
    "pdproxy_kv_stuck",
    "requests",
    "Requests of a decode engine that may wait for KV that will not come, and keep their blocks. "
    "An estimate: some keep nothing, and some that do are not known",
    NODE,
    workers=MergeRule.SUM,
)
KV_STUCK_AGE = gauge(
    "pdproxy_kv_stuck_age_seconds",
    "seconds",
    "Age of the oldest of pdproxy_kv_stuck",
    NODE,
    workers=MergeRule.MOST,
)


class Custodian:
    """All live handles of one pool. `hosts`: which hosts the handles of abandoned legs may name.
    `live`: what holds them, None for what is forgotten with this process.
    """

    def __init__(
        self,
        contract: Contract,
        states: EngineStates,
        engines: Mapping[str, Engine],
        deadlines: Deadlines,
        observers: Observers,
        now: Callable[[], float],
        clock: Clock,
        hosts: HandleHosts,
        live: OrderedSet[Custody] | None = None,
    ) -> None:
        self._deadlines = deadlines
        self._observers = observers
        self.now = now
        self.clock = clock
        self._live: OrderedSet[Custody] = OrderedSet() if live is None else live
        self._has_notices = contract.handle_from_notice is not None
        self.decode_waits = contract.holder.decode_waits
        """Whether decode engines wait for a push under this contract."""
        self.loses_closed: Callable[[Handle], bool] = contract.holder.loses_closed
        self._at_host, self._engines = contract.at_host, engines
        self._hosts = hosts
        self._usual_lease = contract.holder.lease or math.inf
        self.when_unread: Callable[[str, str], object] = lambda _, __: None
        """Called with the URLs of a prefill engine and of the decode engine that has reported that
        it could not read the KV.
        """
        # the same custodies by the engines' own ids, if notices carry these
        self._named: dict[str, Custody] = {}
        self._tasks = TaskOwner("custody")
        self.contacts = Contacts(engines)
        self.stuck = StuckKv(engines, contract.holder)
        resources = ReleaseResources(
            states, engines, deadlines, observers, now, clock, self.contacts
        )
        holds = release_for(contract.holder, resources)
        self._release = holds
        awaited = None if holds is None else lambda: holds.abandoned_timeout
        self.orphans = Orphans(
            contract, awaited, observers, self._tasks, clock, self._release_at_once
        )
        observers.show(
            KV_HANDLES, lambda: [((state,), count) for state, (count, _) in self.snapshot().items()]
        )
        observers.show(
            NODE_KV_HANDLES, lambda: [((url,), count) for url, count in self.counts().items()]
        )
        observers.show(
            KV_HANDLE_AGE, lambda: [((state,), age) for state, (_, age) in self.snapshot().items()]
        )
        observers.show(
            KV_STUCK,
            lambda: [((url,), count) for url, (count, _) in self.stuck.snapshot(now()).items()],
        )
        observers.show(
            KV_STUCK_AGE,
            lambda: [((url,), age) for url, (_, age) in self.stuck.snapshot(now()).items()],
        )

    @property
    def holds(self) -> bool:
        """Whether engines hold KV for the proxy under this contract."""
        return self._release is not None

    @property
    def drain_timeout(self) -> float:
        """Seconds that the end of the process waits for the background work."""
        if self._release is not None:
            return self._release.drain_timeout
        return self._deadlines.abandoned_prefill + self._deadlines.release

    def __repr__(self) -> str:
        return f"<Custodian {len(self._live)} live handles, {self.orphans!r}>"

    def snapshot(self) -> dict[str, tuple[int, float]]:
        """Return for each state how many handles are in it and the age of the oldest in seconds."""
        now = self.now()
        found = {state.value: (0, 0.0) for state in CustodyState}
        for custody in self._live:
            if custody.state is not None:
                count, oldest = found[custody.state.value]
                found[custody.state.value] = (count + 1, max(oldest, now - custody.since))
        return found

    def counts(self) -> Counter[str]:
        """Return how many handles each prefill engine has that have not ended, by URL."""
        return Counter(custody.prefill for custody in self._live if custody.state is not None)

    def named(self) -> set[str]:
        """Return the URLs of engines that hold KV for us, or may do so."""
        legs = [(custody.prefill, custody.decode) for custody in self._live]
        return {url for pair in (*legs, *self.orphans.named()) for url in pair if url is not None}

    def count_at(self, url: str) -> int:
        """Return how many handles an engine is named by, as in `named`."""
        legs = [(custody.prefill, custody.decode) for custody in self._live]
        return sum(url in pair for pair in (*legs, *self.orphans.named()))

    def placed(self, handle: Handle, prefill: str) -> Handle:
        """Return a handle with the host at which the settings say that others reach its prefill
        engine.
        """
        if self._at_host is None:
            return handle
        engine = self._engines.get(prefill)
        return (
            handle
            if engine is None or engine.kv_host is None
            else self._at_host(handle, engine.kv_host)
        )

    def leases_of(self, prefill: str) -> tuple[float, float | None]:
        """Return the seconds for which a prefill engine keeps KV that nobody reads, and how many of
        its handles have expired.

        None: that is not known, or notices say it of each handle.
        """
        engine = self._engines.get(prefill)
        if engine is None:
            return self._usual_lease, None
        return (
            engine.kv_lease or self._usual_lease,
            None if self._has_notices else engine.kv_expired,
        )

    def take(self, handle: Handle, leg: PrefillRecord) -> Custody:
        """Become responsible for a handle."""
        custody = Custody(self, handle, leg)
        if custody.state is not None:
            self._live.add(custody)
            if self._has_notices:
                self._named[handle.remote_request_id] = custody
        return custody

    def promise(self, handle: Handle, leg: PrefillRecord) -> Custody:
        """Become responsible for KV that both engines are asked for at once. `handle`: what the
        decode engine is sent.
        """
        custody = Custody(self, handle, leg, promised=True)
        if custody.state is not None:
            custody.state = CustodyState.PROMISED
            self._live.add(custody)
        return custody

    def decode_releases(
        self, prefill_run: int | None, decode_run: int | None, *, in_silence: bool
    ) -> bool:
        """Return whether a decode engine that refuses or aborts the request releases the handle
        itself.
        """
        return self._release is None or self._release.decode_releases(
            prefill_run, decode_run, in_silence=in_silence
        )

    def ended(self, custody: Custody, how: End) -> None:
        """Forget a handle that has ended. Called only by `Custody.end`."""
        if how is End.LOADED:
            self.contacts.add(custody.prefill_run, custody.decode_run)
        elif how is End.STUCK and custody.decode is not None:
            self.stuck.add(custody.decode, custody.decode_run, self.now())
        self._live.discard(custody)
        self._named.pop(custody.handle.remote_request_id, None)
        self._observers.notify(HandleEnded(how.label, custody.prefill, self.now() - custody.since))

    def release(self, custody: Custody, releasing: OngoingRelease) -> None:
        """Start releasing a handle. Called only by `Custody`."""
        self._tasks.spawn(self._released(custody, releasing), releasing.handle.remote_request_id)

    def awaiting_push(self) -> list[Custody]:
        """Return the handles whose decode leg is under way and may wait for its KV."""
        return [custody for custody in self._live if custody.awaits_push]

    def spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        """Run background work that ends handles."""
        self._tasks.spawn(work, name)

    async def settle(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for the background work. Return how many tasks were
        cancelled.
        """
        return await self._tasks.settle(timeout)

    def receive(self, notice: Notice) -> None:
        """Process a notice about the KV of a handle."""
        custody = self._named.get(notice.remote_request_id or "")
        self._observers.notify(
            KvNoticed(notice.event.value, "known" if custody is not None else "over")
        )
        match notice.event:
            case NoticeEvent.LOADED:
                self._observers.notify(KvTransferred(notice.seconds, notice.moved_bytes))
                if custody is not None:
                    custody.end(End.LOADED)
            case NoticeEvent.FAILED if notice.role == "P":
                self.orphans.forget(notice.request_id)
            case NoticeEvent.FAILED if custody is not None:
                if custody.state is CustodyState.ASKED and custody.decode is not None:
                    self.when_unread(custody.prefill, custody.decode)
                custody.not_read()
            case NoticeEvent.RELEASED if custody is not None and notice.role != "D":
                custody.freed += 1
                if custody.freed >= (notice.world or 1):
                    # If we did not release it, the decode engine has read all of it.
                    custody.end(End.LOADED if custody.state is CustodyState.ASKED else End.RELEASED)
            case NoticeEvent.EXPIRED if custody is not None:
                gone, custody.on_gone = custody.on_gone, None
                decode_may_read = custody.state is CustodyState.ASKED
                custody.end(End.EXPIRED)
                logger.warning(
                    "the lease on %s at %s has ended", notice.remote_request_id, custody.prefill
                )
                if decode_may_read and gone is not None:
                    gone(
                        f"the lease on the KV at {custody.prefill} ended before it was loaded",
                        False,
                    )

    def _release_at_once(self, handle: Handle, leg: PrefillRecord) -> None:
        named = self._hosts.checked(handle, leg.prefill)
        if isinstance(named, str):
            logger.warning("KV at %s is not released: %s", leg.prefill, named)
            leg.nothing_kept(named)
            return
        if leg.promised is not None:
            leg.promised.made(handle)
            leg.promised.release()
            return
        custody = self.take(handle, leg)
        if leg.space is not None:
            custody.when_over(leg.space.release)
        custody.release()

    async def _released(self, custody: Custody, releasing: OngoingRelease) -> None:
        assert self._release is not None
        if custody.how is not None:
            return  # a notice has ended it since: there is nothing to release any more
        how = End.LOST
        try:
            if await self._release.release(releasing):
                how = End.RELEASED
        finally:
            custody.end(how)
        if how is End.LOST:
            name, then = releasing.handle.remote_request_id, self._release.lost(releasing)
            logger.warning("KV of %s could not be released: %s", name, then)
