"""Makes all parts of a proxy from the settings, and connects them."""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy.app.front import Front
from pdproxy.app.gauges import memory_gauges, state_gauges
from pdproxy.app.parts import Parts
from pdproxy.app.pool import PoolParts
from pdproxy.app.readiness import ReadinessCheck
from pdproxy.app.tokens import TRANSFORMERS, Library
from pdproxy.app.watch import UNWATCHED, Watch
from pdproxy.fleet.kv_events import Index
from pdproxy.kit.clock import Clock
from pdproxy.observe.logs import Log
from pdproxy.settings.schema import Settings


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
    ) -> Proxy:
        """Make a proxy. Nothing is sent yet. `log`: where access lines go; None: they are records of the logging package.

        `clock`: of all deadlines and durations; None: the real one. `index`: takes KV events if no policy does.

        Raises:
            SettingsError: a file of keys or certificates, a profile or the tokenizer can't be used.
        """
        proxy = cls.of(settings, library, watch, log, clock)
        settings = proxy.settings
        pool = PoolParts.of(settings, proxy, index)
        proxy.pools.append(pool)
        proxy.observers.add(*watch.observers)
        credentials, metrics = proxy.credentials, proxy.metrics
        metrics.add_gauges(
            memory_gauges(
                proxy.connections,
                proxy.body_budget,
                proxy.answer_budget,
                proxy.unread_answers,
                pool.resources.records,
            )
        )
        wrong = [proxy.tasks.shortcomings, credentials.shortcomings, *pool.shortcomings]
        readiness = ReadinessCheck(proxy.admission, pool.ledger, proxy.now, credentials.why_no_key, wrong)
        metrics.add_gauges(state_gauges(readiness.state, settings.pool.connector))
        proxy.readiness = readiness
        proxy.front = Front(
            settings=settings,
            keys=credentials.keys,
            clients=proxy.known_clients,
            admission=proxy.admission,
            service=pool.service,
            passthrough=pool.passthrough,
            bodies=proxy.body_budget,
            unread_answers=proxy.unread_answers,
            connections=proxy.connections,
            clock=proxy.clock,
            observers=proxy.observers,
            readiness=readiness,
            models=pool.models,
            metrics=metrics,
            telemetry=pool.notices.telemetry,
            decisions=pool.decisions,
        )
        return proxy
