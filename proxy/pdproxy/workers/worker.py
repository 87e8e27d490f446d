"""One worker of several: a proxy as it would run alone, that takes its orders from the supervisor
and not from signals.

Owns the worker's end of the link: what the supervisor sends, and the end of this process if the
supervisor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace

import uvloop

from pdproxy.app import uncaught
from pdproxy.app.admin import AdminSocket, prompts_of, recent_requests, serve_admin
from pdproxy.app.compose import Proxy
from pdproxy.app.detection import needs_detection, with_connectors
from pdproxy.app.drain import longest_drain
from pdproxy.app.first_probes import first_probes, sources_found
from pdproxy.app.reloading import SettingsSource
from pdproxy.app.replicas import follow_replicas
from pdproxy.app.server import fit_files, follow, live_settings, serve
from pdproxy.app.signals import Ending, Hangups
from pdproxy.kit.frames import frames
from pdproxy.kit.ids import name_worker
from pdproxy.observe.logs import Log
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings, of_worker
from pdproxy.workers import starting
from pdproxy.workers.forked import flush_output, name_process
from pdproxy.workers.links import Link, LinkError, Message, TooLongError
from pdproxy.workers.settings import (
    SETTINGS,
    SettingsForWorkers,
    SettingsOfWorker,
    decode_settings,
)
from pdproxy.workers.share import WorkersMemory
from pdproxy.workers.supervisor import (
    DRAIN,
    END,
    ENDS_WITHIN,
    LEAVE,
    PEER,
    PING,
    PONG,
    READY,
    REFUSED,
    RELOAD,
)
from pdproxy.workers.switchboard import REPORT

logger = logging.getLogger("pdproxy.workers")

CONNECTORS = "connectors"
"""What a worker sends the parent that has asked engines for them: the connectors of all pools, one
a line (`body`).
"""
WHILE_OTHERS_WAIT = 0.5
"""Seconds for which a scheduler process that was started again waits for what is known of engines.
"""
LAST_WORDS = 2.0
"""Seconds for the last report to be sent: of hundreds of engines a socket does not take it at
once.
"""
MAX_BEHIND = 8 << 20
"""Bytes that wait to be sent. Behind more no report is added: a supervisor that is stopped for
minutes ends no worker.
"""


class Orders:
    """The worker's end of the link, in its event loop. Other messages than the supervisor's own go
    to `then`.
    """

    def __init__(self, end: socket.socket, ending: Ending, hangups: Hangups) -> None:
        self._link = Link(end)
        self._ending = ending
        self._hangups = hangups
        self._loop = asyncio.get_running_loop()
        self.then: Callable[[Message], None] = lambda _: None
        self.peer: Callable[[socket.socket], None] = lambda end: end.close()
        """Takes a socket to another process."""
        self.ends_within: Callable[[], float] = lambda: 0.0
        """Returns for how many seconds a drain may last."""
        self._sent = asyncio.Event()
        """Nothing waits to be sent."""
        self._sent.set()
        self._loop.add_reader(self._link.fileno(), self._read)

    def __repr__(self) -> str:
        return f"<Orders over {self._link!r}>"

    def send(self, message: Message) -> None:
        """Send the supervisor a message. A report is not, while it reads nothing: the next one says
        the same.
        """
        if message.kind == REPORT and self._link.unsent > MAX_BEHIND:
            return
        try:
            self._link.send(message)
            if self._link.unsent:
                self._sent.clear()
                self._loop.add_writer(self._link.fileno(), self._write)
        except TooLongError as error:
            logger.error("not sent: %s", error)  # noqa: TRY400
        except LinkError as error:
            self._gone(error)

    async def all_sent(self) -> None:
        """Wait until the supervisor has been sent everything, for some seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await self._sent.wait()

    def _write(self) -> None:
        try:
            self._link.flush()
            if not self._link.unsent:
                self._loop.remove_writer(self._link.fileno())
                self._sent.set()
        except LinkError as error:
            self._gone(error)

    def _read(self) -> None:
        try:
            messages = self._link.read()
        except LinkError as error:
            self._gone(error)
            return
        for message in messages:
            match message.kind:
                case kind if kind == PING:
                    self.send(Message(PONG))
                case kind if kind in (LEAVE, DRAIN):
                    self._ending.requested.set()
                    if kind == DRAIN:
                        self._ending.draining.set()
                    self.send(Message(ENDS_WITHIN, math.ceil(self.ends_within())))
                case kind if kind == END:
                    self._ending.at_once.set()
                    self._ending.draining.set()
                    self._ending.requested.set()
                case kind if kind == RELOAD:
                    self._hangups.signalled()
                case kind if kind == PEER:
                    self.peer(self._link.taken())
                case _:
                    self._pass_on(message)

    def _pass_on(self, message: Message) -> None:
        try:
            self.then(message)
        except Exception as error:  # the messages behind it count all the same
            logger.error("a message %r of the supervisor failed: %s", message.kind, frames(error))  # noqa: TRY400

    @staticmethod
    def _gone(error: LinkError) -> None:
        """End at once: nobody would start, stop or supervise this process any more."""
        logger.critical("ends, for the supervisor can't be reached: %s", error)
        flush_output()
        os._exit(1)


def work(
    settings: Settings,
    source: SettingsSource | None,
    listener: socket.socket,
    log: Log,
    end: socket.socket,
    shared: WorkersMemory,
    number: int,
    admin: AdminSocket | None,
) -> int:
    """Serve until the supervisor asks for the end. Return the exit code. `end`: of the link to the
    supervisor.

    `shared`: what all workers share; `number`: that of this one; `admin`: where the scheduler
    process serves the admin API.
    """
    name_process(f"pdproxy-{number}")
    log.name_worker(number)
    try:
        return run(settings, source, listener, log, end, shared, number, admin)
    finally:
        listener.close()


def run(
    settings: Settings,
    source: SettingsSource | None,
    listener: socket.socket | None,
    log: Log,
    end: socket.socket,
    shared: WorkersMemory,
    number: int,
    admin: AdminSocket | None,
) -> int:
    """Run this process, a worker or the scheduler process. The arguments: those of `work`.
    `listener`: None for no clients.
    """
    uncaught.install()
    name_worker(number)
    try:
        if (kept := shared.kept.get(SETTINGS)) is not None:
            in_force = decode_settings(kept)
            settings = fit_files(in_force)
            source = None if source is None else replace(source, first=in_force)
        if shared.connectors:
            settings = with_connectors(settings, shared.connectors)
        if number != shared.scheduler:
            settings = of_worker(settings, settings.listen.workers)
        return uvloop.run(
            _serve(
                settings,
                source,
                listener,
                log,
                end,
                shared,
                number,
                admin,
            )
        )
    except SettingsError as error:
        end.setblocking(True)
        link = Link(end)
        link.send(Message(REFUSED, body="\n".join(error.mistakes).encode()))
        return 2
    finally:
        log.close()


async def _serve(
    settings: Settings,
    source: SettingsSource | None,
    listener: socket.socket | None,
    log: Log,
    end: socket.socket,
    shared: WorkersMemory,
    number: int,
    admin: AdminSocket | None,
) -> int:
    asyncio.get_running_loop().set_exception_handler(uncaught.log_failure)
    ending, hangups = Ending(), Hangups()
    orders = Orders(end, ending, hangups)
    share = shared.of(number, orders.send)
    orders.then, orders.peer = share.received, share.connect
    share.follow_level(log)
    if listener is not None:
        # It may go to the whole group: then a second one skips nothing here, since the supervisor
        # sends `DRAIN`.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.requested.set)
    asked_early = asyncio.Event()
    if source is not None and source.paths:
        hangups.then = asked_early.set

    async def started(proxy: Proxy) -> None:
        orders.ends_within = lambda: longest_drain(
            proxy.settings.deadlines, proxy.settings.listen.linger
        )
        if needs_detection(settings):
            found = "\n".join(pool.connector for pool in proxy.settings.pools)
            orders.send(Message(CONNECTORS, body=found.encode()))
        follow_replicas(proxy)
        if share.chooses:
            starting.tell(share.links.publisher, proxy)
        else:
            starting.follow(share.links.link.subscriber, proxy)
        if source is not None and source.paths:
            live = live_settings(proxy, log)
            if share.chooses:
                tells = SettingsForWorkers(live, source.first, share.links.publisher, share.keeper)
                reloading = follow(proxy, source, tells)
                await reloading.catch_up()
                hangups.then = reloading.soon
                if asked_early.is_set():
                    reloading.soon()
            else:
                told = SettingsOfWorker(
                    live,
                    source.first,
                    settings.listen.workers,
                    share.links.link.subscriber,
                    lambda: proxy.admission.closed,
                )
                proxy.readiness.show(told.shortcomings)
        share.take_over_level(lambda: proxy.settings.observe.log_level)
        if share.chooses and share.succeeds:
            proxy.sources.take_over()
        if share.chooses:
            serve_admin(proxy, admin, log)
        elif admin is not None:
            share.answer_operators(recent_requests(proxy), prompts_of(proxy), proxy.now)
        for pool in proxy.pools:  # those that have come since the start of the first worker
            pool.membership.have_served()
        # A successor takes over connections that wait: they must not be refused because it has not
        # seen the engines yet. That of the scheduler process is told by workers what they know, and
        # requests wait for it.
        most = WHILE_OTHERS_WAIT if share.succeeds and share.chooses else None
        await sources_found(proxy, ending, most)
        share.listen()
        await first_probes(proxy, ending, most, share.knows_members)
        share.choose()
        orders.send(Message(READY))

    code = await serve(settings, listener, ending, log, started, share)
    await orders.all_sent()
    return code
