"""Wiring of the questions to bootstrap servers."""

from __future__ import annotations

from pdproxy.app.process import Process
from pdproxy.app.share import PoolShare
from pdproxy.fleet.bootstrap import Bootstraps
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.scheduling.ledger import Ledger
from pdproxy.settings.health import Probes
from pdproxy.transfer.contract import Contract
from pdproxy.transfer.peers import PeerSource
from pdproxy.upstream.admin import EngineAdmin


def build_bootstraps(
    process: Process,
    own: PoolShare | None,
    engines: EngineRegistry,
    ledger: Ledger,
    admin: EngineAdmin,
    probes: Probes,
    contract: Contract,
) -> Bootstraps:
    """Return what asks the bootstrap servers of a pool's engines. Nothing is asked yet. `own`: see
    `build_ledger`.
    """
    made = Bootstraps(
        engines,
        ledger,
        admin.bootstrap,
        process.observers,
        process.tasks,
        probes,
        process.now,
        contract,
    )
    if own is not None and contract.capabilities.peers_from is PeerSource.BOOTSTRAP:
        own.share_bootstraps(made, engines)
    return made
