"""Wiring of the questions to bootstrap servers: of several workers, one asks them for all."""

from __future__ import annotations

from functools import partial

from pdproxy.app.process import Process
from pdproxy.fleet.bootstrap import Bootstraps
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.worker_bootstrap import WorkerBootstraps
from pdproxy.scheduling.ledger import Ledger
from pdproxy.settings.health import Probes
from pdproxy.transfer.contract import Contract
from pdproxy.transfer.peers import PeerSource
from pdproxy.upstream.admin import EngineAdmin


def build_bootstraps(
    process: Process,
    pool: str,
    engines: EngineRegistry,
    ledger: Ledger,
    admin: EngineAdmin,
    probes: Probes,
    contract: Contract,
) -> Bootstraps:
    """Return what asks the bootstrap servers of a pool's engines. Nothing is asked yet. `pool`: its
    name.
    """
    several = process.share.several
    asks = contract.capabilities.peers_from is PeerSource.BOOTSTRAP
    make = (
        Bootstraps
        if several is None or not asks
        else partial(WorkerBootstraps, shared=several.answers(f"bootstrap servers {pool}", engines))
    )
    return make(
        engines,
        ledger,
        admin.bootstrap,
        process.observers,
        process.tasks,
        probes,
        process.now,
        contract,
    )
