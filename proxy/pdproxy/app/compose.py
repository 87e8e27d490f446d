"""Makes all parts of a proxy from the settings, and connects them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from pdproxy.app.credentials import CERTIFICATE_END
from pdproxy.app.drained import DrainCheck
from pdproxy.app.front import Front
from pdproxy.app.gauges import show_memory, show_state
from pdproxy.app.parts import Parts
from pdproxy.app.pool import PoolParts
from pdproxy.app.readiness import PoolState, ReadinessCheck
from pdproxy.app.revoking import Revoking
from pdproxy.app.share import ALONE, Share, SoleProcess
from pdproxy.app.sources import Sources
from pdproxy.app.tokens import TRANSFORMERS, Library
from pdproxy.app.watch import UNWATCHED, Watch
from pdproxy.fleet.kv_events import Index
from pdproxy.kit.clock import Clock
from pdproxy.observe.held_loop import HeldLoop
from pdproxy.observe.logs import Log
from pdproxy.observe.slow import PROBLEMS
from pdproxy.observe.slow_clients import SlowClients
from pdproxy.serving.access.models import PoolModels
from pdproxy.settings.errors import naming_pool
from pdproxy.settings.schema import Settings


@dataclass(slots=True, kw_only=True)
class Proxy(Parts):
    """One proxy, made from its settings."""

    sources: Sources = field(init=False)

    @classmethod
    def build(
        cls,
        settings: Settings,
        library: Library = TRANSFORMERS,
        watch: Watch = UNWATCHED,
        log: Log | None = None,
        clock: Clock | None = None,
        index: Index | None = None,
        share: Share | SoleProcess = ALONE,
    ) -> Proxy:
        """Make a proxy. Nothing is sent yet. `log`: where access lines go; None: they are records
        of the logging package.

        `clock`: of all deadlines and durations; None: the real one. `index`: takes KV events if no
        policy does. `share`: what this worker shares with others.

        Raises:
            SettingsError: a file of keys or certificates, a profile or the tokenizer can't be used.
        """
        proxy = cls.of(settings, library, watch, log, clock, share)
        settings = proxy.settings
        for at, own in enumerate(settings.pools):
            with naming_pool(at, own.name, pools=len(settings.pools)):
                proxy.pools.append(
                    PoolParts.of(settings.of_pool(own), proxy, index if at == 0 else None)
                )
        proxy.sources = Sources(proxy)
        proxy.observers.add(*watch.observers)
        proxy.route()
        credentials, metrics, pools = proxy.credentials, proxy.metrics, proxy.pools
        records = [pool.resources.records for pool in pools if pool.resources.records is not None]
        budgets = proxy.body_budget, proxy.answer_budget, proxy.unread_answers
        show_memory(proxy.observers, proxy.connections, *budgets, records)
        states = [
            PoolState(
                pool.name,
                pool.ledger,
                pool.resources.shares,
                pool.shortcomings,
                partial(_weight, pool.models),
            )
            for pool in pools
        ]
        wrong = [proxy.tasks.shortcomings, credentials.shortcomings]
        proxy.observers.show(CERTIFICATE_END, credentials.ends)
        for watched in (SlowClients(proxy.now), HeldLoop()):
            proxy.observers.add(watched)
            proxy.observers.show(PROBLEMS, watched.samples)
            wrong.append(watched.shortcomings)
        readiness = ReadinessCheck(
            proxy.admission, states, proxy.now, credentials.why_no_key, wrong
        )
        show_state(proxy.observers, readiness.state, [pool.connector for pool in settings.pools])
        proxy.readiness = readiness
        credentials.then.append(
            Revoking(credentials.keys, proxy.connections, credentials.keys.ends).look
        )
        proxy.front = Front(
            settings=settings,
            keys=credentials.keys,
            admin_keys=credentials.admin_keys,
            clients=proxy.known_clients,
            cache_salts=proxy.cache_salts,
            admission=proxy.admission,
            service=proxy.service,
            passthrough=pools[0].passthrough,
            session_headers=proxy.session_headers,
            bodies=proxy.body_budget,
            unread_answers=proxy.unread_answers,
            connections=proxy.connections,
            clock=proxy.clock,
            observers=proxy.observers,
            models=proxy.list_models,
            readiness=readiness,
            shown=share.shown(proxy.admission, readiness, metrics, DrainCheck(pools)),
            wrong_keys=proxy.wrong_keys,
            traced=None if proxy.tracing is None else proxy.tracing.requests,
        )
        return proxy


def _weight(models: PoolModels) -> float:
    return models.weight
