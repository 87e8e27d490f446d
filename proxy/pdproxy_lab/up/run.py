"""`pdproxy up` from its start to its end: engines and the proxy are found or started, checked,
kept running, changed, and ended in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Mapping
from functools import partial

import aiohttp
import msgspec

from pdproxy.app.drain import longest_drain
from pdproxy.app.signals import Ending
from pdproxy_lab.up.arrangement import PlannedEngine
from pdproxy_lab.up.changes import Orders, in_order, refuse_other
from pdproxy_lab.up.command import EngineCommand
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.machine import LOOPBACK
from pdproxy_lab.up.measuring import Measuring, measured_engine
from pdproxy_lab.up.own_process import GRACE, OwnProcess
from pdproxy_lab.up.prepared import Before, Prepared
from pdproxy_lab.up.program import run
from pdproxy_lab.up.rolling import restart
from pdproxy_lab.up.running_proxy import RunningProxy, Said
from pdproxy_lab.up.screen import greeting, plan_lines, url_of
from pdproxy_lab.up.state import Folder, State
from pdproxy_lab.up.supervised import Say, Supervised, Times
from pdproxy_lab.up.system_processes import boot_id
from pdproxy_lab.up.taken_out import PDPROXY, give_back_left

INTERRUPTED = 130
PROXY = "proxy"
DETAILS_EVERY = 15.0
"""Seconds between two looks at the details of the proxy's `/ready`."""
CHECK_DEADLINE = 120.0
"""Seconds for the check of one pair of engines."""


def before_of(folder: Folder) -> tuple[State | None, Before]:
    """Return what an earlier `up` has left that still runs: its state, None if nothing runs."""
    state = folder.read()
    if state is None:
        return None, Before()
    names = [*(engine.name for engine in state.engines), PROXY]
    if not any(OwnProcess(name, folder).find() for name in names):
        return None, Before()
    return state, Before(state.engines, state.events_port, state.port)


def state_of(prepared: Prepared) -> State:
    """Return what is written down before it is started."""
    plan = prepared.plan
    return State(
        boot=boot_id(),
        model=plan.model.source,
        engines=plan.engines,
        events_port=plan.events_port,
        commands=prepared.commands,
        settings=prepared.text,
        port=prepared.settings.listen.port,
    )


class Up:
    """One of them. The folder's lock is held.

    `before`: what runs already. `applies`: its engines are found as they are, and changed once all
    serve; otherwise those that are to be other ones are ended first.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: Folder,
        env: Mapping[str, str],
        say: Say,
        times: Times,
        before: State | None = None,
        *,
        checks: bool = True,
        applies: bool = False,
        calibrate: float | None = None,
    ) -> None:
        """Find what runs. `calibrate`: seconds without a request after which an engine is measured;
        None: none is.

        Raises:
            UpError: it can't be changed so.
        """
        self._prepared = prepared
        self._folder = folder
        self._env = env
        self._say = say
        self._times = times
        self._checks = checks
        self._calibrate = calibrate
        if calibrate is not None:
            measured_engine(prepared.plan)
        self._changing = asyncio.Lock()
        self._ending = Ending()
        self._wanted = self._state = state_of(prepared)
        if applies and before is not None:
            refuse_other(before, self._wanted)
            self._state = before
        self._engines = {
            engine.name: self._supervised(
                engine.name,
                self._state.commands[engine.name],
                f"{_url(engine)}/health",
                f"{_url(engine)}/health",
            )
            for engine in self._state.engines
        }
        deadlines, listen = prepared.settings.deadlines, prepared.settings.listen
        self._proxy = self._supervised(
            PROXY,
            EngineCommand((*PDPROXY, "serve", "--config", str(folder.settings)), {}),
            # whatever its engines do
            f"{url_of(prepared.settings)}/ready/proxy",
            f"{url_of(prepared.settings)}/health",
            grace=longest_drain(deadlines, listen.linger),
        )
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._over = asyncio.Event()
        self._running, self._left = self._find(before)

    async def run(self) -> int:
        """Start what does not run yet, keep all of it, and end it. Return the exit code.

        Raises:
            UpError: it can't be started.
        """
        self._ending.take_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            working = asyncio.create_task(self._serve(session))
            ended = asyncio.create_task(self._ending.requested.wait())
            try:
                await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                failed = working.done() and not working.cancelled()
                ended.cancel()
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                await self._end()
            if failed:
                working.result()
                return 1
        return INTERRUPTED if self._ending.at_once.is_set() else 0

    # -- up

    def _find(self, before: State | None) -> tuple[set[str], list[OwnProcess]]:
        """Find what runs already. Return the names of what runs on, and what is to be ended."""
        running: set[str] = set()
        left: list[OwnProcess] = []
        if before is None:
            return running, left
        state = self._state
        same = {name for name, line in state.commands.items() if before.commands.get(name) == line}
        if before.settings == state.settings:
            same.add(PROXY)
        mine = {**self._engines, PROXY: self._proxy}
        # the proxy first: it serves with engines that end next
        for name in (PROXY, *(engine.name for engine in before.engines)):
            process = mine[name].process if name in mine else OwnProcess(name, self._folder)
            if process.find():
                if name in same and process.runs:
                    running.add(name)
                else:
                    left.append(process)
        return running, left

    async def _serve(self, session: aiohttp.ClientSession) -> None:
        """Start and keep; returns only where nothing can serve any more."""
        begun = time.monotonic()
        for line in plan_lines(self._prepared, self._folder):
            self._say(line)
        for process in self._left:
            self._say(
                f"{process.name}, process {process.pid}, is left of an earlier start: ends it"
            )
            await process.stop(self._ending.at_once)
        self._folder.write(self._state)
        for one in (*self._engines.values(), self._proxy):
            if one.name in self._running:
                self._say(f"{one.name} runs already: process {one.process.pid}")
            elif one is not self._proxy:
                one.start()
        if PROXY not in self._running:
            await self._all_ready(session)
            if self._checks:
                await self._check()
            self._proxy.start()
        await self._proxy.until_ready(session)
        for line in greeting(self._prepared, time.monotonic() - begun):
            self._say(line)
        for one in (*self._engines.values(), self._proxy):
            self._keep(one, session)
        proxy = RunningProxy(self._prepared.settings)
        watching = [
            asyncio.create_task(one) for one in (self._show_details(proxy), self._measure(proxy))
        ]
        for task in watching:
            task.add_done_callback(self._see_failed)
        orders = Orders(self._folder, partial(self._change, session))
        await orders.start()
        try:
            if self._wanted != self._state:
                await self._change(session, self._wanted, self._say)
            await self._over.wait()
        finally:
            orders.close()
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _measure(self, proxy: RunningProxy) -> None:
        """Have all engines used, then measure one of them if that is wanted."""
        if PROXY in self._running:
            try:
                async with self._changing:
                    url = await give_back_left(self._folder)
            except UpError as error:
                self._say(f"an engine that an earlier `up` has taken out of use stays so: {error}")
            else:
                if url is not None:
                    self._say(f"{url} was taken out of use by an earlier `up`: it is used again")
        if self._calibrate is not None:
            prepared, folder = self._prepared, self._folder
            measuring = Measuring(
                *(prepared.plan, prepared.settings, folder),
                *(self._calibrate, self._changing, self._say),
            )
            await measuring.run(proxy)

    async def _show_details(self, proxy: RunningProxy) -> None:
        """Show what the proxy says is wrong, or could be better."""
        said, loop = Said(), asyncio.get_running_loop()
        while True:
            await asyncio.sleep(DETAILS_EVERY)
            for detail in said.new(await proxy.details(), loop.time()):
                self._say(f"proxy: {detail}")

    def _keep(self, one: Supervised, session: aiohttp.ClientSession) -> None:
        self._keeping[one.name] = task = asyncio.create_task(one.keep(session), name=one.name)
        task.add_done_callback(self._see_given_up)

    def _see_failed(self, task: asyncio.Task[None]) -> None:
        """Show what has ended what goes on beside the rest."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"a task of `up` itself has failed, the rest goes on: {error!r}")

    def _see_given_up(self, task: asyncio.Task[None]) -> None:
        """Note that nothing can serve any more: without the proxy, or without any engine."""
        engines = self._engines.values()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"{task.get_name()} can't be kept running: {error!r}")
            self._over.set()
        if self._proxy.is_given_up or all(one.is_given_up for one in engines):
            self._over.set()

    async def _all_ready(self, session: aiohttp.ClientSession) -> None:
        waits = [asyncio.create_task(one.until_ready(session)) for one in self._engines.values()]
        try:
            await asyncio.gather(*waits)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _check(self) -> None:
        """Check the engines.

        Raises:
            UpError: they are not ready, with what was found.
        """
        plan = self._prepared.plan
        if not plan.is_split:
            return
        pairs = len(plan.engines) ** 2
        self._say("checks each pair of engines")
        command = [*PDPROXY, "check", "--config", str(self._folder.settings), "--lease-watch", "0"]
        ended = await run(command, CHECK_DEADLINE * pairs, "pdproxy check")
        text = (ended.out + ended.err).decode("utf-8", "replace").rstrip()
        if ended.code:
            raise UpError(f"the engines are not ready (--no-check serves nevertheless):\n{text}")
        self._say(text.splitlines()[-1] if text else "")

    # -- changes

    async def _change(self, session: aiohttp.ClientSession, wanted: State, say: Say) -> None:
        """Start the engines again whose commands are other ones, one at a time, and those that were
        given up. The proxy reads its settings by itself.

        Raises:
            UpError: it can't be changed so, or an engine does not start.
        """
        refuse_other(self._state, wanted)
        if self._changing.locked():
            say("waits until an engine is measured")
        async with self._changing:
            await self._make(session, wanted, say)

    async def _make(self, session: aiohttp.ClientSession, wanted: State, say: Say) -> None:
        def both(text: str) -> None:
            self._say(text)
            if say is not self._say:
                say(text)

        if wanted.settings != self._state.settings:
            self._state = msgspec.structs.replace(self._state, settings=wanted.settings)
            self._folder.write(self._state)
            both("the proxy reads its new settings; its log names those that need a restart")
        changed = [
            name
            for name in in_order(self._state.engines)
            if wanted.commands[name] != self._state.commands[name]
            or self._engines[name].is_given_up
        ]
        urls = {engine.name: _url(engine) for engine in self._state.engines}
        for name in changed:
            engine = self._engines[name]
            await self._let_go(name)
            try:
                await restart(
                    engine, wanted.commands[name], urls[name], self._folder, session, both
                )
            finally:
                self._keep(engine, session)
            commands = {**self._state.commands, name: wanted.commands[name]}
            self._state = msgspec.structs.replace(self._state, commands=commands)
            self._folder.write(self._state)
        both(f"changed: {', '.join(changed) or 'no engine'}")

    async def _let_go(self, name: str) -> None:
        """Stop keeping an engine running."""
        self._keeping[name].cancel()
        await asyncio.gather(self._keeping[name], return_exceptions=True)

    # -- down

    async def _end(self) -> None:
        """End the proxy, then the engines; a second Ctrl-C cuts the waits short."""
        at_once = self._ending.at_once
        self._ending.requested.set()  # from now on a Ctrl-C is the second one
        # by SIGTERM it serves for a while before it drains, for balancers to notice
        number = signal.SIGINT if self._ending.draining.is_set() else signal.SIGTERM
        self._ending.draining.set()
        for name in self._keeping:
            await self._let_go(name)
        started = [one for one in (self._proxy, *self._engines.values()) if one.process.pid]
        if started:
            with contextlib.suppress(OSError):  # the reader of standard output may be gone
                self._say("ends the proxy and its engines (Ctrl-C again: at once)")
        await self._proxy.stop(at_once, number)
        engines = [one.stop(at_once) for one in self._engines.values()]
        await asyncio.gather(*engines, *(one.stop(at_once) for one in self._left))
        self._folder.forget()

    def _supervised(
        self, name: str, command: EngineCommand, ready: str, health: str, grace: float = GRACE
    ) -> Supervised:
        process = OwnProcess(name, self._folder)
        return Supervised(process, command, ready, health, self._env, self._say, self._times, grace)


def _url(engine: PlannedEngine) -> str:
    return f"http://{LOOPBACK}:{engine.port}"
