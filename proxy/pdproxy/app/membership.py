"""Wiring of membership: what is forgotten of engines that have left, and what happens when one
begins to leave.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.app.engines import EngineSetup
from pdproxy.deciding.turns import PoolTurns
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.membership import Membership
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.outliers import Outliers
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.settings.limits import Deadlines


def build_membership(
    setup: EngineSetup,
    engines: EngineRegistry,
    ledger: Ledger,
    outliers: Outliers,
    custodian: Custodian,
    turns: PoolTurns | None,
    observers: Observers,
    tasks: TaskOwner,
    now: Callable[[], float],
    deadlines: Deadlines,
) -> Membership:
    """Return the membership of a pool, with the engines of the settings. `deadlines`: how long an
    engine may take to drain.
    """
    contacts = [custodian.contacts]
    if turns is not None:
        contacts.append(turns.releases.contacts)
    leaving = turns.engine_leaves if turns is not None else None
    membership = Membership(setup, engines, ledger, observers, tasks, now, deadlines, leaving)
    # Legs that end late write to these once more.
    engines.when_forgotten(outliers.forget)
    for one in contacts:
        engines.when_forgotten(one.forget)
    membership.adopt(setup.add_configured())
    return membership
