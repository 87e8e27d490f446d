"""One request's outputs, from the engine's steps to the API server."""

from __future__ import annotations

import asyncio
from collections import deque

from pdproxy.sim.request import EngineOutput


class OutputStream:
    """One request's outputs on their way to its reader."""

    def __init__(self) -> None:
        self.outputs: deque[EngineOutput] = deque()
        self.wake = asyncio.Event()
        self.dead = False

    def put(self, output: EngineOutput) -> None:
        """Add an output."""
        self.outputs.append(output)
        self.wake.set()

    def fail(self) -> None:
        """End it: the engine's core has died."""
        self.dead = True
        self.wake.set()
