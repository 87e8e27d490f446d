"""The whole demo: engines, the proxy in front of them, traffic, a view; and the order in which they
end.

Owns the signals and that order: traffic stops, the proxy drains, the engines stop. A second Ctrl-C
cuts every wait short.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket

import aiohttp
import msgspec
import uvloop

from pdproxy.app.listening import listen
from pdproxy.app.signals import Ending
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.pools import Pool
from pdproxy_lab.demo.comparison.run import Comparison
from pdproxy_lab.demo.engines import Engines, SimEngines
from pdproxy_lab.demo.figures import History
from pdproxy_lab.demo.machine import since_enter
from pdproxy_lab.demo.options import DemoOptions, Say
from pdproxy_lab.demo.scrape import scrape
from pdproxy_lab.demo.screen import Screen, log_to_stderr
from pdproxy_lab.demo.served import ServedProxy
from pdproxy_lab.demo.tally import Tally
from pdproxy_lab.demo.traffic import Traffic
from pdproxy_lab.demo.vllm.fleet import VllmEngines
from pdproxy_lab.demo.waits import or_at_once, played, unless_ended, until
from pdproxy_lab.up import examples
from pdproxy_lab.up.errors import CANT_START, UpError

EVERY = 1.0
"""Seconds between two readings of the metrics."""
TRAFFIC_GRACE = 2.0
"""Seconds for the demo's own unfinished answers when it ends."""
_MIN_CONTEXT = 2048


def run(options: DemoOptions, say: Say) -> int:
    """Run a demo until it is stopped. Return the exit code: 0, 1 if a part failed, 130 at a second
    Ctrl-C.

    Raises:
        UpError: it can't run; the text says why.
    """
    log_to_stderr(logging.WARNING)
    if options.capture is not None and not options.capture.is_dir():
        raise UpError(f"--capture: no such folder: {options.capture}", CANT_START)
    engines = None if options.compares else _engines(options)
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        raise UpError(
            f"can't listen on {options.host}:{options.port}: {error.strerror or error} (choose "
            f"with --host and --port)",
            CANT_START,
        ) from error
    with listener:
        if engines is None:
            return uvloop.run(Comparison(options, listener, say).run())
        return uvloop.run(_Demo(options, engines, listener, say).run())


def _engines(options: DemoOptions) -> Engines:
    return SimEngines(options) if options.engine == "sim" else VllmEngines(options)


class _Demo:
    """One demo in its event loop."""

    def __init__(
        self, options: DemoOptions, engines: Engines, listener: socket.socket, say: Say
    ) -> None:
        self._options = options
        self._engines = engines
        self._say = say
        self._ending = Ending()
        self._proxy = ServedProxy(options.host, listener, self._ending.at_once)
        self._traffic: Traffic | None = None
        self._url = self._proxy.url

    async def run(self) -> int:
        say: Say = (lambda _: None) if self._options.quiet else self._say
        return await played(self._play(), self._end, self._ending, say)

    # -- up

    async def _play(self) -> None:
        await unless_ended(self._engines.start(self._say), self._ending)
        nodes = tuple(ConfiguredEngine(url=one.url, role=one.role) for one in self._engines.places)
        self._proxy.start(Pool(nodes=nodes))
        timeout = aiohttp.ClientTimeout(total=5.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await unless_ended(self._proxy.until_ready(session), self._ending)
            context = await self._context(session)
            self._say(
                examples.greeting(
                    self._url, self._engines.model, self._engines.description, since_enter()
                )
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
            await self._watch(session)

    async def _context(self, session: aiohttp.ClientSession) -> int:
        """Return how many tokens fit into the model's context, from the model's card."""
        try:
            async with session.get(f"{self._url}/v1/models") as answer:
                listed = msgspec.json.decode(await answer.read(), type=_Models)
        except (TimeoutError, aiohttp.ClientError, msgspec.MsgspecError):
            return _MIN_CONTEXT
        return min((card.max_model_len for card in listed.data), default=_MIN_CONTEXT)

    # -- running

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Show figures each second until the end."""
        loop = asyncio.get_running_loop()
        history = History(self._engines.places)
        tasks = [self._proxy.task] if self._proxy.task is not None else []
        end = None if self._options.seconds is None else loop.time() + self._options.seconds
        with Screen(self._title(), self._say, lines=not self._options.quiet) as screen:
            due = loop.time()
            while not self._ending.requested.is_set() and (end is None or loop.time() < end):
                proxy, engines = await scrape(session, self._url, self._engines.places)
                now = loop.time()
                history.add(now, proxy, engines)
                await screen.show(history.figures(now, self._tally()))
                due = max(due + EVERY, loop.time())
                await until(due if end is None else min(due, end), self._ending, tasks)

    def _title(self) -> str:
        return f"{self._url}  model {self._engines.model}"

    def _tally(self) -> Tally | None:
        return self._traffic.tally if self._traffic is not None else None

    # -- down

    async def _end(self) -> int:
        """Stop what was started, in order, and return the exit code."""
        at_once = self._ending.at_once
        if self._traffic is not None:
            await or_at_once(self._traffic.stop(TRAFFIC_GRACE), at_once)
        try:
            return await self._proxy.end()
        finally:
            await self._engines.stop(at_once)


class _Card(msgspec.Struct):
    max_model_len: int = _MIN_CONTEXT


class _Models(msgspec.Struct):
    data: list[_Card]
