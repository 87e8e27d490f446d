"""What the keys change: the load, the limits, the way, one engine of each fleet. Pure.

Owns which key does what, and what must not be asked for: one engine at a time may be down, so that
another one can serve what it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pdproxy_lab.demo.comparison.fleet import Way
from pdproxy_lab.demo.comparison.setup import FIRST_LOAD, LIMITS, LOADS, SLOW

UP, DOWN = "\x1b[A", "\x1b[B"
"""The arrow keys, as terminals send them."""

Life = Literal["up", "killed", "slow"]
Change = Literal["kill", "start", "slow", "usual", "load", "limits", "way"]


@dataclass(frozen=True, slots=True)
class Pressed:
    """What a key has changed, None: nothing; and what there is to say about it."""

    change: Change | None
    text: str


@dataclass(slots=True)
class Controls:
    """What is set now. `engines`: the names of each number's engine, in both fleets, such as
    "prefill 0 and plain 0"; `chosen`: the number, from 0, that the next key is about.
    """

    engines: tuple[str, ...]
    decoding: frozenset[int]
    """Numbers of the engines that decode if prompts are split."""
    chosen: int = 0
    load: int = FIRST_LOAD
    limits: int = 0
    way: Way = "split"
    lives: dict[int, Life] = field(default_factory=dict)
    """Of the engines that are not up as usual."""

    def press(self, key: str, ready: bool) -> Pressed | None:
        """Take a key; None: it has no meaning. `ready`: whether both proxies use all engines that
        are not killed.
        """
        if key.isdecimal() and 1 <= int(key) <= len(self.engines):
            self.chosen = int(key) - 1
            return Pressed(None, f"Engine {key} is chosen: {self.engines[self.chosen]}.")
        match key:
            case "k":
                return self._kill_or_start(ready)
            case "s":
                return self._slow_or_usual()
            case "+" | "=" | "-" | "_":
                return self._change_load(1 if key in "+=" else -1)
            case _ if key in (UP, DOWN):
                return self._change_load(1 if key == UP else -1)
            case "l":
                self.limits = (self.limits + 1) % len(LIMITS)
                return Pressed("limits", f"In time now means {LIMITS[self.limits].name}.")
            case "a":
                return self._change_way()
        return None

    def life(self, number: int) -> Life:
        """Return how an engine is."""
        return self.lives.get(number, "up")

    @property
    def killed(self) -> int | None:
        """The number of the engine that is down."""
        return next((number for number, life in self.lives.items() if life == "killed"), None)

    def _kill_or_start(self, ready: bool) -> Pressed:
        number, names = self.chosen, self.engines[self.chosen]
        if self.life(number) == "killed":
            del self.lives[number]
            return Pressed("start", f"Engine {number + 1} starts again: {names}.")
        if self.killed is not None:
            return Pressed(None, f"Engine {self.killed + 1} is down: start it first, with k.")
        if not ready:
            return Pressed(None, "The proxies do not use all engines yet: wait some seconds.")
        if self.decoding == {number} and self.way == "split":
            return Pressed(None, f"Engine {number + 1} is the only one that decodes: it stays.")
        self.lives[number] = "killed"
        return Pressed("kill", f"Engine {number + 1} was killed: {names}.")

    def _slow_or_usual(self) -> Pressed:
        number, names = self.chosen, self.engines[self.chosen]
        match self.life(number):
            case "killed":
                return Pressed(None, f"Engine {number + 1} is down: start it first, with k.")
            case "slow":
                del self.lives[number]
                return Pressed("usual", f"Engine {number + 1} is as fast as before: {names}.")
            case _:
                self.lives[number] = "slow"
                return Pressed(
                    "slow", f"Engine {number + 1} takes {SLOW:g} times as long now: {names}."
                )

    def _change_load(self, by: int) -> Pressed:
        wanted = self.load + by
        if not 0 <= wanted < len(LOADS):
            return Pressed(None, f"That is the {'highest' if by > 0 else 'lowest'} load.")
        self.load = wanted
        return Pressed("load", f"The load is {LOADS[wanted] * len(self.engines):g} req/s now.")

    def _change_way(self) -> Pressed:
        self.way = "auto" if self.way == "split" else "split"
        if self.way == "auto":
            return Pressed("way", "auto decides for each request now: split it, or serve it whole.")
        return Pressed("way", "All prompts are split again.")
