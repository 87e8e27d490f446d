"""Wiring of a pool's ledger: its policies, its placement, and its kind: for one proxy or several
replicas, and in the process that chooses engines or another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from pdproxy.app.engines import Profiles
from pdproxy.app.share import PoolShare
from pdproxy.scheduling import placements, policies
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.placement import Placement
from pdproxy.scheduling.policy import Cached, PolicyFactory
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy.scheduling.slo import Slo
from pdproxy.scheduling.wanted_engines import WantedEngines
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.transfer.registry import entry_of


def policies_of(pool: Pool) -> dict[Role, PolicyFactory]:
    """Return what makes the policies of a pool's roles."""
    return {
        Role.PREFILL: policies.POLICIES[pool.policy.prefill],
        Role.DECODE: policies.POLICIES[pool.policy.decode],
    }


def slo_of(pool: Pool) -> Slo:
    """Return a pool's objective."""
    slo = pool.slo
    return Slo(slo.ttft, slo.tpot, slo.gap, slo.long_prompt, slo.long_weight)


def build_ledger(
    settings: Settings,
    profiles: Profiles,
    cached: Cached | None = None,
    chance: Callable[[], float] = random.random,
    own: PoolShare | None = None,
) -> Ledger:
    """Return the ledger of the pool. It has no engines yet: the registry adds them. `cached`: the
    index of prefixes.

    `own`: this process's part of the pool, None where there is one process. In one that does not
    choose engines, the ledger only knows their states.
    """
    limits, pool = settings.limits, settings.pool
    chooses = own is None or own.chooses
    options = LedgerOptions(
        breaker_failures=limits.breaker_failures,
        breaker_cooldown=limits.breaker_cooldown,
        slow_start=settings.health.slow_start,
        policies=policies_of(pool),
        alone=[Role(name) for name in entry_of(pool.connector).capabilities.alone_on],
        placement=_placement(settings, profiles, cached, chance) if chooses else None,
        placed_elsewhere=not chooses and pool.placement in placements.PLACEMENTS,
        chance=chance,
        cached=cached,
        windows=bool(limits.engine_requests),
        wanted=WantedEngines(profiles.size, slo_of(pool)) if chooses else None,
    )
    made: Ledger
    if settings.replicas.several and chooses:
        count, max_age = settings.replicas.at_first, partial(_longest, settings)
        made = ReplicaLedger([], options, replicas=count, max_age=max_age)
    else:
        made = Ledger([], options)
    made.alone_up_to = pool.alone_up_to
    return made


def _placement(
    settings: Settings,
    profiles: Profiles,
    cached: Cached | None,
    chance: Callable[[], float],
) -> Placement | None:
    """Return what decides whether a prompt is split, None where it is split whenever it can be."""
    pool, replicas = settings.pool, settings.replicas
    make = placements.PLACEMENTS.get(pool.placement)
    if make is None:
        return None
    context = placements.PlacementContext(
        slo=slo_of(pool),
        refuse_late=pool.policy.refuse_late,
        hardware=profiles.hardware,
        fitted=profiles.fitted,
        chunk=profiles.chunk,
        cached=cached,
        replicas=replicas.at_first if replicas.several else None,
        chance=chance,
    )
    return make(context)


def _longest(settings: Settings) -> float:
    """Return for how many seconds an engine's report counts: until three in a row should have
    come.
    """
    probes = settings.probes
    return 3 * max(probes.interval, probes.scrape_interval) + settings.deadlines.probe
