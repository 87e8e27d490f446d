"""One request's outputs, from the engine's steps to the API server."""

from __future__ import annotations

import asyncio
from collections import deque

from pdproxy_lab.sim.request import EngineOutput


class OutputStream:
    """One request's outputs on their way to its reader."""

    def __init__(self, delay_s: float = 0.0) -> None:
        """`delay_s`: how long each output is on its way."""
        self._delay_s = delay_s
        self.outputs: deque[EngineOutput] = deque()
        self.wake = asyncio.Event()
        self.dead = False

    def put(self, output: EngineOutput) -> None:
        """Add an output."""
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._arrived, output)
        else:
            self._arrived(output)

    def _arrived(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        self.wake.set()

    def fail(self) -> None:
        """End it: the engine's core has died."""
        self.dead = True
        self.wake.set()
