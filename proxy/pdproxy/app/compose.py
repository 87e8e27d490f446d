"""Wiring: the only place where rooms are put together and observers are chosen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from pdproxy.app.credentials import Credentials
from pdproxy.app.gauges import gauges
from pdproxy.app.heartbeat import Heartbeat
from pdproxy.app.models import models
from pdproxy.app.tokens import TRANSFORMERS, ChangeHeard, Library, Tokens, tokens
from pdproxy.app.transfer import build_transfer
from pdproxy.app.watch import UNWATCHED, Watch
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.prober import Prober
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import Wait
from pdproxy.kit.tasks import TaskOwner
from pdproxy.kit.text import cut
from pdproxy.observe.events import DeadlinePassed, Event, LegFailed, Observers
from pdproxy.observe.logs import Log, LogObserver
from pdproxy.observe.metrics import Metrics
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import NodeSpec, Role
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.dispatch.resources import ExchangeResources, KvTransfer
from pdproxy.serving.kv.custody import Custodian
from pdproxy.serving.kv.ready import KvReady
from pdproxy.serving.request.admission import Admission
from pdproxy.serving.request.body_reader import BodyReader, readers
from pdproxy.serving.request.passthrough import Passthrough
from pdproxy.serving.request.service import Service
from pdproxy.settings.crosscheck import parsed_networks
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.notices import NoticeSocket
from pdproxy.upstream.passthrough import PassthroughLegs
from pdproxy.web.app import Answers, Readiness
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connection_bounds import Bounds
from pdproxy.web.connections import Connections
from pdproxy.web.cors import CorsHeaders
from pdproxy.web.cycle import FORWARDED, DataPath
from pdproxy.web.identify import Identify
from pdproxy.web.passthrough_asgi import PassthroughAsgi
from pdproxy.web.protocol import DataPathProtocol, protocol_class
from pdproxy.web.slow_readers import Floor
from pdproxy.web.unread_answers import Unread
from pdproxy.wire import lmcache_telemetry
from pdproxy.wire.body_bounds import Bounds as BodyBounds
from pdproxy.wire.notices import Event as NoticeEvent
from pdproxy.wire.notices import Notice

logger = logging.getLogger("pdproxy")

MAX_DETAIL, MOST_DETAILS = 1000, 200
"""Characters of a sentence in `/ready`, which may hold an engine's words, and how many of them there are."""
MAX_REASON = 20_000
"""Characters of the reason for not being ready, which names engines."""


class _ProbeSoon:
    """An observer that has an engine probed at once when a leg to it failed."""

    def __init__(self) -> None:
        self.prober: Prober | None = None

    def notify(self, event: Event) -> None:
        if isinstance(event, LegFailed) and self.prober is not None:
            self.prober.soon(event.node)


@dataclass(slots=True)
class Proxy:
    """All parts of one running proxy. Start it inside an event loop, stop it there."""

    settings: Settings
    credentials: Credentials
    ledger: Ledger
    clients: dict[str, EngineClient]
    admin: EngineAdmin
    auditor: Auditor
    prober: Prober
    custodian: Custodian
    admission: Admission
    bodies: BodyReader
    service: Service
    legs: PassthroughLegs
    passthrough: Passthrough
    askers: Clients
    room: BodyBudget
    answer_room: AnswerBudget
    unread: Unread
    connections: Connections
    clock: Clock
    metrics: Metrics
    observers: Observers
    tasks: TaskOwner
    transfer: KvTransfer
    notices: NoticeSocket
    tokens: Tokens | None
    heartbeat: Heartbeat
    log: Log | None

    @classmethod
    def build(
        cls,
        settings: Settings,
        library: Library = TRANSFORMERS,
        watch: Watch = UNWATCHED,
        log: Log | None = None,
        clock: Clock | None = None,
    ) -> Proxy:
        """Wire a proxy. Nothing is sent yet. `log`: where access lines go; None: they are records of the logging package.

        `clock`: of all deadlines and durations; None: the real one.

        Raises:
            SettingsError: a file of keys or certificates, or the tokenizer, can't be used.
        """
        credentials = Credentials(settings)
        pool = settings.pools[0]
        limits, deadlines = settings.limits, settings.deadlines
        ledger = Ledger(
            [NodeSpec(node.url, Role(node.role), frozenset(node.sources)) for node in pool.nodes],
            breaker_failures=limits.breaker_failures,
            breaker_cooldown=limits.breaker_cooldown,
        )
        metrics, probe_soon, changes = Metrics(partial(_lists, ledger)), _ProbeSoon(), ChangeHeard()
        observers = Observers([metrics, LogObserver(log), probe_soon, changes, *watch.observers])
        tasks = TaskOwner("fleet")
        # Without keys of clients, theirs go on: ours would open the engines to everybody.
        engine_key = credentials.engine_key if credentials.keys.wanted else _no_key
        deadline_failures = tasks.watch("deadlines")
        clock = clock or Clock(deadline_failures.failed)
        answers = AnswerBudget(limits.max_answer_bytes, limits.max_buffered_answer_bytes)
        clients = {
            node.url: watch.client(
                node.url,
                connect_timeout=deadlines.connect,
                keepalive=limits.engine_keepalive,
                clock=clock,
                room=answers,
                key=partial(engine_key, node.url),
                tls=partial(credentials.engine_tls, node.url),
            )
            for node in pool.nodes
        }
        admin = EngineAdmin(timeout=deadlines.probe, key=credentials.engine_key, tls=credentials.engine_tls)
        auditor = Auditor(ledger, observers)
        block_sizes = {node.url: node.facts.block_size for node in pool.nodes if node.facts.block_size is not None}
        prober = probe_soon.prober = Prober(
            ledger,
            admin,
            auditor,
            observers,
            interval=settings.probes.interval,
            scrape_interval=settings.probes.scrape_interval,
            block_sizes=block_sizes,
            now=clock.now,
        )
        transfer = build_transfer(settings, clock, observers)
        contract = transfer.contract
        custodian = Custodian(contract, ledger, clients, deadlines, observers, clock.now, clock)
        tokenized = tokens(
            pool,
            ledger,
            admin,
            observers,
            clock,
            clock.now,
            deadline=deadlines.tokenize,
            needed=contract.needs_ids,
            own_keys=credentials.keys.wanted,
            library=library,
        )
        changes.canaries = tokenized.canaries if tokenized is not None else None
        engines = ExchangeResources(
            transfer,
            ledger,
            clients,
            custodian,
            deadlines,
            limits.attempts,
            observers,
            auditor,
            clock.now,
            clock,
            answers,
            tokenized.tokenizing if tokenized is not None else None,
        )
        askers = Clients(parsed_networks(settings.listen.trusted_proxies))
        admission = Admission(limits.max_inflight, limits.max_queue, deadlines.queue, observers, clock, askers)
        bounds = BodyBounds(limits.max_prompts, limits.max_body_items)
        workers = readers(limits.body_readers, limits.max_body_bytes)
        bodies = BodyReader(workers, clock, observers, seconds=deadlines.read_body, bounds=bounds)
        service = Service(engines, admission, credentials.keys, bodies)
        passed_legs = PassthroughLegs(
            connect_timeout=deadlines.connect, room=answers, key=engine_key, tls=credentials.engine_tls
        )
        passthrough = Passthrough(engines, admission, service.keys, passed_legs, bodies)
        proxy = cls(
            settings,
            credentials,
            ledger,
            clients,
            admin,
            auditor,
            prober,
            custodian,
            admission,
            bodies,
            service,
            passed_legs,
            passthrough,
            askers,
            BodyBudget(limits.max_buffered_bytes, observers),
            answers,
            Unread(limits.max_buffered_answer_bytes, observers),
            Connections(limits.max_connections, observers),
            clock,
            metrics,
            observers,
            tasks,
            transfer,
            NoticeSocket(
                partial(_heard, transfer.ready, custodian), transfer.ready.undecodable, tasks.watch("notices").failed
            ),
            tokenized,
            Heartbeat(observers),
            log,
        )
        metrics.add_gauges(gauges(proxy))
        if tokenized is not None:
            metrics.add_gauges(tokenized.gauges())
        return proxy

    def start(self) -> None:
        """Begin to hear notices, to probe the engines, and to look at files of keys and certificates.

        Raises:
            SettingsError: the socket for notices can't be bound.
        """
        if self.transfer.contract.needs_receiver or self.transfer.contract.handle_from_notice is not None:
            kv_ready = self.settings.kv_ready
            try:
                self.notices.bind(kv_ready.host, kv_ready.port)
            except OSError as error:
                place = f"{kv_ready.host}:{kv_ready.port}"
                why = error.strerror or error
                raise SettingsError(f"can't bind kv_ready.host:kv_ready.port = {place}: {why}") from None
            logger.info("KV-ready notices are awaited on %s", self.notices.address)
        self.heartbeat.start()
        if self.credentials.follows:
            self.tasks.keep(self.credentials.follow, "follow files")
        if self.tokens is not None:
            self.tasks.keep(self.tokens.canaries.run, "canaries")
        for node in self.ledger.nodes:
            self.tasks.keep(partial(self.prober.run, node), f"probe {node.url}")

    async def drain(self, requests: Collection[asyncio.Task[object]]) -> None:
        """Refuse new requests, wait for those in flight, cut off what is left at the deadline, and see the KV home."""
        deadlines = self.settings.deadlines
        try:
            async with asyncio.timeout(deadlines.drain):
                await self.admission.close()
        except TimeoutError:
            self.observers.notify(DeadlinePassed(Wait.DRAIN.value))
            logger.warning("%d requests were cut off after %g s", self.admission.inflight, deadlines.drain)
            left = list(requests)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        patience = deadlines.abandoned_prefill + deadlines.release
        if self.transfer.contract.ends_whole:  # closing such a prefill would cost its engine its life
            patience = deadlines.prefill + deadlines.kv_ready + deadlines.first_token
        if lost := await self.custodian.settle(patience):
            logger.warning("%d prefills and handles could not be seen home in %g s", lost, patience)

    async def stop(self) -> None:
        """Stop probing and drop all connections."""
        self.heartbeat.stop()
        await self.tasks.settle(0)
        self.notices.close()
        if self.tokens is not None:
            self.tokens.stop()
        for client in self.clients.values():
            client.close()
        await self.bodies.workers.close()
        await self.admin.close()
        await self.legs.close()

    # -- what the web room asks

    def protocol(self) -> type[DataPathProtocol]:
        """Return the protocol class for uvicorn."""
        limits, deadlines = self.settings.limits, self.settings.deadlines
        path = DataPath(
            self.service.generate,
            Identify(self.askers, self.service.keys),
            self.observers,
            Bounds(
                deadlines.client_head,
                deadlines.client_body,
                limits.max_header_bytes,
                Floor(
                    limits.min_read_rate,
                    deadlines.client_write,
                    self.clock,
                    self.askers,
                    self.observers,
                    self.admission.crowds_out,
                ),
                self.askers,
                self.connections,
                self.unread,
            ),
            CorsHeaders(self.settings.listen.cors),
            self.room,
            max_body=limits.max_body_bytes,
        )
        return protocol_class(path)

    def answers(self) -> Answers:
        """Return what the FastAPI routes answer with."""
        passing = PassthroughAsgi(
            self.passthrough.serve,
            Identify(self.askers, self.service.keys),
            self.askers,
            self.room,
            FORWARDED,
            max_body=self.settings.limits.max_body_bytes,
        )
        return Answers(
            self.service.keys.check,
            self.readiness,
            partial(models, self.ledger, self.admin, self.clock.now, own_keys=self.credentials.keys.wanted),
            self.metrics.page,
            passing,
            self.settings.listen.cors,
            self._telemetry if self.settings.pool.connector == "lmcache-mp" else None,
        )

    def _telemetry(self, body: bytes) -> bool:
        found = lmcache_telemetry.notices(body)
        if found is None:
            self.transfer.ready.undecodable()
            return False
        for notice in found:
            self.transfer.ready.heard(notice)
        return True

    def readiness(self) -> Readiness:
        """Tell whether a request could be served now."""
        now = self.clock.now()
        details = [
            *self.tasks.shortcomings(),
            *self.ledger.shortcomings(now),
            *self.auditor.shortcomings(),
            *self.credentials.shortcomings(),
            *(self.tokens.canaries.shortcomings() if self.tokens is not None else ()),
        ]
        reason = "shutting down" if self.admission.closed else self.ledger.not_ready()
        shown = [cut(detail, MAX_DETAIL) for detail in details[:MOST_DETAILS]]
        if len(details) > MOST_DETAILS:
            shown.append(f"and {len(details) - MOST_DETAILS} more")
        return Readiness(cut(reason, MAX_REASON) if reason is not None else None, shown)


def _lists(ledger: Ledger, model: str) -> bool:
    return any(node.serves(model) for node in ledger.nodes)


def _heard(ready: KvReady, custodian: Custodian, notice: Notice) -> None:
    if notice.event is not NoticeEvent.READY or not custodian.orphans.heard(notice):
        (ready if notice.event is NoticeEvent.READY else custodian).heard(notice)


def _no_key(url: str) -> None:
    """Return the key of an engine whose clients bring it themselves."""
