"""What several workers share: tables in memory that the parent maps before it forks them.

`WorkersMemory` is made by the parent; `WorkerShare` is what one worker does with it: the parts of a
proxy that differ from those of a process that serves alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from secrets import token_bytes
from socket import socket

from pdproxy.app.credentials import Credentials
from pdproxy.app.share import SECRET_BYTES
from pdproxy.app.shown import Shown
from pdproxy.deciding.local_admission import LocalAdmission
from pdproxy.deciding.local_quotas import Levels, LocalQuotas, decode_levels, encode_levels
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import MergeRule, counter, gauge
from pdproxy.observe.label_values import LabelValues
from pdproxy.observe.logs import Log
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.prompt_shares import PoolPrompts
from pdproxy.observe.recent import Recent
from pdproxy.scheduling.admission import Admission, Quotas
from pdproxy.serving.access.clients import Clients
from pdproxy.settings.keys import KeyLimits
from pdproxy.settings.schema import Settings
from pdproxy.web.admin.api import AdminApi
from pdproxy.web.admin.changes import Change
from pdproxy.web.admin.service import AdminService
from pdproxy.web.operation import EngineWork, Readiness
from pdproxy.workers import custody_records, heirs
from pdproxy.workers.admin import AdminApiOfAll, answer
from pdproxy.workers.admitted_worker import AdmissionOfAll, AdmittedWorker
from pdproxy.workers.followed_members import FollowedMembers
from pdproxy.workers.heirs import ADOPT, ADOPTED
from pdproxy.workers.kept import KEPT, Keeper
from pdproxy.workers.keys import KEYS, KeysForWorkers, credentials_of_worker
from pdproxy.workers.label_values import SharedLabelValues
from pdproxy.workers.links import Message
from pdproxy.workers.log_level import LevelOfAll, follow
from pdproxy.workers.members import MembersOfAll
from pdproxy.workers.pool_share import PoolMemory, WorkerPoolShare
from pdproxy.workers.records import SharedRecords
from pdproxy.workers.remote_admission import RemoteAdmission, RemoteQuotas
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.shown_of_all import ShownOfAll
from pdproxy.workers.siblings import LinkedSiblings
from pdproxy.workers.supervisor import NO_PEER

REFRESH_EVERY = 0.25
"""Seconds between two looks at all that is shared: an engine that drains is looked at without a
request, a store that another core saw late is found, and so is the end of a process.
"""
NO_MEMBERS = "a worker begins, and does not know the engines yet"
LEVELS = "levels"
"""The word in front of what is kept for the next scheduler process: what each key has left."""
UNSHARED = counter(
    "pdproxy_kv_handles_unshared_total",
    "handles",
    "KV handles that had no space in the memory that outlives a worker: if it is killed, their "
    "KV is left to its own time",
)

LEASES = gauge(
    "pdproxy_scheduler_leases",
    "leases",
    "What the scheduler process of several workers has leased to their requests: each engine that "
    "one has is one lease",
    workers=MergeRule.SUM,
)


class WorkersMemory:
    """The memory of so many processes, that have so many pools. `scheduler`: the number of the one
    that chooses engines.
    """

    def __init__(self, processes: int, scheduler: int, pools: int = 1) -> None:
        self.processes = processes
        self.scheduler = scheduler
        self.connectors: list[str] = []
        """Those of the pools, once a worker has found them by asking engines: its successors need
        not ask again. Not shared: a process has a copy from its fork.
        """
        self.starts = [0] * processes
        """How often each was started. Not shared: a process has a copy from its fork."""
        self.cache_secret = token_bytes(SECRET_BYTES)
        """See `SoleProcess`. All workers have the same one."""
        self.pools = [PoolMemory(processes) for _ in range(pools)]
        self.custody = SharedRecords(processes, custody_records.UNITS)
        self.label_values = SharedLabelValues()
        self.kept: dict[str, bytes] = {}
        """What the scheduler process has kept for its successor. Not shared: a process has a copy
        from its fork.
        """

    def listeners(self) -> list[socket]:
        """Return the sockets to which engines send messages, which are the parent's."""
        return [listener for pool in self.pools for listener in pool.listeners.values()]

    def of(
        self,
        number: int,
        send: Callable[[Message], None],
        now: Callable[[], float] = time.monotonic,
    ) -> WorkerShare:
        """Return a worker's part. `send`: sends its parent a message."""
        return WorkerShare(self, number, send, now)


class WorkerShare:
    """A worker's part, a `Share`. `number`: of the worker; `send`: sends its parent a message."""

    def __init__(
        self,
        shared: WorkersMemory,
        number: int,
        send: Callable[[Message], None],
        now: Callable[[], float],
    ) -> None:
        self.number = number
        self.cache_secret = shared.cache_secret
        self._shared = shared
        self._now = now

        self.siblings = LinkedSiblings(send, shared.scheduler)
        self._area = shared.custody.area(number)
        self._pools: list[WorkerPoolShare] = []
        self.chooses = number == shared.scheduler
        self.succeeds = shared.starts[number] > 1
        self._shown: ShownOfAll | None = None
        self._send = send
        self._choosing = SchedulerLinks(chooses=self.chooses, workers=shared.processes - 1)
        self._choosing.link.alone = lambda: send(Message(NO_PEER))
        self._admits: tuple[LocalAdmission, Clients] | None = None
        self._quotas: LocalQuotas | None = None
        self._levels: Mapping[str, Levels] = {}
        """What keys had left when that was kept last."""
        self.keeper = Keeper(send, shared.kept)
        self.members: MembersOfAll | FollowedMembers = (
            MembersOfAll(self._choosing, self.keeper, now)
            if self.chooses
            else FollowedMembers(self._choosing.link)
        )
        self._level: LevelOfAll | None = None

    def __repr__(self) -> str:
        return f"<WorkerShare of worker {self.number}>"

    def start(self, tasks: TaskOwner) -> None:
        """See `Share`."""
        self.members.start(tasks)
        if self._shown is not None:
            self._shown.start(tasks)
        tasks.keep(self._follow, "shared load")

    def stop(self) -> None:
        """See `Share`."""
        if self._shown is not None:
            self._shown.report()  # nothing is counted any more
        self._choosing.stop()

    def credentials(self, settings: Settings) -> Credentials:
        """See `Share`."""
        if not self.chooses:
            kept = self._shared.kept.get(KEYS, b"")
            return credentials_of_worker(settings, kept, self._choosing.link.subscriber)
        made = Credentials(settings)
        KeysForWorkers(made, self._choosing.publisher, self.keeper)
        return made

    @property
    def links(self) -> SchedulerLinks:
        """The links between the scheduler process and workers."""
        return self._choosing

    def connect(self, end: socket) -> None:
        """Use a socket to another process for choosing engines: see `SchedulerLinks`."""
        self._choosing.connect(end)

    def listen(self) -> None:
        """Hear what other processes say from now on: the proxy is made."""
        for pool in self._pools:
            pool.listen()
        self._choosing.start()
        if isinstance(self.members, MembersOfAll):
            self.members.has_workers = True

    def choose(self) -> None:
        """Choose engines for other processes from now on, if this one does: they are known."""
        if self.chooses:
            for pool in self._pools:
                pool.choose()
            self._choosing.choose()

    def received(self, message: Message) -> None:
        """Process a message of the parent that is not for the process itself."""
        if message.kind == KEPT:
            self.keeper.received(message)
        elif message.kind != ADOPT:
            self.siblings.received(message)
        elif self._pools:
            records = heirs.decode(message.body)
            for pool in self._pools:
                pool.adopt(records)
            self._send(Message(ADOPTED, message.number))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_EVERY)
            self._choosing.look()
            self.refresh()
            self.tell_levels()

    def refresh(self) -> None:
        """Look at what other processes have."""
        for pool in self._pools:
            pool.refresh()

    def tell_levels(self) -> None:
        """Have the parent keep what keys have left, for the next scheduler process."""
        if self._quotas is None:
            return
        self._quotas.forget_unused()
        before, self._levels = self._levels, self._quotas.levels()
        for name in before.keys() - self._levels.keys():
            self.keeper.keep(f"{LEVELS} {name}", None)
        for name, level in self._levels.items():
            if before.get(name) != level:
                self.keeper.keep(f"{LEVELS} {name}", encode_levels({name: level}))

    def label_values(self) -> LabelValues:
        """See `Share`."""
        return self._shared.label_values.of_process()

    def pool(self, at: int) -> WorkerPoolShare:
        """See `Share`."""
        pool = WorkerPoolShare(
            self._shared.pools[at],
            self.number,
            at,
            self._shared.processes,
            self._area,
            self.chooses,
            self._now,
            self._choosing,
            self._shared.starts[self.number],
            self.members,
        )
        self._pools.append(pool)
        return pool

    def admission(self, local: Callable[[], LocalAdmission], clients: Clients) -> Admission:
        """See `Share`."""
        if not self.chooses:
            return RemoteAdmission(self._choosing.link, clients)
        made = local()
        self._admits = made, clients
        return made

    def quotas(
        self, local: Callable[[], LocalQuotas], limits: Callable[[], Mapping[str, KeyLimits]]
    ) -> Quotas:
        """See `Share`."""
        if self._admits is None:
            return RemoteQuotas(self._choosing.link, limits)
        admission, clients = self._admits
        made = self._quotas = local()
        for levels in self.keeper.kept_of(LEVELS):
            made.take_over(decode_levels(levels))
        of_all = AdmissionOfAll(admission, made, clients)
        self._choosing.greets.append(partial(AdmittedWorker, of_all))
        return made

    def shown(
        self,
        admission: Admission,
        readiness: Callable[[], Readiness],
        metrics: Metrics,
        work_at: Callable[[str], EngineWork],
    ) -> Shown:
        """See `Share`."""
        metrics.show(UNSHARED, lambda: [((), self._area.without_space)])
        if self.chooses:
            metrics.show(LEASES, lambda: [((), self._choosing.leases)])

        def known_work_at(place: str) -> EngineWork:
            return work_at(place) if self.knows_members() else EngineWork(NO_MEMBERS)

        self._shown = ShownOfAll(
            admission, readiness, metrics, known_work_at, self.siblings, self.number
        )
        return self._shown

    def knows_members(self) -> bool:
        """Return whether this process knows the members of its pools."""
        return not isinstance(self.members, FollowedMembers) or self.members.is_known

    def follow_level(self, log: Log) -> None:
        """Use the log level that operators set. `log`: this process's."""
        if self.chooses:
            self._level = LevelOfAll(self._choosing.publisher, self.keeper, log)
        else:
            follow(self._choosing.link.subscriber, log)

    def take_over_level(self, of_settings: Callable[[], str]) -> None:
        """Go on with the log level that operators have set. `of_settings`: returns the level of the
        settings.
        """
        if self._level is not None:
            self._level.take_over(of_settings)

    def answer_operators(
        self,
        requests: Recent,
        prompts: Callable[[], list[PoolPrompts]],
        now: Callable[[], float],
    ) -> None:
        """Tell the scheduler process what operators ask for, and it does not know itself."""
        answer(self.siblings, requests, prompts, now)

    def admin_api(self, service: AdminService, now: Callable[[], float]) -> AdminApi:
        """See `Share`."""

        def made(change: Change) -> None:
            if change.kind == "log_level" and self._level is not None:
                self._level.changed()

        return AdminApiOfAll(service, self.siblings, self.keeper, now, made)
