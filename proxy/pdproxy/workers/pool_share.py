"""What several workers share of one pool: memory of its own, and what one worker does with that."""

from __future__ import annotations

import mmap
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from socket import socket

from pdproxy.app.capacity import PoolCapacity
from pdproxy.app.retrying import Decided, Retrying
from pdproxy.app.watching import Watching
from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.kept_turns import TurnLimits
from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.deciding.turns import PoolTurns
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.bootstrap import Bootstraps
from pdproxy.fleet.canary import Canaries
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.registration import KnownRegistrations, Registrations
from pdproxy.kit.clock import Clock
from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.scheduler import Scheduler
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.kv.open_turns import TurnKeeper
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import Contract
from pdproxy.transfer.turns import TurnRules
from pdproxy.wire.notices import Notice
from pdproxy.workers import custody_records
from pdproxy.workers.audit import AuditorOfAll, WorkerAuditor
from pdproxy.workers.engine_bootstraps import BootstrapsForWorkers, BootstrapsOfWorker
from pdproxy.workers.engine_canaries import CanariesForWorkers, CanariesOfWorker
from pdproxy.workers.followed_members import FollowedMembers
from pdproxy.workers.kept_sockets import KeptSockets
from pdproxy.workers.legs_of_all import LegsOfAll
from pdproxy.workers.loss_clients import LossesOfPool, decide_losses
from pdproxy.workers.members import MembersOfAll
from pdproxy.workers.notices import NoticesForWorkers, NoticesOfWorker
from pdproxy.workers.own_legs import OwnLegs
from pdproxy.workers.records import Area, SharedRecords
from pdproxy.workers.registrations import RegistrationsOfWorker, publish_registrations
from pdproxy.workers.remote_losses import RemoteLosses
from pdproxy.workers.remote_scheduler import Refusals, RemoteScheduler
from pdproxy.workers.remote_turns import RemoteTurns
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.state_view import StateView
from pdproxy.workers.state_writer import StateWriter
from pdproxy.workers.turns_of_workers import UNITS, RecordedTurns, WorkersTurns
from pdproxy.workers.worker_choices import PoolChoices


class PoolMemory:
    """The memory of one pool, for so many workers."""

    def __init__(self, workers: int) -> None:
        self.turns = SharedRecords(1, UNITS)
        """Of the scheduler process. Its successor reads them."""
        self.heard = memoryview(mmap.mmap(-1, 8 * workers)).cast("q")
        """By worker, the number of the last thing about turns that a scheduler process has heard.
        A worker reads it for good once that process has ended.
        """
        self.listeners: dict[str, socket] = {}
        """Where its engines send messages, by the keys of their places. The parent binds and closes
        them.
        """


class WorkerPoolShare:
    """A worker's part of the pool with number `at`, a `PoolShare`. `number`: of the worker, one of
    `workers`; `area`: its own, for the records of all pools.

    `chooses`: whether it is the scheduler process; `now`: monotonic seconds; `choosing`: the links
    for choosing engines; `members`: who is a member of which pool. `start`: how often the process
    was started.
    """

    def __init__(
        self,
        memory: PoolMemory,
        number: int,
        at: int,
        workers: int,
        area: Area,
        chooses: bool,
        now: Callable[[], float],
        choosing: SchedulerLinks,
        start: int,
        members: MembersOfAll | FollowedMembers,
    ) -> None:
        self.number = number
        self.at = at
        self._memory = memory
        self._area = area
        self.chooses = chooses
        self._workers = workers
        self._now = now
        self._choosing = choosing
        self._first = (start << 32) + 1
        self._members = members
        self.sockets = KeptSockets(memory.listeners) if self.chooses else None
        self.capacity: PoolCapacity | None = None
        """Set by whoever makes it."""
        self._turns: PoolTurns | None = None
        self._of_workers: WorkersTurns | None = None
        self._left_turns: list[bytes] = []
        """Records of turns that a killed scheduler process has kept."""
        self._remote_turns: RemoteTurns | None = None
        self._live: OrderedSet[Custody] = OrderedSet()
        self.adopt: Callable[[list[bytes]], None] = lambda _: None
        """Becomes responsible for the KV of a worker that has ended which engines of this pool
        hold.
        """
        self.legs: LegsOfAll | None = None
        self._own_legs: OwnLegs | None = None

    def __repr__(self) -> str:
        return f"<WorkerPoolShare of pool {self.at}, worker {self.number}>"

    def refresh(self) -> None:
        """Look at what other processes have of engines on their way out."""
        if self.capacity is not None:
            self.capacity.look()

    def turns(
        self,
        rules: TurnRules,
        limits: TurnLimits,
        ledger: Ledger,
        engines: EngineRegistry,
        deadlines: Deadlines,
        observers: Observers,
        clock: Clock,
    ) -> TurnKeeper:
        """See `PoolShare`."""
        if self.chooses:
            kept = partial(RecordedTurns, self._memory.turns.area(0))
            self._turns = PoolTurns(
                rules, limits, ledger, engines, deadlines, observers, clock, kept
            )
            return self._turns
        self._remote_turns = RemoteTurns(
            self._choosing.link,
            self.at,
            engines,
            self.number,
            self._memory.heard,
            self._first,
            limits.seconds,
            clock.now,
        )
        return self._remote_turns

    def share_members(
        self, members: Membership, engines: EngineRegistry
    ) -> Callable[[], Sequence[str]]:
        """See `PoolShare`."""
        self._members.add(members, engines)
        # those of all pools are shown once
        return self._members.shortcomings if self.at == 0 else list

    def scheduler(
        self,
        local: LocalScheduler,
        ledger: Ledger,
        buffers: ReceiveBuffers,
        engines: EngineRegistry,
        observers: Observers,
    ) -> Scheduler:
        """See `PoolShare`."""
        if self.chooses:
            turns = None
            if self._turns is not None:
                self._of_workers = turns = WorkersTurns(self._turns, ledger, self._memory.heard)
            self._choosing.add(
                PoolChoices(local, ledger, buffers, lambda: self.capacity, self._now, turns)
            )
            return local
        link, at = self._choosing.link, self.at
        observers.add(Refusals(link, at))
        return RemoteScheduler(
            link, at, engines, ledger, observers, local.fits, self._now, self._remote_turns
        )

    def listen(self) -> None:
        """Hear what workers say from now on: first take the turns that a scheduler process has
        kept which was killed. From now on this process records turns there.
        """
        if self._of_workers is not None:
            self._left_turns = self._memory.turns.taken(0)

    def choose(self) -> None:
        """Choose from now on: release these turns, whose engines are known now."""
        if self._of_workers is not None:
            self._of_workers.adopt(self._left_turns)
            self._left_turns = []

    def auditor(
        self, engines: EngineRegistry, ledger: Ledger, observers: Observers, tasks: TaskOwner
    ) -> Auditor:
        """See `PoolShare`."""
        if self.chooses:
            self.legs = LegsOfAll(self._choosing, self.at, engines, tasks)
            return AuditorOfAll(engines, ledger, observers, self.legs, tasks)
        auditor = WorkerAuditor(engines, ledger, observers)
        self._own_legs = OwnLegs(self._choosing.link, self.at, engines, auditor, self._now)
        return auditor

    def share_states(
        self,
        watching: Watching,
        engines: EngineRegistry,
        ledger: Ledger,
        observers: Observers,
    ) -> None:
        """See `PoolShare`."""
        auditor, probing = watching.auditor, watching.probing
        links, at, now = self._choosing, self.at, self._now
        if probing is None:
            StateView(links.link, at, engines, ledger, auditor, observers, now)
        else:
            outliers, probe = watching.outliers, probing.prober.soon
            StateWriter(links, at, engines, ledger, auditor, outliers, observers, now, probe)

    def share_bootstraps(self, own: Bootstraps, engines: EngineRegistry) -> None:
        """See `PoolShare`."""
        links = self._choosing
        if self.chooses:
            BootstrapsForWorkers(links, self.at, own, engines)
        else:
            BootstrapsOfWorker(links.link, self.at, own, engines)

    def share_canaries(self, own: Canaries, engines: EngineRegistry) -> None:
        """See `PoolShare`."""
        links = self._choosing
        if self.chooses:
            CanariesForWorkers(links, self.at, own, engines)
        else:
            CanariesOfWorker(links.link, self.at, own, engines)

    def retrying(self, engines: EngineRegistry) -> Retrying:
        """See `PoolShare`."""
        remote = RemoteLosses(self._choosing.link, self.at, engines, self._now)
        return Retrying(remote.slot, remote.engines_change, remote, remote.known, lambda: ())

    def decides(self, decided: Decided, ledger: Ledger) -> None:
        """See `PoolShare`."""
        pool = LossesOfPool(ledger, decided.lost, decided.slots, decided.comebacks)
        decide_losses(self._choosing, self.at, pool)

    def waits(
        self, custodian: Custodian
    ) -> tuple[Callable[[str, str], Awaitable[bool]], Callable[[Custody], Awaitable[bool]]]:
        """See `PoolShare`."""
        own = self._own_legs
        assert own is not None
        if custodian.decode_waits:
            own.awaiting = custodian.awaiting_push
        return own.works, own.is_push_lost

    def notices(
        self,
        take: Callable[[Notice], None],
        observers: Observers,
        failed: Callable[[Exception], None],
        *,
        is_read: bool,
    ) -> Callable[[Notice], None]:
        """See `PoolShare`."""
        own, links = self.number, self._choosing
        if not self.chooses:
            NoticesOfWorker(links.link, self.at, own, take, failed)
            return take
        return NoticesForWorkers(
            links, self.at, own, self._workers, take, observers, is_read=is_read
        ).receive

    def registered(self, engines: EngineRegistry, ledger: Ledger) -> KnownRegistrations:
        """See `PoolShare`."""
        subscriber = self._choosing.link.subscriber
        return RegistrationsOfWorker(subscriber, f"registrations {self.at}", engines, ledger)

    def pass_on(self, known: Registrations, engines: EngineRegistry, timeout: float) -> None:
        """See `PoolShare`."""
        topic = f"registrations {self.at}"
        publish_registrations(self._choosing.publisher, topic, known, engines, timeout)

    def live_custodies(self, contract: Contract) -> OrderedSet[Custody]:
        """See `PoolShare`."""
        self._live = custody_records.recorded(contract, self._area, self.at)
        return self._live

    def share_custody(self, custodian: Custodian, engines: EngineRegistry) -> None:
        """See `PoolShare`."""
        live, known, pool = self._live, engines.known, self.at
        self.adopt = lambda records: custody_records.adopt(custodian, live, known, records, pool)
