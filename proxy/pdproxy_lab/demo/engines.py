"""The demo's interface to engines, and the simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdproxy.settings.engines import Role
from pdproxy_lab.demo.figures import ShownEngine
from pdproxy_lab.demo.options import DemoOptions, Say
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from pdproxy_lab.up.errors import UpError


@dataclass(frozen=True, slots=True)
class TrafficPace:
    """The traffic for these engines: the number of people, and the seconds between an answer and
    the next question.
    """

    people: int
    pause: float


class Engines(Protocol):
    """Engines that are started and stopped as one."""

    model: str
    """The name that clients give."""
    description: str
    """A short description."""
    pace: TrafficPace

    @property
    def places(self) -> Sequence[ShownEngine]:
        """Their names, roles and URLs; known after the start."""

    async def start(self, say: Say) -> None:
        """Start all, and return once each can serve.

        Raises:
            UpError: one of them can't.
        """

    async def stop(self, at_once: asyncio.Event) -> None:
        """End all, gracefully unless `at_once` is set. Works at any time, started or not."""


def roles(options: DemoOptions) -> list[Role]:
    """Return the role of each engine wanted."""
    wanted: list[tuple[Role, int]] = [("prefill", options.prefill), ("decode", options.decode)]
    return [role for role, count in wanted for _ in range(count)]


class SimEngines:
    """Simulated engines in this process, on free ports of the loopback."""

    def __init__(self, options: DemoOptions) -> None:
        self.model = options.model or "sim"
        self.description = (
            f"{options.prefill} prefill and {options.decode} decode engines, simulated"
        )
        self.pace = TrafficPace(people=8, pause=1.5)
        self.places: list[ShownEngine] = []
        self._roles = roles(options)
        self._sims = [
            # Different seeds: engine ids are drawn, and must differ.
            SimServer(
                SimFacts(role=role, model=self.model, enable_prompt_tokens_details=True),
                host="127.0.0.1",
                chance=number,
            )
            for number, role in enumerate(self._roles)
        ]

    async def start(self, say: Say) -> None:
        """Start all."""
        counts: dict[Role, int] = {}
        for role, sim in zip(self._roles, self._sims, strict=True):
            try:
                await sim.start()
            except OSError as error:
                raise UpError(
                    f"a simulated engine can't listen on 127.0.0.1: {error.strerror or error}"
                ) from error
            self.places.append(ShownEngine(str(counts.setdefault(role, 0)), role, sim.url))
            counts[role] += 1

    async def stop(self, at_once: asyncio.Event) -> None:
        """Stop all."""
        for sim in self._sims:
            await sim.stop()
