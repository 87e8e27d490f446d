"""Which kind of ledger a pool has: that of the only proxy in front of its engines, or that of one of several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy.settings.schema import Settings


def kind_of_ledger(settings: Settings) -> Callable[..., Ledger]:
    """Return what makes the ledger of a pool."""
    replicas = settings.replicas
    if not replicas.several:
        return Ledger
    return partial(ReplicaLedger, replicas=replicas.at_first, max_age=partial(_longest, settings))


def _longest(settings: Settings) -> float:
    """Return for how many seconds an engine's report counts: until three in a row should have come."""
    probes = settings.probes
    return 3 * max(probes.interval, probes.scrape_interval) + settings.deadlines.probe
