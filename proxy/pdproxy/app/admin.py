"""The admin API's server: a second listener in the proxy's own event loop. Owns its socket.

It serves for as long as the proxy runs, also while that drains.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial

from pdproxy.app.compose import Proxy
from pdproxy.app.own_listener import OwnListener, own_bounds
from pdproxy.app.pool import PoolParts
from pdproxy.app.unix_socket import UnixSocket
from pdproxy.fleet.entries import EngineEntries, PoolEngines
from pdproxy.fleet.membership import ADMIN
from pdproxy.observe.logs import Log, set_level
from pdproxy.observe.prompt_shares import PoolPrompts
from pdproxy.observe.recent import Recent
from pdproxy.scheduling.decisions import KeptDecisions
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.listen import AdminPlace, place_of
from pdproxy.settings.pools import PoolSlo
from pdproxy.settings.schema import Settings
from pdproxy.web.admin.app import create_admin_app
from pdproxy.web.admin.gate import Gate
from pdproxy.web.admin.live import VIEWERS, Feed, Goals, LiveSource
from pdproxy.web.admin.protocol import admin_protocol
from pdproxy.web.admin.service import AdminService

logger = logging.getLogger("pdproxy.admin")

MAX_CONNECTIONS = 64
"""Of operators, at once."""
WRITE_SECONDS, KEEP_ALIVE = 30.0, 5
"""Seconds for which an answer may stay unread, and for which an idle connection is kept."""
BACKLOG = 64
MAX_UNREAD = 64 << 20
"""Bytes of answers that are not read yet."""


class AdminSocket:
    """The listening socket. Bind it before the proxy is made, so that a mistake ends the start."""

    def __init__(self, place: AdminPlace) -> None:
        """Bind it.

        Raises:
            SettingsError: it can't be bound.
        """
        self.place = place
        try:
            bound = (
                UnixSocket(place.path, BACKLOG, only_owner=True)
                if place.path is not None
                else _bound_to_port(place)
            )
        except OSError as error:
            raise SettingsError(
                f"listen.admin: can't listen on {place}: {error.strerror or error}"
            ) from None
        self._bound = bound
        self.socket = bound.socket if isinstance(bound, UnixSocket) else bound

    def close(self) -> None:
        """Close it, and remove the file of a Unix socket."""
        self._bound.close()


def admin_socket(settings: Settings) -> AdminSocket | None:
    """Return the socket that the settings name, None if they name none.

    Raises:
        SettingsError: it can't be bound.
    """
    address = settings.listen.admin
    return None if address is None else AdminSocket(place_of(address))


def _bound_to_port(place: AdminPlace) -> socket.socket:
    found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class AdminServer:
    """Serves the admin API of a proxy on a socket."""

    def __init__(self, proxy: Proxy, at: AdminSocket, log: Log) -> None:
        """Make one that does not serve yet. Requests that begin from now on are shown."""
        clock, observers = proxy.front.clock, proxy.observers
        now = clock.now
        recent = self.recent = recent_requests(proxy)
        kept = [pool.decisions for pool in proxy.pools if pool.decisions is not None]
        service = AdminService(
            EngineEntries(
                [
                    PoolEngines(
                        pool.name,
                        pool.membership,
                        pool.engines,
                        pool.resources.shares,
                        pool.slow,
                        pool.ledger.revisions,
                        pool.scaling,
                    )
                    for pool in proxy.pools
                ],
                now,
            ),
            recent,
            partial(kept[0].kept, *kept[1:]) if kept else lambda: KeptDecisions(None, now(), []),
            log,
            partial(set_level, log, by=ADMIN),
            proxy.models.serving,
        )
        self.serving = False
        self._at = at
        keys = proxy.credentials.admin_keys
        api, shown = proxy.share.admin_api(service, now), proxy.front.shown
        feed = self.feed = Feed(
            LiveSource(
                api=api,
                readiness=shown.readiness,
                metrics=shown.snapshot,
                decisions=service.decisions,
                goals=partial(_goals, proxy.pools),
                now=now,
            )
        )
        observers.show(VIEWERS, lambda: [((), feed.viewers)])
        gate = Gate(
            create_admin_app(api, feed, proxy.front.operation),
            keys,
            observers,
            proxy.wrong_keys,
            is_tcp=at.place.path is None,
        )
        bounds = own_bounds(
            clock,
            observers,
            connections=MAX_CONNECTIONS,
            write_seconds=WRITE_SECONDS,
            max_unread=MAX_UNREAD,
        )
        http = admin_protocol(bounds, observers, gate)
        made = proxy.credentials.listener(http) if at.place.path is None else http
        self._listener = OwnListener(gate, made, keep_alive=KEEP_ALIVE)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._listener.serving(self._at.socket):
            logger.info("the admin API listens on %s", self._at.place)
            self.serving = True
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.serving = False


def _goals(pools: Sequence[PoolParts]) -> Goals:
    """Return what the first pool that wants anything of requests' times wants."""
    wanted = (pool.slo for pool in pools)
    return next((Goals(one.ttft, one.tpot) for one in wanted if one != PoolSlo()), Goals())


def prompts_of(proxy: Proxy) -> Callable[[], list[PoolPrompts]]:
    """Return what returns how the pools' last prompts were served."""
    return lambda: [PoolPrompts(pool.name, pool.resources.shares.window()) for pool in proxy.pools]


def recent_requests(proxy: Proxy) -> Recent:
    """Return the requests of a proxy that begin from now on, those that run and the last ones."""
    recent = Recent(proxy.now)
    proxy.observers.add(recent)
    for pool in proxy.pools:
        pool.service.lifecycle.running = pool.passthrough.lifecycle.running = recent.running
    return recent


def serve_admin(proxy: Proxy, at: AdminSocket | None, log: Log) -> None:
    """Serve the admin API of a proxy that was started for as long as that runs. Without a socket
    there is none.
    """
    if at is not None:
        proxy.tasks.keep(AdminServer(proxy, at, log).run, "admin API")
