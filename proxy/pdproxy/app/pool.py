"""The parts of one pool: its engines, how they are chosen and watched, and what serves requests by
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pdproxy.app.bootstraps import build_bootstraps
from pdproxy.app.capacity import PoolCapacity, ProxyPlaces
from pdproxy.app.continuations import build_continuing
from pdproxy.app.demand import PoolDemand
from pdproxy.app.engines import EngineSetup, Profiles, no_key
from pdproxy.app.gauges import show_placement
from pdproxy.app.health import build_watching
from pdproxy.app.kv_events import ReadingKvEvents, build_kv_events
from pdproxy.app.ledger import build_ledger
from pdproxy.app.losses import build_retrying
from pdproxy.app.membership import build_membership
from pdproxy.app.notices import Noticing, build_notices
from pdproxy.app.prefixes import KnowingPrefixes, build_knowledge, build_prefixes
from pdproxy.app.process import Process
from pdproxy.app.readiness import ledger_source
from pdproxy.app.registrations import Registering, build_registrations
from pdproxy.app.sockets import BoundHere, Sockets
from pdproxy.app.tokens import Tokens, build_tokens
from pdproxy.app.transfer import build_buffers, build_transfer, build_turns
from pdproxy.app.waits import build_waits
from pdproxy.app.watching import Watching
from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.deciding.turns import PoolTurns
from pdproxy.fleet.bootstrap import Bootstraps
from pdproxy.fleet.down_watch import DownWatch
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.gauges import MetricsOfEngines, show_engines, show_revisions, show_splits
from pdproxy.fleet.kv_events import Index
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.slow_engines import SlowEngines
from pdproxy.fleet.transfers import Transfers
from pdproxy.observe.prompt_shares import PROMPT_TOKENS, PromptShares
from pdproxy.observe.slow import MOVES_NOT, PROBLEMS
from pdproxy.scheduling.decisions import Decisions
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.placement import Placement
from pdproxy.scheduling.prefix.knowledge import FedIndex
from pdproxy.scheduling.scheduler import Scheduler
from pdproxy.serving.access.models import PoolModels
from pdproxy.serving.dispatch.fingerprint import keyed
from pdproxy.serving.dispatch.resources import ExchangeResources, KvTransfer
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.ended_leases import EndedLeases
from pdproxy.serving.kv.open_turns import OpenTurns
from pdproxy.serving.request.passthrough import Passthrough
from pdproxy.serving.request.service import Service
from pdproxy.settings.pools import PoolPolicy, PoolSlo
from pdproxy.settings.schema import Settings
from pdproxy.transfer.encoders import CONTRACTS
from pdproxy.transfer.peers import PeerSource
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.upstream.passthrough import PassthroughLegs


@dataclass(slots=True, kw_only=True)
class PoolParts:
    """The parts of one pool. `policy`, `slo`: its settings in force.

    `shortcomings`: each returns sentences on what is wrong with it; `scaling`: the one of these
    on engines that are missing. `turns`: None in a process that does not keep them.
    """

    process: Process
    name: str
    models: PoolModels
    policy: PoolPolicy
    slo: PoolSlo
    ledger: Ledger
    engines: EngineRegistry
    setup: EngineSetup
    membership: Membership
    admin: EngineAdmin
    capacity: PoolCapacity | None
    watching: Watching
    bootstraps: Bootstraps
    transfer: KvTransfer
    buffers: ReceiveBuffers
    custodian: Custodian
    open_turns: OpenTurns | None
    turns: PoolTurns | None
    notices: Noticing
    registrations: Registering | None
    kv_events: ReadingKvEvents | None
    prefixes: KnowingPrefixes | None
    tokens: Tokens | None
    decisions: Decisions | None
    resources: ExchangeResources
    legs: PassthroughLegs
    passthrough: Passthrough
    service: Service
    slow: SlowEngines
    scaling: Callable[[], Sequence[str]]
    shortcomings: Sequence[Callable[[], Sequence[str]]]

    @classmethod
    def of(cls, settings: Settings, process: Process, index: Index | None = None) -> PoolParts:
        """Make the parts of the pool of these settings. Arguments and errors are those of
        `Proxy.build`.
        """
        pool, limits, deadlines, probes = (
            settings.pool,
            settings.limits,
            settings.deadlines,
            settings.probes,
        )
        credentials, watch, metrics, observers = (
            process.credentials,
            process.watch,
            process.metrics,
            process.observers,
        )
        tasks, clock, now = process.tasks, process.clock, process.now
        own_keys, own = credentials.keys.wanted, process.share.pool(len(process.registries))
        sockets: Sockets | None = BoundHere() if own is None else own.sockets

        profiles = Profiles(pool.profile)
        knowledge = build_knowledge(pool, several=settings.replicas.several)
        cached = knowledge.cached if knowledge is not None else None
        ledger = build_ledger(settings, profiles, cached, watch.chance, own)
        tracing = process.tracing
        engines = (
            EngineRegistry(ledger) if tracing is None else EngineRegistry(ledger, tracing.open_legs)
        )
        process.registries.append(engines)
        models = PoolModels(
            lambda: ledger.engines, pool.models, pool.aliases, pool.weight, pool.name
        )
        process.models.pools.append(models)
        ledger.when_changed(process.models.changed)
        engines.watch(MetricsOfEngines(metrics))

        client = watch.client if tracing is None else tracing.client(watch.client)
        setup = EngineSetup(
            settings, credentials, engines, clock, process.answer_budget, client, profiles
        )
        networks = settings.engines.allowed
        admin = EngineAdmin(
            deadlines=deadlines,
            key=engines.key,
            tls=engines.tls,
            connector=watch.connector,
            networks=networks,
            budget=process.answer_budget,
        )
        transfer = build_transfer(settings, engines, clock, observers)
        buffers = build_buffers(settings, engines, clock, observers)
        watching = build_watching(settings, process, ledger, engines, admin, transfer.contract, own)
        probing, outliers, auditor = watching.probing, watching.outliers, watching.auditor
        bootstraps = build_bootstraps(
            process, own, engines, ledger, admin, probes, transfer.contract
        )
        custodian = Custodian(
            transfer.contract,
            ledger,
            engines.known,
            deadlines,
            observers,
            now,
            clock,
            transfer.hosts,
            None if own is None else own.live_custodies(transfer.contract),
        )
        if own is not None:
            own.share_custody(custodian, engines)
        engines.keep_known(custodian.named)
        engines.when_forgotten(
            lambda url: None if custodian.stuck.holds(url) else ledger.runs.forget(url)
        )
        open_turns, turns = build_turns(
            settings, transfer.contract, ledger, engines, clock, observers, own, transfer.hosts
        )
        notices = build_notices(settings, transfer, custodian, open_turns, process, sockets, own)
        registrations = build_registrations(
            settings, engines, ledger, process, sockets, own, transfer.hosts
        )
        kv_index = FedIndex(knowledge) if knowledge is not None else index
        kv_events = build_kv_events(
            settings, kv_index, setup.kv_events, engines, admin, process, sockets
        )
        chooses = own is None or own.chooses
        prefixes = build_prefixes(
            knowledge, engines, ledger, observers, now, kv_events, chooses=chooses
        )
        needed, wanted = (
            transfer.contract.needs_ids,
            open_turns is not None or knowledge is not None,
        )
        tokens = build_tokens(
            settings,
            engines,
            admin,
            observers,
            clock,
            own,
            needed=needed,
            wanted=wanted,
            own_keys=own_keys,
            library=process.library,
        )
        if prefixes is not None and chooses and pool.tokenize == "auto":
            prefixes.of_requests.takes_beginnings = not needed and open_turns is None
        if transfer.contract.capabilities.peers_from is PeerSource.BOOTSTRAP:
            observers.add(bootstraps)  # not for others: each event costs
        observers.add(*([probing.prober] if probing is not None else []))
        observers.add(*([tokens.canaries] if tokens is not None else []))

        shown = settings.listen.admin is not None
        decisions = (
            Decisions(pool.placement if ledger.placement is not None else None, now)
            if shown
            else None
        )
        capacity: PoolCapacity | None = None
        if (limits.engine_requests or limits.engine_tokens) and probing is not None:
            places = process.places
            places = places.of(engines) if isinstance(places, ProxyPlaces) else places
            assert places is not None  # whoever chooses engines bounds their requests
            capacity = PoolCapacity(limits, engines, places, settings.replicas.at_first)
            probing.scraped.capacity = capacity
            if own is not None:
                own.capacity = capacity
            engines.watch(capacity)
            observers.add(capacity)
            capacity.show(observers)
        works, is_push_lost = build_waits(
            settings.health, process, ledger, engines, admin, watching, custodian, own
        )
        is_alive = partial(admin.answers, path="/health")
        transfers = Transfers(ledger, observers, now)
        if own is None or own.chooses:
            transfers.start()
        slow = SlowEngines(engines, now, partial(_late, ledger.placement))
        engines.watch(slow)
        observers.show(PROBLEMS, slow.samples)
        observers.show(PROBLEMS, lambda: [((MOVES_NOT.name,), len(ledger.transfers.faults))])
        if probing is not None:
            probing.scraped.slow = slow
        local = LocalScheduler(
            ledger, outliers, buffers, transfers, observers, now, decisions, knowledge, turns, slow
        )
        scheduler: Scheduler = local
        if own is not None:
            scheduler = own.scheduler(local, ledger, buffers, engines, observers)
        custodian.when_unread = lambda prefill, decode: scheduler.kv_failed(prefill, decode, now())
        retrying = build_retrying(settings, process, local, ledger, engines, admin, own)
        shares = PromptShares(now)
        observers.show(PROMPT_TOKENS, shares.samples)
        continuing = build_continuing(settings, engines, admin, observers, clock, own_keys=own_keys)
        resources = ExchangeResources(
            transfer=transfer,
            encoders=CONTRACTS[settings.pool.ec_connector],
            scheduler=scheduler,
            states=ledger,
            engines=engines,
            custodian=custodian,
            deadlines=deadlines,
            limits=limits,
            observers=observers,
            auditor=auditor,
            now=now,
            clock=clock,
            answer_budget=process.answer_budget,
            slot=retrying.slot,
            engines_change=retrying.engines_change,
            lost=retrying.lost,
            suspects=retrying.suspects,
            fingerprint=keyed(process.share.cache_secret),
            down_watch=DownWatch(engines, clock, lambda: deadlines.between_tokens),
            works=works,
            is_push_lost=is_push_lost,
            lease_may_have_ended=EndedLeases(engines.known, admin.scrape).may_have,
            is_alive=is_alive,
            shares=shares,
            tokenizing=tokens.tokenizing if tokens is not None else None,
            turns=open_turns,
            prefixes=prefixes.of_requests if prefixes is not None else None,
            records=continuing.records if continuing is not None else None,
            detokenizing=continuing.detokenizing if continuing is not None else None,
            derendering=continuing.derendering if continuing is not None else None,
        )
        new_legs = PassthroughLegs if tracing is None else tracing.passthrough_legs
        legs = new_legs(
            deadlines=deadlines,
            budget=process.answer_budget,
            key=engines.key if own_keys else no_key,
            tls=engines.tls,
            connector=watch.connector,
            networks=networks,
        )
        wrong = [ledger_source(ledger, now), auditor.shortcomings, slow.shortcomings]
        wrong.append(retrying.shortcomings)
        wrong.append(lambda: custodian.stuck.shortcomings(now()))
        if ledger.placement is not None:
            show_placement(observers, ledger.placement)
        scaling: Callable[[], Sequence[str]] = list
        if ledger.wanted is not None and probing is not None:
            process.wanted.append(ledger.wanted)
            demand = PoolDemand(pool.name, ledger, process.wanted, process.admission, now)
            engines.watch(demand)
            demand.show(observers)
            probing.scraped.demand = demand
            scaling = demand.scaling
            wrong.append(scaling)
        if turns is not None:
            engines.keep_known(turns.named)
            wrong.append(turns.shortcomings)
        wrong.append(bootstraps.shortcomings)
        if tokens is not None:
            wrong.append(tokens.canaries.shortcomings)
        if kv_events is not None:
            wrong.append(kv_events.sources.shortcomings)
        if registrations is not None:
            observers.add(registrations.known)
            wrong.append(registrations.known.shortcomings)

        admission, keys, bodies, quotas = (
            process.admission,
            credentials.keys,
            process.bodies,
            process.quotas,
        )
        passthrough = Passthrough(resources, admission, keys, legs, bodies, quotas)
        service = Service(resources, admission, keys, bodies, passthrough, quotas)
        membership = build_membership(
            setup, engines, ledger, outliers, custodian, turns, observers, tasks, now, deadlines
        )
        show_engines(observers, engines, membership.members, now, pool.name)
        show_revisions(observers, ledger.revisions, pool.name)
        show_splits(observers, ledger, now, pool.name)
        wrong.append(membership.shortcomings)
        if own is not None:
            wrong.append(own.share_members(membership, engines))
        parts = cls(
            process=process,
            name=pool.name,
            models=models,
            policy=pool.policy,
            slo=pool.slo,
            ledger=ledger,
            engines=engines,
            setup=setup,
            membership=membership,
            admin=admin,
            capacity=capacity,
            watching=watching,
            bootstraps=bootstraps,
            transfer=transfer,
            buffers=buffers,
            custodian=custodian,
            open_turns=open_turns,
            turns=turns,
            notices=notices,
            registrations=registrations,
            kv_events=kv_events,
            prefixes=prefixes,
            tokens=tokens,
            decisions=decisions,
            resources=resources,
            legs=legs,
            passthrough=passthrough,
            service=service,
            slow=slow,
            scaling=scaling,
            shortcomings=wrong,
        )
        service.pool = passthrough.pool = pool.name
        service.session_header = parts.session_header()
        return parts

    def session_header(self) -> str | None:
        """Return the header that names a conversation, None where nothing needs it."""
        return self.policy.session_header if self.ledger.needs_details else None

    def bind(self) -> None:
        """Bind the sockets for engines' messages.

        Raises:
            SettingsError: one of them can't be bound.
        """
        self.notices.start()
        if self.registrations is not None:
            self.registrations.start()
        if self.kv_events is not None:
            self.kv_events.start()

    def start(self) -> None:
        """Start all background tasks."""
        tasks = self.process.tasks
        if self.prefixes is not None:
            self.prefixes.start(tasks)
        if self.tokens is not None:
            tasks.keep(self.tokens.canaries.run, "canaries")
        self.watching.start()

    async def stop(self) -> None:
        """Drop all connections, after the end of the tasks."""
        self.notices.close()
        await self.custodian.settle(0)  # a notice may have come behind the drain
        if self.registrations is not None:
            self.registrations.close()
        if self.kv_events is not None:
            self.kv_events.stop()
        if self.prefixes is not None:
            self.prefixes.stop()
        if self.tokens is not None:
            self.tokens.stop()
        for engine in self.engines.known.values():
            engine.client.close()
        await self.admin.close()
        await self.legs.close()


def _late(placement: Placement | None) -> Mapping[str, float]:
    """Return how many times as long as its placement predicts prompts take, by an engine's URL."""
    state = None if placement is None else placement.state()
    return {} if state is None else state.late
