"""Makes all parts of a proxy from the settings, and connects them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pdproxy.app.capacity import PoolCapacity, Scraped
from pdproxy.app.continuations import build_continuing
from pdproxy.app.credentials import Credentials
from pdproxy.app.engines import EngineSetup, Profiles, build_ledger, build_outliers, no_key
from pdproxy.app.front import Front
from pdproxy.app.gauges import memory_gauges, placement_gauges, process_gauges, request_gauges, state_gauges
from pdproxy.app.heartbeat import Heartbeat
from pdproxy.app.kv_events import build_kv_events
from pdproxy.app.membership import build_membership
from pdproxy.app.notices import build_notices
from pdproxy.app.parts import Parts
from pdproxy.app.prefixes import build_knowledge, build_prefixes
from pdproxy.app.readiness import ReadinessCheck, ledger_source
from pdproxy.app.registrations import build_registrations
from pdproxy.app.share import ALONE, Alone, Share
from pdproxy.app.tokens import TRANSFORMERS, Library, build_tokens
from pdproxy.app.transfer import build_transfer, build_turns
from pdproxy.app.watch import UNWATCHED, Watch
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.bootstrap import Bootstraps
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.exclusions import Exclusions
from pdproxy.fleet.gauges import MetricsOfEngines, engine_gauges
from pdproxy.fleet.health_canary import HealthCanary
from pdproxy.fleet.kv_events import Index
from pdproxy.fleet.models import models
from pdproxy.fleet.prober import Prober
from pdproxy.fleet.stalls import Stalls
from pdproxy.kit.clock import Clock
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.observe.logs import Log, LogObserver
from pdproxy.observe.metrics import Metrics
from pdproxy.scheduling.prefix.knowledge import FedIndex
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.dispatch.decisions import Decisions
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.serving.dispatch.retry_budget import RetryBudget
from pdproxy.serving.kv.gauges import kv_gauges, turn_gauges
from pdproxy.serving.kv.lost_pushes import LostPushes
from pdproxy.serving.request.body_reader import BodyReader, readers
from pdproxy.serving.request.passthrough import Passthrough
from pdproxy.serving.request.service import Service
from pdproxy.settings.crosscheck import parsed_networks
from pdproxy.settings.schema import Settings
from pdproxy.transfer.peers import PeerSource
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.passthrough import PassthroughLegs
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connections import Connections
from pdproxy.web.unread_answers import UnreadAnswers
from pdproxy.wire.body_bounds import Bounds as BodyBounds


@dataclass(slots=True, kw_only=True)
class Proxy(Parts):
    """One proxy, made from its settings."""

    @classmethod
    def build(
        cls,
        settings: Settings,
        library: Library = TRANSFORMERS,
        watch: Watch = UNWATCHED,
        log: Log | None = None,
        clock: Clock | None = None,
        index: Index | None = None,
        share: Share | Alone = ALONE,
    ) -> Proxy:
        """Make a proxy. Nothing is sent yet. `log`: where access lines go; None: they are records of the logging package.

        `clock`: of all deadlines and durations; None: the real one. `index`: takes KV events if no policy does. `share`: what
        this worker shares with others.

        Raises:
            SettingsError: a file of keys or certificates, a profile or the tokenizer can't be used.
        """
        pool, limits, deadlines, probes = settings.pool, settings.limits, settings.deadlines, settings.probes
        credentials = Credentials(settings)
        own_keys = credentials.keys.wanted

        profiles = Profiles(pool.profile)
        knowledge = build_knowledge(pool)
        cached = knowledge.cached if knowledge is not None else None
        ledger = build_ledger(settings, profiles, cached, watch.chance, share.ledger)
        engines = EngineRegistry(ledger)
        metrics = Metrics(engines.lists)
        engines.watch(MetricsOfEngines(metrics))
        lines = LogObserver(log)
        observers = Observers([metrics, lines])
        tasks = TaskOwner("fleet", now=watch.now)
        deadline_failures = tasks.watch("deadlines")
        clock = clock or Clock(deadline_failures.failed, watch.now)
        now = clock.now

        answer_budget = AnswerBudget(limits.max_answer_bytes, limits.max_buffered_answer_bytes)
        setup = EngineSetup(settings, credentials, engines, clock, answer_budget, watch.client, profiles)
        admin = EngineAdmin(timeout=deadlines.probe, key=engines.key, tls=engines.tls, connector=watch.connector)
        auditor = Auditor(engines, ledger, observers)
        scraped = Scraped(auditor)
        derenders = bool(limits.continuations) and settings.continuations.parsed == "auto"
        prober = Prober(engines, ledger, admin, scraped, observers, tasks, probes, now, derenders=derenders)

        transfer = build_transfer(settings, engines, clock, observers)
        canary = HealthCanary(
            admin, observers, transfer.contract.capabilities.canary_on, settings.health.canary_timeout
        )
        stalls = Stalls(
            engines, ledger, canary, admin.scrape, observers, tasks, clock, settings.health, deadlines.prefill
        )
        outliers = build_outliers(settings.outliers)
        exclusions = Exclusions(engines, ledger, outliers, observers, tasks, now, settings.outliers.interval)
        bootstraps = Bootstraps(engines, ledger, admin.bootstrap, observers, tasks, probes, now, transfer.contract)
        custodian = share.custodian(transfer.contract, ledger, engines.known, deadlines, observers, now, clock)
        ledger.when_lost(LostPushes(custodian, engines.known, admin.scrape, clock, observers).lost)
        engines.keep_known(custodian.named)
        turns = build_turns(settings, transfer.contract, ledger, engines, clock, observers)
        notices = build_notices(settings.kv_ready, transfer, custodian, turns, tasks)
        registrations = build_registrations(settings, engines, ledger, observers, clock, tasks)
        kv_index = FedIndex(knowledge) if knowledge is not None else index
        kv_events = build_kv_events(
            settings, kv_index, setup.kv_events, engines, admin, observers, metrics, clock, tasks
        )
        prefixes = build_prefixes(knowledge, engines, ledger, observers, metrics, now, kv_events)
        needed, wanted = transfer.contract.needs_ids, turns is not None or knowledge is not None
        tokens = build_tokens(
            settings, engines, admin, observers, clock, needed=needed, wanted=wanted, own_keys=own_keys, library=library
        )
        if transfer.contract.capabilities.peers_from is PeerSource.BOOTSTRAP:
            observers.add(bootstraps)  # not for others: each event costs
        observers.add(prober, *([tokens.canaries] if tokens is not None else []), *watch.observers)

        decisions = Decisions(pool.placement if ledger.placement is not None else None, now)
        known_clients = Clients(parsed_networks(settings.listen.trusted_proxies))
        admission = share.admission(
            limits.max_inflight,
            limits.max_queue,
            deadlines.queue,
            observers,
            clock,
            known_clients,
            limits.max_inflight_tokens,
            settings.overload.output_weight,
            by_priority=settings.overload.priority == "within",
        )
        if limits.engine_requests:
            scraped.capacity = PoolCapacity(limits, engines, admission)
            engines.watch(scraped.capacity)
            observers.add(scraped.capacity)
            metrics.add_gauges(scraped.capacity.gauges())
        retries = RetryBudget(
            limits.retry_share,
            limits.min_retries,
            limits.max_inflight,
            lambda: admission.inflight,
            clock,
            deadlines.retry,
        )
        continuing = build_continuing(settings, engines, admin, observers, clock, own_keys=own_keys)
        resources = ExchangeResources(
            transfer=transfer,
            ledger=ledger,
            engines=engines,
            custodian=custodian,
            deadlines=deadlines,
            attempts=limits.attempts,
            observers=observers,
            auditor=auditor,
            now=now,
            clock=clock,
            answer_budget=answer_budget,
            retries=retries,
            outliers=outliers,
            tokenizing=tokens.tokenizing if tokens is not None else None,
            turns=turns,
            decisions=decisions,
            prefixes=prefixes.of_requests if prefixes is not None else None,
            continuations=limits.continuations,
            records=continuing.records if continuing is not None else None,
            detokenizing=continuing.detokenizing if continuing is not None else None,
            is_alive=continuing.is_alive if continuing is not None else None,
            derendering=continuing.derendering if continuing is not None else None,
        )
        bodies = BodyReader(
            readers(limits.body_readers, limits.max_body_bytes),
            clock,
            observers,
            seconds=deadlines.read_body,
            bounds=BodyBounds(limits.max_prompts, limits.max_body_items),
        )
        legs = PassthroughLegs(
            connect_timeout=deadlines.connect,
            budget=answer_budget,
            key=engines.key if own_keys else no_key,
            tls=engines.tls,
            connector=watch.connector,
        )
        body_budget = BodyBudget(limits.max_buffered_bytes, observers)
        unread_answers = UnreadAnswers(limits.max_buffered_answer_bytes, observers)
        connections = Connections(limits.max_connections, observers)
        wrong = [tasks.shortcomings, ledger_source(ledger, now), auditor.shortcomings, credentials.shortcomings]
        wrong.append(lambda: custodian.stuck.shortcomings(now()))
        metrics.add_gauges(engine_gauges(engines, auditor, stalls, exclusions, now))
        metrics.add_gauges(kv_gauges(custodian, transfer.ready, transfer.buffers))
        metrics.add_gauges(request_gauges(admission, bodies, retries))
        metrics.add_gauges(memory_gauges(connections, body_budget, answer_budget, unread_answers, resources.records))
        metrics.add_gauges(process_gauges(tasks, log, lines))
        if ledger.placement is not None:
            metrics.add_gauges(placement_gauges(ledger.placement))
        if turns is not None:
            engines.keep_known(turns.named)
            wrong.append(turns.shortcomings)
            metrics.add_gauges(turn_gauges(turns))
        wrong.append(bootstraps.shortcomings)
        if tokens is not None:
            wrong.append(tokens.canaries.shortcomings)
            metrics.add_gauges(tokens.gauges())
        if kv_events is not None:
            wrong.append(kv_events.sources.shortcomings)
        if registrations is not None:
            observers.add(registrations.known)
            wrong.append(registrations.known.shortcomings)

        quotas = share.quotas(credentials.keys.limits, now)
        passthrough = Passthrough(resources, admission, credentials.keys, legs, bodies, quotas)
        session_header = pool.policy.session_header if ledger.needs_details else None
        service = Service(resources, admission, credentials.keys, bodies, passthrough, quotas, session_header)
        readiness = ReadinessCheck(admission, ledger, now, credentials.why_no_key, wrong)
        metrics.add_gauges(state_gauges(readiness.state, pool.connector))
        front = Front(
            settings=settings,
            keys=credentials.keys,
            clients=known_clients,
            admission=admission,
            service=service,
            passthrough=passthrough,
            bodies=body_budget,
            unread_answers=unread_answers,
            connections=connections,
            clock=clock,
            observers=observers,
            shown=share.shown(admission, readiness, metrics),
            models=partial(models, engines, admin, now, own_keys=own_keys),
            telemetry=notices.telemetry,
            decisions=decisions,
        )
        membership = build_membership(
            setup, engines, ledger, outliers, custodian, turns, observers, tasks, now, deadlines.engine_drain
        )
        readiness.show(membership.shortcomings)
        return cls(
            settings=settings,
            credentials=credentials,
            ledger=ledger,
            engines=engines,
            setup=setup,
            membership=membership,
            admin=admin,
            prober=prober,
            stalls=stalls,
            exclusions=exclusions,
            transfer=transfer,
            custodian=custodian,
            turns=turns,
            notices=notices,
            registrations=registrations,
            kv_events=kv_events,
            prefixes=prefixes,
            tokens=tokens,
            known_clients=known_clients,
            admission=admission,
            bodies=bodies,
            service=service,
            legs=legs,
            front=front,
            body_budget=body_budget,
            answer_budget=answer_budget,
            unread_answers=unread_answers,
            connections=connections,
            readiness=readiness,
            metrics=metrics,
            observers=observers,
            tasks=tasks,
            heartbeat=Heartbeat(observers),
        )
