"""Several workers that serve as one: their listening sockets, what they share, and the supervisor
of them and of the scheduler process.

Owns the order of the start: all sockets are bound and all memory is mapped before the first worker
is forked. The sockets stay open here, so that connections that wait in a dead worker's queue are
taken by its successor, unless that has to wait.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket

from pdproxy.app.admin import AdminSocket, admin_socket
from pdproxy.app.begin import cant_listen, run_logged
from pdproxy.app.drain import longest_drain
from pdproxy.app.listening import Listening
from pdproxy.app.reloading import SettingsSource
from pdproxy.app.server import GC_THRESHOLDS, fit_files
from pdproxy.app.sockets import listener_at, places
from pdproxy.observe.logs import Log
from pdproxy.settings.errors import SettingsError, naming_pool
from pdproxy.settings.limits import of_each
from pdproxy.settings.schema import Settings
from pdproxy.workers import scheduler_process, worker
from pdproxy.workers.heirs import ADOPTED, Heirs
from pdproxy.workers.kept import KEEP, keep
from pdproxy.workers.links import Message
from pdproxy.workers.share import WorkersMemory
from pdproxy.workers.shown_of_all import add_up
from pdproxy.workers.siblings import SCHEDULER
from pdproxy.workers.supervisor import RefusedError, Supervisor, Watcher, WorkerProcess
from pdproxy.workers.switchboard import Switchboard
from pdproxy.workers.worker import CONNECTORS

logger = logging.getLogger("pdproxy.workers")

LONGEST_WAIT = 1.0
"""Seconds for which clients' connections may wait until a worker that has failed is started
again.
"""


def run(settings: Settings, source: SettingsSource | None = None) -> int:
    """Serve with several workers until asked to stop. Return the exit code, as `app.server.run`
    does.

    Raises:
        SettingsError: no worker can serve with these settings.
    """
    return run_logged(settings, lambda log: _run(settings, log, source))


def _run(settings: Settings, log: Log, source: SettingsSource | None) -> int:
    _open_standard_files()
    settings = fit_files(settings)
    admin = admin_socket(settings)
    with contextlib.closing(admin) if admin is not None else contextlib.nullcontext():
        return _listen_and_supervise(settings, log, source, admin)


def _listen_and_supervise(
    settings: Settings, log: Log, source: SettingsSource | None, admin: AdminSocket | None
) -> int:
    count = settings.listen.workers
    try:
        listening = Listening(settings.listen)
    except OSError as error:
        return cant_listen(settings, log, error)
    _warn_of_memory(settings)
    shared = WorkersMemory(count + 1, count, len(settings.pools))

    def work(number: int, end: socket.socket) -> int:
        listening.keep_only(number)
        if number == shared.scheduler:
            return scheduler_process.work(settings, source, log, end, shared, admin)
        return worker.work(
            settings, source, listening.sockets[number], log, end, shared, number, admin
        )

    def parent(supervisor: Supervisor) -> Parent:
        return Parent(shared, supervisor, listening)

    try:
        bind_for_engines(settings, shared)
        gc.set_threshold(*GC_THRESHOLDS)
        gc.collect()
        gc.freeze()  # collections in a worker would copy the pages of what all of them share
        drain = longest_drain(settings.deadlines)
        lingers = settings.listen.linger
        supervisor = Supervisor(count, work, parent, drain, lingers=lingers, for_all=SCHEDULER)
        return supervisor.run()
    except RefusedError as error:
        raise SettingsError(*str(error).split("\n")) from None
    finally:
        listening.close()
        for listener in shared.listeners():
            listener.close()


def bind_for_engines(settings: Settings, shared: WorkersMemory) -> None:
    """Bind the sockets to which engines send messages, as far as their connectors are known.

    Raises:
        SettingsError: one of them can't be bound.
    """
    for at, own in enumerate(settings.pools):
        with naming_pool(at, own.name, pools=len(settings.pools)):
            for place in places(settings.of_pool(own)):
                shared.pools[at].listeners[place.key] = listener_at(place)


class Parent(Watcher):
    """What the supervisor does for the workers besides keeping them."""

    def __init__(self, shared: WorkersMemory, supervisor: Supervisor, listening: Listening) -> None:
        self._shared = shared
        self._listening = listening
        self._switchboard = Switchboard(supervisor, add_up)
        self._heirs = Heirs(supervisor, shared.custody)
        self._supervisor = supervisor

    def received(self, worker: WorkerProcess, message: Message) -> None:
        """See `Watcher`."""
        if message.kind == ADOPTED:
            self._heirs.adopted(worker, message)
        elif message.kind == CONNECTORS:
            self._shared.connectors = message.body.decode().split("\n")
        elif message.kind == KEEP:
            self._supervisor.send(worker, keep(self._shared.kept, message))
        else:
            self._switchboard.received(worker, message)

    def starts(self, number: int) -> None:
        """See `Watcher`."""
        self._shared.starts[number] += 1
        if number != self._shared.scheduler:
            self._listening.bind_again(number)

    def waits(self, number: int, seconds: float) -> None:
        """See `Watcher`."""
        # connections would wait, perhaps for ever: the system gives new ones to the others
        if seconds > LONGEST_WAIT and number != self._shared.scheduler:
            self._listening.sockets[number].close()

    def died(self, number: int) -> None:
        """See `Watcher`."""
        self._switchboard.died(number)
        self._heirs.died(number)

    def ready(self, worker: WorkerProcess) -> None:
        """See `Watcher`."""
        self._heirs.hand_on()


def _open_standard_files() -> None:
    """Have no socket get the number of a standard file that is closed: libuv aborts the process
    that closes it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the least number that is free


def _warn_of_memory(settings: Settings) -> None:
    limits = settings.limits
    each = of_each(limits, settings.listen.workers)
    for name in ("max_buffered_bytes", "max_buffered_answer_bytes"):
        if (total := getattr(each, name) * settings.listen.workers) > getattr(limits, name):
            logger.info(
                "limits.%s = %d is divided among %d workers, each with space for one of the "
                "largest: %d in all",
                name,
                getattr(limits, name),
                settings.listen.workers,
                total,
            )
