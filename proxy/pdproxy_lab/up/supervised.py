"""One process that is kept running: an engine, or the proxy. It is started again when it ends, with
growing pauses, and given up when it ends again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from pdproxy_lab.up.command import EngineCommand
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.last_words import last_words
from pdproxy_lab.up.loading import STAGES, stage_of
from pdproxy_lab.up.own_process import GRACE, OwnProcess

Say = Callable[[str], None]
"""Shows one line."""


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds. `look`: between two looks at a process. `ready`: until it must answer. `pauses`:
    before the first, second, ... start again, the last one for all later ones. `most` ends within
    `window` are a crash loop. `answer`: of one question for its health. `dead`: an engine that has
    answered 503 for so long has lost its core.
    """

    look: float = 0.25
    ready: float = 1800.0
    pauses: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    most: int = 5
    window: float = 600.0
    answer: float = 2.0
    health: float = 5.0
    dead: float = 10.0


class Supervised:
    """One of these. `ready`: the URL that answers 200 once it serves; `health`: the one that
    answers 503 if it must be started again. `environment`: of this process; the command's own
    variables override it.
    """

    def __init__(
        self,
        process: OwnProcess,
        command: EngineCommand,
        ready: str,
        health: str,
        environment: Mapping[str, str],
        say: Say,
        times: Times,
        grace: float = GRACE,
    ) -> None:
        self.process = process
        self.command = command
        self.is_given_up = False
        """Whether it ended so often that it is not started again."""
        self._ready, self._health = ready, health
        self._environment = environment
        self._say = say
        self._times = times
        self._grace = grace
        self._ends: deque[float] = deque(maxlen=times.most)

    @property
    def name(self) -> str:
        """Its name."""
        return self.process.name

    def start(self, command: EngineCommand | None = None) -> None:
        """Start it, with another command if one is given.

        Raises:
            UpError: the system can't.
        """
        command = command or self.command
        self.process.start(command.arguments, {**self._environment, **command.environment})

    async def stop(self, at_once: asyncio.Event, number: signal.Signals = signal.SIGTERM) -> None:
        """End it. `number`: the signal that asks for it."""
        await self.process.stop(at_once, self._grace, number)

    async def until_ready(self, session: aiohttp.ClientSession, say: Say | None = None) -> None:
        """Return once it serves; say what it does meanwhile.

        Raises:
            UpError: it has ended, or takes too long; with why, as far as its log says it.
        """
        loop, say = asyncio.get_running_loop(), say or self._say
        begun, stage = loop.time(), -1
        while True:
            if not self.process.runs:
                raise UpError(self._last_words(f"{self.name} {self.process.how} while it started"))
            if (reached := stage_of(self.process.new_lines(), stage)) > stage:
                stage = reached
                say(f"{self.name}: {STAGES[stage][0]}")
            if await self._status(session, self._ready) == 200:
                self.process.note_shared_memory()
                self.is_given_up = False
                say(f"{self.name}: ready after {loop.time() - begun:.0f} s")
                return
            if loop.time() - begun > self._times.ready:
                raise UpError(
                    self._last_words(
                        f"{self.name} was not ready within {self._times.ready:g} s (--wait)"
                    )
                )
            await asyncio.sleep(self._times.look)

    async def keep(self, session: aiohttp.ClientSession) -> None:
        """Keep it running, until it is given up."""
        try:
            await self._keep(session)
        except UpError as error:  # what is left of it can't be ended
            self._say(f"{error}: {self.name} is not started again")
        self.is_given_up = True

    async def _keep(self, session: aiohttp.ClientSession) -> None:
        never = asyncio.Event()
        while True:
            why = await self._end(session)
            if self._count():
                self._say(
                    self._last_words(
                        f"{self.name} {why}, {self._times.most} times within "
                        f"{self._times.window / 60:g} minutes: it is not started again"
                    )
                )
                await self.stop(never)
                return
            pause = self._times.pauses[min(len(self._ends), len(self._times.pauses)) - 1]
            self._say(self._last_words(f"{self.name} {why}, and starts again in {pause:g} s"))
            await self.stop(never)
            await asyncio.sleep(pause)
            try:
                self.start()
                await self.until_ready(session)
            except UpError as error:
                self._say(str(error))

    async def _end(self, session: aiohttp.ClientSession) -> str:
        """Return how it has ended, once it has."""
        loop = asyncio.get_running_loop()
        asked, dead = loop.time(), None
        while self.process.runs:
            await asyncio.sleep(self._times.look)
            self.process.bound_log()
            if loop.time() - asked >= self._times.health:
                asked = loop.time()
                # a busy engine may be late with its answer; only one that says so is dead
                status = await self._status(session, self._health)
                dead = (dead or asked) if status == 503 else None
                if dead is not None and loop.time() - dead >= self._times.dead:
                    return "says that its core is dead"
        return self.process.how

    def _count(self) -> bool:
        """Count an end; return whether they are a crash loop."""
        now = asyncio.get_running_loop().time()
        self._ends.append(now)
        while self._ends[0] < now - self._times.window:
            self._ends.popleft()
        return len(self._ends) == self._times.most

    async def _status(self, session: aiohttp.ClientSession, url: str) -> int | None:
        """Return the status of its answer, None if there is none in time."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with asyncio.timeout(self._times.answer):
                try:
                    async with session.get(url, ssl=False) as answer:
                        return answer.status
                except aiohttp.ClientConnectorCertificateError:
                    return 200  # it listens, and asks for a certificate of clients
        return None

    def _last_words(self, text: str) -> str:
        return last_words(text, self.process.log)
