"""The comparison from its start to its end: two fleets, the load, the keys, what is shown.

Owns the signals and the order of the end: the load stops, the proxies drain, the engines stop. A
second Ctrl-C cuts every wait short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import aiohttp
import msgspec

from pdproxy.app.signals import Ending
from pdproxy.kit.tasks import TaskOwner
from pdproxy.settings.engines import Role
from pdproxy_lab.bench.client import Target, session_of
from pdproxy_lab.bench.outcome import Outcome
from pdproxy_lab.bench.slo import slo_headers
from pdproxy_lab.demo.comparison.controls import Controls, Pressed
from pdproxy_lab.demo.comparison.fleet import Fleet
from pdproxy_lab.demo.comparison.load import Load
from pdproxy_lab.demo.comparison.reaction import Seen, reaction
from pdproxy_lab.demo.comparison.scores import Scores
from pdproxy_lab.demo.comparison.screen import ComparisonScreen, capture
from pdproxy_lab.demo.comparison.setup import LIMITS, LOADS, profile, speed
from pdproxy_lab.demo.comparison.verdict import verdict
from pdproxy_lab.demo.comparison.view import ComparedEngine, Picture, Side, State, setting
from pdproxy_lab.demo.engines import roles as fleet_roles
from pdproxy_lab.demo.figures import EngineFigures, Figures, History, Recovery
from pdproxy_lab.demo.machine import core_share, since_enter
from pdproxy_lab.demo.options import CHUNK, DemoOptions, Say
from pdproxy_lab.demo.scrape import scrape
from pdproxy_lab.demo.screen import log_to_stderr
from pdproxy_lab.demo.waits import or_at_once, played, unless_ended, until
from pdproxy_lab.up import examples
from pdproxy_lab.up.errors import UpError

EVERY = 1.0
"""Seconds between two pictures, and between two readings of the metrics."""
LINES_EVERY, LINES_END = 2.0, 60.0
"""Seconds between two lines, and until it ends by itself, without a terminal."""

LAGS = 20
"""Pictures over which this machine's lag is judged."""


class Comparison:
    """One comparison in its event loop."""

    def __init__(self, options: DemoOptions, listener: socket.socket, say: Say) -> None:
        self._options = options
        self._say = say
        self._ending = Ending()
        self._tasks = TaskOwner("comparison")
        self._count = options.prefill + options.decode
        self._speed = speed(self._count, core_share())
        self._model = options.model or "sim"
        roles = fleet_roles(options)
        self._profile = profile(self._speed)
        make = partial(
            Fleet,
            model=self._model,
            like=self._profile,
            host=options.host,
            at_once=self._ending.at_once,
        )
        self._split = make(roles, chunk=CHUNK, listener=listener, first_seed=0)
        plain: list[Role] = ["aggregated"] * self._count
        self._plain = make(plain, chunk=options.plain_chunk, listener=None, first_seed=1000)
        self._fleets = (self._split, self._plain)
        self._histories: list[History] = []
        self._figures: list[Figures] = []
        self._scores = (Scores(self._speed), Scores(self._speed))
        names = [_name(role, str(roles[:at].count(role))) for at, role in enumerate(roles)]
        self._controls = Controls(
            tuple(f"{name} and plain {number}" for number, name in enumerate(names)),
            frozenset(number for number, role in enumerate(roles) if role == "decode"),
        )
        self._changing = asyncio.Lock()
        self._load: Load | None = None
        self._lags: deque[float] = deque(maxlen=LAGS)
        """The 90th percentile of the event loop's lag at each picture, in engine time."""
        self._news: tuple[Pressed, tuple[Seen, Seen]] | None = None

    async def run(self) -> int:
        """Run until it is stopped. Return the exit code: 0, 1 if a part failed, 130 at a second
        Ctrl-C.

        Raises:
            UpError: it can't run; the text says why.
        """
        return await played(self._play(), self._end, self._ending, self._say)

    # -- up

    async def _play(self) -> None:
        timeout = aiohttp.ClientTimeout(total=5.0)
        with tempfile.TemporaryDirectory(prefix="pdproxy-demo-") as folder:
            file = Path(folder) / "profile.json"
            file.write_bytes(msgspec.json.encode(self._profile))
            async with aiohttp.ClientSession(timeout=timeout) as asking, session_of(None) as own:
                for fleet in self._fleets:
                    await unless_ended(fleet.start(asking, file), self._ending)
                self._histories = [History(fleet.places) for fleet in self._fleets]
                self._load = Load(own, self._model, self._finished, random.Random())
                try:
                    await self._watch(asking, self._load)
                finally:
                    await self._load.stop()

    def _greet(self) -> None:
        kinds = f"{self._options.prefill} prefill and {self._options.decode} decode engines"
        self._say(
            examples.greeting(
                self._split.url,
                self._model,
                f"{kinds} beside {self._count} plain ones, all simulated",
                since_enter(),
            )
        )

    # -- running

    async def _watch(self, session: aiohttp.ClientSession, load: Load) -> None:
        loop = asyncio.get_running_loop()
        screen = ComparisonScreen(self._say, self._press)
        seconds = self._options.seconds
        drawn = screen.is_terminal or self._options.capture is not None
        every = EVERY if drawn else LINES_EVERY
        if seconds is None and not screen.is_terminal:
            seconds = LINES_END
        end = None if seconds is None else loop.time() + seconds
        if not screen.is_terminal:
            self._greet()
        self._aim()
        load.start()
        picture: Picture | None = None
        due = loop.time()
        kept: list[str] = []
        if screen.is_terminal:  # engines that are killed would fill the screen with warnings
            log_to_stderr(logging.ERROR, kept.append)
        try:
            with screen:
                while not self._ending.requested.is_set() and (end is None or loop.time() < end):
                    await self._read(session)
                    picture = self._picture(load, screen)
                    if picture is not None:
                        await screen.show(picture)
                    due = max(due + every, loop.time())
                    tasks = [task for fleet in self._fleets for task in fleet.tasks]
                    await until(due if end is None else min(due, end), self._ending, tasks)
        finally:
            if screen.is_terminal:
                log_to_stderr(logging.ERROR)
            with contextlib.suppress(OSError):  # the terminal is gone
                sys.stderr.write("".join(kept))
            if picture is not None:
                self._conclude(picture)

    def _conclude(self, picture: Picture) -> None:
        """Leave the verdict on the terminal, or behind the lines."""
        with contextlib.suppress(OSError):  # the reader of standard output may be gone
            self._say("\n".join((*setting(picture), picture.verdict.text)))
        if self._options.capture is not None:
            try:
                capture(self._options.capture, picture)
            except OSError as error:
                raise UpError(
                    f"--capture: {self._options.capture}: {error.strerror or error}"
                ) from error

    async def _read(self, session: aiohttp.ClientSession) -> None:
        """Read the metrics of both fleets."""
        asked = [scrape(session, fleet.url, fleet.places) for fleet in self._fleets]
        found = await asyncio.gather(*asked)
        now = asyncio.get_running_loop().time()
        self._figures = []
        for history, (proxy, engines) in zip(self._histories, found, strict=True):
            history.add(now, proxy, engines)
            self._figures.append(history.figures(now))

    def _finished(self, place: int, outcome: Outcome) -> None:
        self._scores[place].add(asyncio.get_running_loop().time(), outcome)

    # -- keys

    def _press(self, key: str) -> None:
        if key in ("q", "Q"):
            self._ending.requested.set()
            return
        if not self._figures:
            return  # nothing is shown yet
        pressed = self._controls.press(key.lower() if len(key) == 1 else key, self._ready())
        if pressed is None:
            return
        number = self._controls.chosen
        self._news = pressed, self._seen()
        match pressed.change:
            case "kill" | "start":
                self._tasks.spawn(self._kill_or_start(number, pressed), "engine")
            case "slow" | "usual":
                for fleet in self._fleets:
                    fleet.slow_down(number, slow=pressed.change == "slow")
            case "load" | "limits":
                self._aim()
            case "way":
                self._split.way = self._controls.way
                self._histories[0] = History(self._split.places)
                # the proxy with `auto` counts from its own start
                self._news = pressed, (Seen(Recovery(), 0, ""), Seen(Recovery(), 0, ""))
                self._aim()
            case None:
                return
        if pressed.change in ("load", "limits", "way"):
            for scores in self._scores:
                scores.forget()

    async def _kill_or_start(self, number: int, pressed: Pressed) -> None:
        async with self._changing:  # a second press waits for the first
            for fleet in self._fleets:
                try:
                    if pressed.change == "kill":
                        await fleet.kill(number)
                    else:
                        await fleet.revive(number)
                except OSError as error:
                    self._news = Pressed(None, f"It can't start again: {error}."), self._seen()

    def _ready(self) -> bool:
        """Return whether the proxies use all engines that are not killed."""
        return len(self._figures) == len(self._fleets) and all(
            engine.up
            for figures in self._figures
            for number, engine in enumerate(figures.engines)
            if self._controls.life(number) != "killed"
        )

    def _aim(self) -> None:
        """Have the load follow the controls."""
        if self._load is None:
            return
        self._load.rate = self._rate * self._speed
        limits = LIMITS[self._controls.limits]
        headers: tuple[Mapping[str, str], ...] = slo_headers(limits, self._speed), {}
        self._load.send_to(
            [
                Target(name=fleet.way, url=fleet.url, model=self._model, headers=named)
                for fleet, named in zip(self._fleets, headers, strict=True)
            ]
        )

    @property
    def _rate(self) -> float:
        return LOADS[self._controls.load] * self._count

    # -- what is shown

    def _picture(self, load: Load, screen: ComparisonScreen) -> Picture:
        now = asyncio.get_running_loop().time()
        limits = LIMITS[self._controls.limits]
        for scores in self._scores:
            scores.score(now, limits)
        split, plain = (self._side(number, figures) for number, figures in enumerate(self._figures))
        if lags := sorted(load.lags):
            self._lags.append(self._speed * lags[round(0.9 * (len(lags) - 1))])
            load.lags.clear()
        return Picture(
            elapsed=since_enter(),
            rate=self._rate,
            limits=limits.name,
            speed=self._speed,
            split=split,
            plain=plain,
            verdict=verdict(
                self._controls.way,
                split.score,
                plain.score,
                statistics.median(self._lags) if self._lags else 0.0,
            ),
            news=self._told(),
            curl=lambda width: examples.curl(self._split.url, self._model, width),
            chosen=self._controls.chosen,
            keys=screen.has_keys,
            left_out=load.left_out,
        )

    def _side(self, number: int, figures: Figures) -> Side:
        fleet, scores = self._fleets[number], self._scores[number]
        if fleet.way == "plain":
            title = f"plain: {self._count} engines, chunk {self._options.plain_chunk}"
        elif fleet.way == "auto":
            title = f"auto: {self._count} engines of role any"
        else:
            title = f"split: {self._options.prefill} prefill, {self._options.decode} decode"
        return Side(
            title=title,
            score=scores.curve[-1],
            curve=tuple(scores.curve),
            engines=[
                ComparedEngine(
                    _name(engine.place.role, engine.place.name),
                    self._state(place, engine),
                    engine.running,
                    engine.waiting,
                )
                for place, engine in enumerate(figures.engines)
            ],
            answered=scores.answered,
            failed=scores.failures.total(),
        )

    def _state(self, number: int, engine: EngineFigures) -> State:
        match self._controls.life(number), engine.up:
            case "killed", _:
                return "killed"
            case _, None:
                return "unknown"
            case _, False:
                return "not used"
            case "slow", _:
                return "slow"
        return "up"

    def _seen(self) -> tuple[Seen, Seen]:
        number = self._controls.chosen
        split, plain = (
            Seen(
                figures.recovery,
                scores.failures.total(),
                figures.engines[number].place.url,
                scores.guarded,
            )
            for figures, scores in zip(self._figures, self._scores, strict=True)
        )
        return split, plain

    def _told(self) -> str:
        if self._news is None:
            return "Try k: the chosen engine is killed in both fleets, and others take its streams."
        pressed, before = self._news
        return reaction(pressed, before, self._seen())

    # -- down

    async def _end(self) -> int:
        await or_at_once(self._tasks.settle(0), self._ending.at_once)
        return max(await asyncio.gather(*(fleet.stop() for fleet in self._fleets)))


def _name(role: Role, number: str) -> str:
    """Return an engine's name in the view."""
    return f"{'plain' if role == 'aggregated' else role} {number}"
