"""The parts of the process, which all its pools share: clients, admission, budgets, keys, metrics,
tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from pdproxy.app.capacity import Places, ProxyPlaces
from pdproxy.app.credentials import Credentials
from pdproxy.app.gauges import show_process
from pdproxy.app.heartbeat import Heartbeat
from pdproxy.app.share import Share, SoleProcess
from pdproxy.app.tokens import Library
from pdproxy.app.tracing import TracingParts, build_tracing
from pdproxy.app.watch import Watch
from pdproxy.deciding.local_admission import LocalAdmission
from pdproxy.deciding.local_quotas import LocalQuotas
from pdproxy.deciding.retry_budget import RetryBudget
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.observe.logs import Log, LogObserver
from pdproxy.observe.metrics import Metrics
from pdproxy.scheduling.admission import Admission, Quotas
from pdproxy.scheduling.wanted_engines import WantedEngines
from pdproxy.serving.access.cache_salts import CacheSalts
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.access.models import Models
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.settings.changes import own
from pdproxy.settings.listen import UNIX, parsed_networks
from pdproxy.settings.schema import Settings
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connections import Connections
from pdproxy.web.unread_answers import UnreadAnswers
from pdproxy.web.wrong_keys import WrongKeys


@dataclass(slots=True, kw_only=True)
class Process:
    """What all pools share. `watch`, `library`, `share`: see `Proxy.build`. `registries`,
    `wanted`: each pool adds its own; no pool adds to the second where another process chooses.
    """

    settings: Settings
    watch: Watch
    share: Share | SoleProcess
    library: Library
    credentials: Credentials
    registries: list[EngineRegistry]
    wanted: list[WantedEngines]
    metrics: Metrics
    observers: Observers
    tasks: TaskOwner
    clock: Clock
    answer_budget: AnswerBudget
    known_clients: Clients
    admission: Admission
    retries: RetryBudget
    """Of no use where another process decides who is tried again."""
    bodies: BodyReader
    body_budget: BodyBudget
    unread_answers: UnreadAnswers
    connections: Connections
    quotas: Quotas
    cache_salts: CacheSalts
    models: Models
    places: Places | ProxyPlaces | None
    """What bounds requests by what engines can take: those of one pool, or of all; None where
    another process does.
    """
    heartbeat: Heartbeat
    tracing: TracingParts | None
    """None where no traces are exported."""
    wrong_keys: WrongKeys

    @property
    def now(self) -> Callable[[], float]:
        """The clock's seconds."""
        return self.clock.now

    @classmethod
    def of(
        cls,
        settings: Settings,
        library: Library,
        watch: Watch,
        log: Log | None,
        clock: Clock | None,
        share: Share | SoleProcess,
    ) -> Self:
        """Make them. Arguments and errors are those of `Proxy.build`."""
        settings = own(settings)
        limits, deadlines = settings.limits, settings.deadlines
        credentials = share.credentials(settings)
        tasks = TaskOwner("fleet", now=watch.now)
        deadline_failures = tasks.watch("deadlines")
        clock = clock or Clock(deadline_failures.failed, watch.now)
        registries: list[EngineRegistry] = []
        models = Models([], watch.chance, clock.now)
        metrics = Metrics(
            lambda model: any(one.lists(model) for one in registries) or models.knows(model),
            share.label_values(),
        )
        lines = LogObserver(log, engines=share.chooses)
        observers = Observers([metrics, lines])
        listen = settings.listen
        known_clients = Clients(
            parsed_networks(listen.trusted_proxies),
            trusts_unix=listen.uds is not None and UNIX in listen.trusted_proxies,
        )
        admission = share.admission(
            lambda: LocalAdmission(
                limits, deadlines, settings.overload, observers, clock, known_clients
            ),
            known_clients,
        )
        retries = RetryBudget(limits, deadlines, lambda: admission.inflight, clock)
        if share.chooses:
            retries.show(observers)
        bodies = BodyReader(limits, deadlines, settings.media, clock, observers)
        show_process(observers, tasks, log, lines)
        return cls(
            settings=settings,
            watch=watch,
            share=share,
            library=library,
            credentials=credentials,
            registries=registries,
            wanted=[],
            metrics=metrics,
            observers=observers,
            tasks=tasks,
            clock=clock,
            answer_budget=AnswerBudget(limits.max_answer_bytes, limits.max_buffered_answer_bytes),
            known_clients=known_clients,
            admission=admission,
            retries=retries,
            bodies=bodies,
            body_budget=BodyBudget(limits.max_buffered_bytes, observers),
            unread_answers=UnreadAnswers(limits.max_buffered_answer_bytes, observers),
            connections=Connections(limits.max_connections, observers),
            quotas=share.quotas(
                lambda: LocalQuotas(credentials.keys.limits, clock.now), credentials.keys.limits
            ),
            cache_salts=CacheSalts(
                settings.tenants, credentials.keys, partial(_secret, credentials, share)
            ),
            models=models,
            places=_places(settings, admission),
            heartbeat=Heartbeat(observers),
            tracing=build_tracing(settings.observe.tracing, observers, clock),
            wrong_keys=WrongKeys(clock.now, observers),
        )


def _places(settings: Settings, admission: Admission) -> Places | ProxyPlaces | None:
    """Return what bounds requests by the engines of one pool, or of all; None where another process
    does.
    """
    if not isinstance(admission, LocalAdmission):
        return None
    return ProxyPlaces(admission) if len(settings.pools) > 1 else admission


def _secret(credentials: Credentials, share: Share | SoleProcess) -> bytes:
    """Return the secret of tenants' salts: the settings', or else one that this process and its
    other workers have made.
    """
    own = credentials.cache_secret()
    return share.cache_secret if own is None else own.encode()
