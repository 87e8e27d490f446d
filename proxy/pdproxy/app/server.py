"""The server process: checks limits, handles signals, drains in order, and returns one exit code.

Owns the order of the end. At the first SIGTERM `/ready` becomes 503, and answers close their
connections; new requests are still served for `listen.linger` seconds, until balancers send no
more. Then, or at a second signal, or at a SIGINT, new requests are refused; when streams have ended
and KV is released, the process ends with 0. A SIGINT after that ends it at once. SIGHUP has the
settings read again: by default it would end the process, and all streams with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from pdproxy import __version__
from pdproxy.app import uncaught
from pdproxy.app.admin import MAX_CONNECTIONS, AdminSocket, admin_socket, serve_admin
from pdproxy.app.begin import cant_listen, run_logged
from pdproxy.app.compose import Proxy
from pdproxy.app.detection import needs_detection, settled
from pdproxy.app.first_probes import first_probes
from pdproxy.app.listening import Listening
from pdproxy.app.live import LiveSettings
from pdproxy.app.reloading import Reloading, SettingsSource, Uses
from pdproxy.app.replicas import follow_replicas
from pdproxy.app.salt_warnings import salt_warnings
from pdproxy.app.share import ALONE, Share, SoleProcess
from pdproxy.app.signals import Ending, Hangups
from pdproxy.kit.frames import frames
from pdproxy.observe.logs import Log, set_level
from pdproxy.settings.listen import UNIX
from pdproxy.settings.schema import Settings, source_section
from pdproxy.web.app import create_app

logger = logging.getLogger("pdproxy")

FILES_FOR_ENGINES = 2
"""Open files per request in service besides its client's: a connection to a prefill engine and one
to a decode engine.
"""
OTHER_FILES = 64
"""Open files for everything else: the listener, the log, refused connections on their way out."""
INTERRUPTED = 130
GC_THRESHOLDS = (3000, 5, 133)
"""A request leaves nothing to the garbage collector (there is a test for that), only libraries do.
A collection takes about a millisecond for every 10,000 objects that it looks at, and blocks the
event loop for that time. With these numbers it often looks at the newest 3,000 or 15,000 objects,
and seldom at all of them; an open stream has 100.
"""


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: this module has its own order of the
    shutdown.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Modules and the parts of the proxy stay until the end: collections need not look at their
        # 200,000 objects again.
        gc.collect()
        gc.freeze()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: Settings, source: SettingsSource | None = None) -> int:
    """Serve until asked to stop. Return the exit code: 0, 1 after a failure, 2 if it can't start,
    130 at a second Ctrl-C.

    `source`: where the settings come from, to be read again when its files change; None: they never
    are.
    """
    return run_logged(settings, lambda log: _run(settings, log, source))


def _run(settings: Settings, log: Log, source: SettingsSource | None) -> int:
    uncaught.install()
    settings = fit_files(settings)
    admin = admin_socket(settings)
    with contextlib.closing(admin) if admin is not None else contextlib.nullcontext():
        return _listen_and_serve(settings, log, source, admin)


def _listen_and_serve(
    settings: Settings, log: Log, source: SettingsSource | None, admin: AdminSocket | None
) -> int:
    try:
        listening = Listening(settings.listen)
    except OSError as error:
        return cant_listen(settings, log, error)
    gc.set_threshold(*GC_THRESHOLDS)
    with listening:
        return uvloop.run(
            _serve_until_signalled(settings, listening.sockets[0], log, source, admin)
        )


def files_needed(settings: Settings) -> int:
    """Return how many open files are needed to reach the limits on connections and requests."""
    limits = settings.limits
    return limits.max_connections + FILES_FOR_ENGINES * limits.max_inflight + _other_files(settings)


def _other_files(settings: Settings) -> int:
    # as many again are refused at a time
    admin = 2 * MAX_CONNECTIONS if settings.listen.admin is not None else 0
    engines = sum(
        1 if (section := source_section(node.url)) is None else section.most
        for pool in settings.pools
        for node in pool.nodes
    )
    return OTHER_FILES + admin + 2 * engines  # probes of each engine, and one more connection


def fit_files(settings: Settings) -> Settings:
    """Raise the soft limit on open files as far as needed and allowed. Return the settings, with
    limits that fit it.

    The number of clients' connections is lowered first: without open files for engines nobody is
    served.
    """
    limits, need = settings.limits, files_needed(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
        wanted = need if hard == resource.RLIM_INFINITY else min(need, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= need:
        return settings
    left = max(FILES_FOR_ENGINES + 1, soft - _other_files(settings))
    inflight = min(limits.max_inflight, left // (FILES_FOR_ENGINES + 1))
    connections = min(limits.max_connections, left - FILES_FOR_ENGINES * inflight)
    logger.warning(
        "ulimit -n is %d, but limits.max_connections = %d and limits.max_inflight = %d need %d "
        "open files: serving %d connections"
        " and %d requests at once",
        soft,
        limits.max_connections,
        limits.max_inflight,
        need,
        connections,
        inflight,
    )
    fitting = msgspec.structs.replace(limits, max_connections=connections, max_inflight=inflight)
    return msgspec.structs.replace(settings, limits=fitting)


def uvicorn_config(proxy: Proxy, app: ASGIApp | None = None) -> uvicorn.Config:
    """Return how uvicorn serves a proxy: the data path's protocol class, no log lines and no
    signals of its own.

    `app`: serves all other routes; None: a new one.
    """
    return uvicorn.Config(
        app or create_app(proxy.front.answers()),
        http=proxy.credentials.listener(proxy.front.protocol()),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        ws="none",
        timeout_keep_alive=proxy.settings.listen.keep_alive,  # type: ignore[arg-type]  # it is passed on to the event loop
        timeout_graceful_shutdown=1,
    )


async def _serve_until_signalled(
    settings: Settings,
    listener: socket.socket,
    log: Log,
    source: SettingsSource | None,
    admin: AdminSocket | None,
) -> int:
    asyncio.get_running_loop().set_exception_handler(uncaught.log_failure)
    ending = Ending()
    ending.take_signals(signal.SIGTERM, signal.SIGINT)
    hangups = Hangups()
    hangups.take()
    asked_early = asyncio.Event()
    if source is not None and source.paths:
        hangups.then = asked_early.set

    async def started(proxy: Proxy) -> None:
        serve_admin(proxy, admin, log)
        follow_replicas(proxy)
        if source is not None and source.paths:
            reloading = follow(proxy, source, live_settings(proxy, log))
            hangups.then = reloading.soon
            if asked_early.is_set():
                reloading.soon()
        await first_probes(proxy, ending)

    return await serve(settings, listener, ending, log, started)


def live_settings(proxy: Proxy, log: Log) -> LiveSettings:
    """Return what has a proxy use other settings."""
    return LiveSettings(proxy, partial(set_level, log), fit_files)


def follow(proxy: Proxy, source: SettingsSource, live: Uses) -> Reloading:
    """Have a proxy that was started follow the files of its settings."""
    reloading = Reloading(source, live, lambda: proxy.admission.closed)
    proxy.readiness.show(reloading.shortcomings)
    reloading.show(proxy.observers)
    proxy.tasks.keep(reloading.run, "settings")
    return reloading


async def _settled(settings: Settings, ending: Ending) -> Settings | None:
    """Return the settings with the engines' connector, None if the process was asked to end
    meanwhile.
    """
    if not needs_detection(settings):
        return settings
    asking = asyncio.create_task(settled(settings), name="connector")
    end_requested = asyncio.create_task(ending.requested.wait(), name="ending")
    try:
        await asyncio.wait({asking, end_requested}, return_when=asyncio.FIRST_COMPLETED)
        return await asking if asking.done() else None
    finally:
        for task in (asking, end_requested):
            task.cancel()
        await asyncio.gather(asking, end_requested, return_exceptions=True)


def _place(proxy: Proxy, listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return f"{UNIX}{listener.getsockname()}"
    scheme = "http" if proxy.credentials.listen is None else "https"
    return f"{scheme}://{proxy.settings.listen.host}:{listener.getsockname()[1]}"


async def serve(
    settings: Settings,
    listener: socket.socket | None,
    ending: Ending,
    log: Log | None = None,
    started: Callable[[Proxy], Awaitable[None] | None] = lambda _: None,
    share: Share | SoleProcess = ALONE,
) -> int:
    """Serve on a listener until asked to end, drain, and return `run`'s exit code. Takes no
    signals. `listener` None: no clients are served. `log`: see `Proxy.build`.

    `started`: called once with the proxy, before it gets requests. What it returns is awaited;
    connections wait meanwhile. `share`: what this worker shares with others.

    Raises:
        SettingsError: the engines show that the settings are wrong, or a file can't be used.
    """
    found = await _settled(settings, ending)
    if found is None:
        return INTERRUPTED if ending.at_once.is_set() else 0
    settings = found
    proxy = Proxy.build(settings, log=log, share=share)
    server = _Server(uvicorn_config(proxy))
    proxy.start()
    share.start(proxy.tasks)
    proxy.sources.start()
    if (waits := started(proxy)) is not None:
        await waits
    if share.chooses:
        own_warnings = (*proxy.credentials.warnings(), *proxy.front.warnings())
        for warning in (*own_warnings, *salt_warnings(settings, proxy.cache_salts)):
            logger.warning("%s", warning)
    if listener is not None:
        logger.info("pdproxy %s listens on %s", __version__, _place(proxy, listener))
    listeners = [] if listener is None else [listener]
    serving = asyncio.create_task(server.serve(sockets=listeners), name="server")
    end_requested = asyncio.create_task(ending.requested.wait(), name="ending")
    at_once = asyncio.create_task(ending.at_once.wait(), name="at once")
    await asyncio.wait({serving, end_requested}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        proxy.leave(server.server_state.connections)
        if listener is not None:
            logger.info(
                "not ready any more: serving new requests for up to %g s", settings.listen.linger
            )
        lingering = asyncio.create_task(ending.lingered(settings.listen.linger), name="linger")
        await asyncio.wait({serving, lingering, at_once}, return_when=asyncio.FIRST_COMPLETED)
        lingering.cancel()
    if not serving.done():
        logger.info("shutting down: %d requests in flight", proxy.admission.inflight)
        draining = asyncio.create_task(proxy.drain(server.server_state.tasks), name="drain")
        await asyncio.wait({draining, at_once}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        server.should_exit = True
        server.force_exit = ending.at_once.is_set()
        await serving
    end_requested.cancel()
    at_once.cancel()
    share.stop()
    await proxy.stop()
    if not ending.requested.is_set():
        failure = serving.exception()
        logger.error(
            "the server ended unexpectedly%s", f": {frames(failure)}" if failure is not None else ""
        )
        return 1
    return INTERRUPTED if ending.at_once.is_set() else 0
