"""The whole demo: engines, the proxy in front of them, traffic, a view; and the order in which they
end.

Owns the signals and that order: traffic stops, the proxy drains, the engines stop. A second Ctrl-C
cuts every wait short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import uvloop

from pdproxy.app.listening import listen
from pdproxy.app.server import INTERRUPTED, fit_files, serve
from pdproxy.app.signals import Ending
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.health import Probes
from pdproxy.settings.limits import Deadlines
from pdproxy.settings.listen import Listen
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy_lab.demo import examples
from pdproxy_lab.demo.engines import Engines, SimEngines
from pdproxy_lab.demo.figures import Figures, History
from pdproxy_lab.demo.options import CANT_START, DemoError, DemoOptions, Say
from pdproxy_lab.demo.scrape import scrape
from pdproxy_lab.demo.screen import Screen, capture, log_to_stderr
from pdproxy_lab.demo.tally import Tally
from pdproxy_lab.demo.traffic import Traffic
from pdproxy_lab.demo.vllm.fleet import VllmEngines

EVERY = 1.0
"""Seconds between two readings of the metrics."""
READY = 30.0
"""Seconds until the proxy must be ready, after its engines are up."""
TRAFFIC_GRACE, DRAIN = 2.0, 10.0
"""Seconds for unfinished answers, the demo's own and the user's, when it ends."""
_MIN_CONTEXT = 2048

_T = TypeVar("_T")


class _EndedError(Exception):
    """The user has ended the demo."""


def run(options: DemoOptions, say: Say) -> int:
    """Run a demo until it is stopped. Return the exit code: 0, 1 if a part failed, 130 at a second
    Ctrl-C.

    Raises:
        DemoError: it can't run; the text says why.
    """
    log_to_stderr(logging.WARNING)
    if options.capture is not None and not options.capture.parent.is_dir():
        raise DemoError(f"--capture: no such folder: {options.capture.parent}", CANT_START)
    engines: Engines = SimEngines(options) if options.engine == "sim" else VllmEngines(options)
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        raise DemoError(
            f"can't listen on {options.host}:{options.port}: {error.strerror or error} (choose "
            f"with --host and --port)",
            CANT_START,
        ) from error
    with listener:
        return uvloop.run(_Demo(options, engines, listener, say).run())


class _Demo:
    """One demo in its event loop."""

    def __init__(
        self, options: DemoOptions, engines: Engines, listener: socket.socket, say: Say
    ) -> None:
        self._options = options
        self._engines = engines
        self._listener = listener
        self._say = say
        self._ending = Ending()
        self._proxy_ending = Ending(self._ending.at_once)
        self._proxy: asyncio.Task[int] | None = None
        self._traffic: Traffic | None = None
        self._url = examples.url_of(options.host, listener.getsockname()[1])

    async def run(self) -> int:
        # SIGHUP: the terminal is gone.
        self._ending.take_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        try:
            with contextlib.suppress(_EndedError):
                await self._play()
        finally:
            code = await self._end()
        return code

    # -- up

    async def _play(self) -> None:
        begun = asyncio.get_running_loop().time()
        await self._unless_ended(self._engines.start(self._say))
        self._begin_to_serve()
        timeout = aiohttp.ClientTimeout(total=5.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await self._unless_ended(self._until_ready(session))
            context = await self._context(session)
            taken = asyncio.get_running_loop().time() - begun
            self._say(
                examples.greeting(self._url, self._engines.model, self._engines.description, taken)
            )
            if not self._options.quiet:
                pace = self._engines.pace
                self._traffic = Traffic(
                    self._url,
                    self._engines.model,
                    people=pace.people,
                    pause=pace.pause,
                    context=context,
                    chance=random.Random(),
                )
                self._traffic.start()
            last = await self._watch(session)
        if self._options.capture is not None and last is not None:
            self._capture(self._options.capture, last)

    def _begin_to_serve(self) -> None:
        options = self._options
        settings = Settings(
            listen=Listen(host=options.host, port=self._listener.getsockname()[1], linger=0),
            pools=(
                Pool(
                    nodes=tuple(
                        ConfiguredEngine(url=one.url, role=one.role) for one in self._engines.places
                    )
                ),
            ),
            deadlines=Deadlines(drain=DRAIN),
            probes=Probes(interval=1.0),
        )
        self._proxy = asyncio.create_task(
            serve(fit_files(settings), self._listener, self._proxy_ending), name="proxy"
        )

    async def _until_ready(self, session: aiohttp.ClientSession) -> None:
        reason = "no answer"
        try:
            async with asyncio.timeout(READY):
                while True:
                    async with session.get(f"{self._url}/ready") as answer:
                        if answer.status == 200:
                            return
                        reason = await answer.text()
                    await asyncio.sleep(0.05)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise DemoError(f"the proxy was not ready within {READY:.0f} s: {reason}") from error

    async def _context(self, session: aiohttp.ClientSession) -> int:
        """Return how many tokens fit into the model's context, from the model's card."""
        try:
            async with session.get(f"{self._url}/v1/models") as answer:
                listed = msgspec.json.decode(await answer.read(), type=_Models)
        except (TimeoutError, aiohttp.ClientError, msgspec.MsgspecError):
            return _MIN_CONTEXT
        return min((card.max_model_len for card in listed.data), default=_MIN_CONTEXT)

    # -- running

    async def _watch(self, session: aiohttp.ClientSession) -> Figures | None:
        """Show figures each second until the end; return the last ones."""
        loop = asyncio.get_running_loop()
        history = History(self._engines.places)
        figures: Figures | None = None
        end = None if self._options.seconds is None else loop.time() + self._options.seconds
        with Screen(self._title(), self._say, lines=not self._options.quiet) as screen:
            due = loop.time()
            while not self._ending.requested.is_set() and (end is None or loop.time() < end):
                proxy, engines = await scrape(session, self._url, self._engines.places)
                now = loop.time()
                history.add(now, proxy, engines)
                figures = history.figures(now, self._tally())
                await screen.show(figures)
                due = max(due + EVERY, loop.time())
                await self._pause_until(due if end is None else min(due, end))
        return figures

    def _title(self) -> str:
        return f"{self._url}  model {self._engines.model}"

    def _tally(self) -> Tally | None:
        return self._traffic.tally if self._traffic is not None else None

    async def _pause_until(self, moment: float) -> None:
        """Wait for a time or for the end, whichever comes first; the proxy's own end is an
        error.
        """
        assert self._proxy is not None
        end_requested = asyncio.ensure_future(self._ending.requested.wait())
        left = max(0.0, moment - asyncio.get_running_loop().time())
        await asyncio.wait(
            {end_requested, self._proxy}, timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        end_requested.cancel()
        if self._proxy.done():
            raise DemoError("the proxy ended unexpectedly")

    def _capture(self, path: Path, figures: Figures) -> None:
        try:
            capture(path, figures, self._title())
        except OSError as error:
            raise DemoError(f"--capture: {path}: {error.strerror or error}") from error

    # -- down

    async def _end(self) -> int:
        """Stop what was started, in order, and return the exit code. Each step is short once
        `at_once` is set.
        """
        at_once = self._ending.at_once
        self._ending.requested.set()  # from now on a Ctrl-C is the second one
        if not self._options.quiet:
            with contextlib.suppress(OSError):  # the reader of standard output may be gone
                self._say("ending (Ctrl-C again: at once)")
        if self._traffic is not None:
            await _or_at_once(self._traffic.stop(TRAFFIC_GRACE), at_once)
        code = 0
        try:
            if self._proxy is not None:
                self._proxy_ending.requested.set()
                code = await self._proxy
        finally:
            await self._engines.stop(at_once)
        return INTERRUPTED if at_once.is_set() else code

    async def _unless_ended(self, what: Coroutine[Any, Any, _T]) -> _T:
        """Return what a coroutine returns, or raise `_EndedError` when the end is requested
        first.
        """
        working = asyncio.ensure_future(what)
        end_requested = asyncio.ensure_future(self._ending.requested.wait())
        try:
            await asyncio.wait({working, end_requested}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _EndedError
            return working.result()
        finally:
            end_requested.cancel()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _or_at_once(what: Coroutine[Any, Any, None], at_once: asyncio.Event) -> None:
    working = asyncio.ensure_future(what)
    hurry = asyncio.ensure_future(at_once.wait())
    await asyncio.wait({working, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


class _Card(msgspec.Struct):
    max_model_len: int = _MIN_CONTEXT


class _Models(msgspec.Struct):
    data: list[_Card]
