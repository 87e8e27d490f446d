"""The parts of a proxy that depend on whether other processes serve with it: what makes the others
asks a `Share` for them, or `SoleProcess`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from secrets import token_bytes
from typing import Protocol

from pdproxy.app.capacity import PoolCapacity
from pdproxy.app.credentials import Credentials
from pdproxy.app.retrying import Decided, Retrying
from pdproxy.app.shown import Shown
from pdproxy.app.sockets import Sockets
from pdproxy.app.watching import Watching
from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.kept_turns import TurnLimits
from pdproxy.deciding.local_admission import LocalAdmission
from pdproxy.deciding.local_quotas import LocalQuotas
from pdproxy.deciding.local_scheduler import LocalScheduler
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
from pdproxy.observe.label_values import LabelValues
from pdproxy.observe.metrics import Metrics
from pdproxy.scheduling.admission import Admission, Quotas
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.scheduler import Scheduler
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.kv.lost_pushes import AwaitedPush
from pdproxy.serving.kv.open_turns import TurnKeeper
from pdproxy.settings.keys import KeyLimits
from pdproxy.settings.limits import Deadlines
from pdproxy.settings.schema import Settings
from pdproxy.transfer.contract import Contract
from pdproxy.transfer.turns import TurnRules
from pdproxy.web.admin.api import AdminApi
from pdproxy.web.admin.service import AdminService
from pdproxy.web.operation import EngineWork, Readiness
from pdproxy.wire.notices import Notice

SECRET_BYTES = 32


class Share(Protocol):
    """What one of several processes shares with the others."""

    cache_secret: bytes
    """See `SoleProcess`. All processes have the same one."""
    chooses: bool
    """Whether this process chooses engines, and finds out how they are, for itself and for all
    others. It decides which engines are members of the pools: it follows the settings' sources,
    and makes the changes that operators ask for. It reads the files of settings and keys.
    """

    def start(self, tasks: TaskOwner) -> None:
        """Follow the others, in tasks of this owner."""

    def stop(self) -> None:
        """Follow them no more."""

    def credentials(self, settings: Settings) -> Credentials:
        """Return the keys and TLS contexts of these settings. Raises as `Credentials`."""

    def label_values(self) -> LabelValues:
        """Return the values of labels that metrics show: all processes show the same."""

    def pool(self, at: int) -> PoolShare:
        """Return the process's part of the pool with this number."""

    def admission(self, local: Callable[[], LocalAdmission], clients: Clients) -> Admission:
        """Return what requests of this process ask for places. `local`: makes what gives places to
        the requests of all processes, if this one does.
        """

    def quotas(
        self, local: Callable[[], LocalQuotas], limits: Callable[[], Mapping[str, KeyLimits]]
    ) -> Quotas:
        """Return what requests of this process ask for the limits of their keys. `local`: makes
        what counts for all processes, if this one does; `limits`: returns those in force.
        """

    def shown(
        self,
        admission: Admission,
        readiness: Callable[[], Readiness],
        metrics: Metrics,
        work_at: Callable[[str], EngineWork],
    ) -> Shown:
        """Return what clients are shown of all processes. The arguments: those of `Shown`."""

    def admin_api(self, service: AdminService, now: Callable[[], float]) -> AdminApi:
        """Return what the routes of the admin API ask for. `now`: the clock's seconds."""


class Legs(Protocol):
    """The legs of all processes at the engines of a pool, which are among the engines' open
    legs.
    """

    async def hear(self) -> bool:
        """Wait until it is known what legs have shown until now, for some time at most. Return
        whether it is.
        """

    def pushes(self) -> Sequence[AwaitedPush]:
        """Return the pushes that legs of other processes await."""

    def answer(
        self,
        works: Callable[[str, str], Awaitable[bool]],
        is_push_lost: Callable[[AwaitedPush], Awaitable[bool]],
    ) -> None:
        """Have other processes' legs go on waiting where these allow it."""


class PoolShare(Protocol):
    """A process's part of one pool."""

    chooses: bool
    """Whether this process chooses the engines, for itself and for all others."""
    capacity: PoolCapacity | None
    """Set by whoever makes it."""

    @property
    def sockets(self) -> Sockets | None:
        """How the pool's sockets are bound to which engines send messages; None: this process has
        none.
        """

    @property
    def legs(self) -> Legs | None:
        """The legs of all processes, None if another process chooses. Made with the auditor."""

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
        """Return where finished turns of this process go: if it chooses, a `PoolTurns`. The
        arguments: those of `PoolTurns`.
        """

    def share_members(
        self, members: Membership, engines: EngineRegistry
    ) -> Callable[[], Sequence[str]]:
        """Have the same members in all processes. Return what returns sentences on what is wrong
        with them.
        """

    def scheduler(
        self,
        local: LocalScheduler,
        ledger: Ledger,
        buffers: ReceiveBuffers,
        engines: EngineRegistry,
        observers: Observers,
    ) -> Scheduler:
        """Return what this process's requests ask for engines. `local`: what chooses, if this
        process does; `buffers`: those of the decode engines.
        """

    def waits(
        self, custodian: Custodian
    ) -> tuple[Callable[[str, str], Awaitable[bool]], Callable[[Custody], Awaitable[bool]]]:
        """Return what legs ask behind their deadlines, where another process chooses:
        `ExchangeResources.works` and `is_push_lost`.
        """

    def auditor(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        observers: Observers,
        tasks: TaskOwner,
    ) -> Auditor:
        """Return the audit of what this process's requests move, or those of all, if this process
        chooses. The arguments: those of `Auditor`, and the owner of its tasks.
        """

    def share_states(
        self,
        watching: Watching,
        engines: EngineRegistry,
        ledger: Ledger,
        observers: Observers,
    ) -> None:
        """Have all processes know how engines are. `watching`: what watches them here."""

    def share_bootstraps(self, own: Bootstraps, engines: EngineRegistry) -> None:
        """Have all processes know the answers of bootstrap servers. `own`: what knows them here."""

    def share_canaries(self, own: Canaries, engines: EngineRegistry) -> None:
        """Have all processes judge engines' answers to canaries. `own`: what judges them here."""

    def retrying(self, engines: EngineRegistry) -> Retrying:
        """Return what this process's requests ask before they are tried again, if another one
        decides that.
        """

    def decides(self, decided: Decided, ledger: Ledger) -> None:
        """Have this process decide it for all."""

    def notices(
        self,
        take: Callable[[Notice], None],
        observers: Observers,
        failed: Callable[[Exception], None],
        *,
        is_read: bool,
    ) -> Callable[[Notice], None]:
        """Return what gets the notices that engines send to this process. `take` gets those about
        its own prompts, wherever they came.

        `is_read`: whether anything reads the handles and ids that they may carry. `failed`: what is
        called if one can't be processed.
        """

    def registered(self, engines: EngineRegistry, ledger: Ledger) -> KnownRegistrations:
        """Return the registrations of the pool's engines, which another process takes."""

    def pass_on(self, known: Registrations, engines: EngineRegistry, timeout: float) -> None:
        """Tell the others of the registrations that this process takes."""

    def live_custodies(self, contract: Contract) -> OrderedSet[Custody]:
        """Return what holds this process's live handles: other processes can release them if this
        one is killed.
        """

    def share_custody(self, custodian: Custodian, engines: EngineRegistry) -> None:
        """Have this process release handles of others that were killed."""


class SoleProcess:
    """The parts of a process that serves alone."""

    chooses = True
    """See `Share`, as for the next ones."""
    credentials = Credentials
    label_values = LabelValues
    shown = Shown

    def __init__(self) -> None:
        self.cache_secret = token_bytes(SECRET_BYTES)
        """The key of the hash that makes tenants' salts, where the settings have none."""

    @staticmethod
    def admission(local: Callable[[], LocalAdmission], _: Clients) -> LocalAdmission:
        """Return what requests ask for places. See `Share`."""
        return local()

    @staticmethod
    def quotas(
        local: Callable[[], LocalQuotas], _: Callable[[], Mapping[str, KeyLimits]]
    ) -> LocalQuotas:
        """Return what requests ask for the limits of their keys. See `Share`."""
        return local()

    @staticmethod
    def pool(at: int) -> None:
        """The pools share nothing with other processes. See `Share`."""

    @staticmethod
    def admin_api(service: AdminService, now: Callable[[], float]) -> AdminApi:
        """See `Share`."""
        return AdminApi(service)

    def start(self, tasks: TaskOwner) -> None:
        """There is nobody to follow."""

    def stop(self) -> None:
        """There is nothing to stop."""


ALONE = SoleProcess()
