"""The scheduler process: what is to be done once for all workers, it does. It serves no client.

It is a proxy as each worker is one, but listens to no client. It decides which engines are members
of the pools: it follows the sources of the settings, and serves operators the admin API. It probes
engines, audits, judges outliers, asks engines for canaries and bootstrap servers, and tells the
workers. One that takes the place of a dead one has the members that the supervisor has kept, and
probes all engines again; what workers know besides, they tell it.
"""

from __future__ import annotations

import signal
import socket

from pdproxy.app.admin import AdminSocket
from pdproxy.app.reloading import SettingsSource
from pdproxy.observe.logs import Log
from pdproxy.settings.schema import Settings
from pdproxy.workers import worker
from pdproxy.workers.forked import name_process
from pdproxy.workers.share import WorkersMemory

PROCESS_NAME = "pdproxy-sched"
"""As `ps` and `top` show it."""


def work(
    settings: Settings,
    source: SettingsSource | None,
    log: Log,
    end: socket.socket,
    shared: WorkersMemory,
    admin: AdminSocket | None,
) -> int:
    """Work until the supervisor asks for the end. Return the exit code. The arguments: those of
    `worker.work`.
    """
    # It may go to the whole group: this process ends behind the workers, when the supervisor says.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name_process(PROCESS_NAME)
    log.name_process("scheduler")
    return worker.run(settings, source, None, log, end, shared, shared.scheduler, admin)
