"""Has a running proxy use other settings: all parts that can, or none of them."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from pdproxy.app.compose import Proxy
from pdproxy.app.ledger import policies_of, slo_of
from pdproxy.app.parts import Parts
from pdproxy.app.pool import PoolParts
from pdproxy.settings.changes import put
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings


class LiveSettings:
    """The settings of one proxy. `fit` returns settings whose limits fit the machine,
    `set_log_level` sets that of the log.

    Of the settings that it is given, those that are marked (`Live`) are read: all others are as
    they were at the start.
    """

    def __init__(
        self,
        proxy: Proxy,
        set_log_level: Callable[[str], None],
        fit: Callable[[Settings], Settings] = lambda one: one,
    ) -> None:
        self._proxy = proxy
        self._set_log_level = set_log_level
        self._fit = fit

    def use(self, old: Settings, new: Settings) -> None:
        """Use new settings in place of old ones. If that fails, nothing has changed.

        Raises:
            SettingsError: a file of keys can't be used, or an engine can't work in its pool.
            MembershipError: an engine can't be added.
        """
        proxy = self._proxy
        use_keys = proxy.credentials.prepare(new.auth)
        proxy.sources.use(new.pools)
        use_keys()  # from here nothing fails
        put(proxy.settings, self._fit(new))
        for parts, pool in zip(proxy.pools, new.pools, strict=True):
            configure_pool(parts, pool, proxy.settings)
        configure(proxy)
        proxy.front.configure()
        if new.observe.log_level != old.observe.log_level:
            self._set_log_level(new.observe.log_level)


def configure(proxy: Parts) -> None:
    """Have the parts of the process use its settings as they are now, where they do not read these
    at each use.

    They do something at a change, have other limits elsewhere, or are asked so often that they keep
    the number itself.
    """
    limits = proxy.settings.limits
    proxy.admission.configure()
    proxy.retries.configure()
    proxy.bodies.configure()
    proxy.answer_budget.max_answer = limits.max_answer_bytes
    proxy.answer_budget.max_total = limits.max_buffered_answer_bytes
    proxy.unread_answers.max_bytes = limits.max_buffered_answer_bytes
    proxy.body_budget.resize(limits.max_buffered_bytes)
    proxy.connections.max_open = limits.max_connections
    proxy.route()


def configure_pool(parts: PoolParts, pool: Pool, settings: Settings) -> None:
    """Have the parts of a pool use its settings, and the process's as they are now. See
    `configure`.
    """
    limits, deadlines, health = settings.limits, settings.deadlines, settings.health
    for engine in parts.engines.values():
        engine.client.configure(
            deadlines.connect, limits.engine_keepalive, deadlines.unacknowledged
        )
    if parts.capacity is not None:
        parts.capacity.configure()
    parts.models.models, parts.models.aliases, parts.models.weight = (
        pool.models,
        pool.aliases,
        pool.weight,
    )
    ledger = parts.ledger
    ledger.alone_up_to = pool.alone_up_to
    ledger.breakers.configure(limits.breaker_failures, limits.breaker_cooldown, health.slow_start)
    ledger.transfers.configure(limits.breaker_failures, limits.breaker_cooldown)
    if (
        replace(pool.policy, placement=parts.policy.placement) != parts.policy
        or pool.slo != parts.slo
    ):
        ledger.use_policies(policies_of(pool))
        if ledger.placement is not None:
            ledger.placement.configure(slo_of(pool), refuses=pool.policy.refuse_late)
        if ledger.wanted is not None:
            ledger.wanted.configure(slo_of(pool))
        parts.policy, parts.slo = replace(pool.policy, placement=parts.policy.placement), pool.slo
        parts.service.session_header = parts.session_header()
