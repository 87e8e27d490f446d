"""A leg of a request that one engine serves whole, as the watch over engines that stand still sees
it (`fleet.stalls`).
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from pdproxy.fleet.open_legs import OpenLegs
from pdproxy.kit.errors import EngineError


class OpenPassedLeg:
    """Such a leg, while it is entered as a context, by the task that works for it. Raises what it
    was ended with.
    """

    __slots__ = (
        "_error",
        "_legs",
        "_limit",
        "ended_well",
        "in_silence",
        "paused",
        "prompt_bytes",
        "sign",
        "since",
        "stalled_before",
    )

    phase = "alone"
    is_counted = True
    waits_for = None

    def __init__(
        self, legs: OpenLegs, since: float, prompt_bytes: int, stalled_before: int = 0
    ) -> None:
        self._legs = legs
        self.stalled_before = stalled_before
        """How many engines have stood still under its request before."""
        self._limit = asyncio.timeout(None)
        self._error: EngineError | None = None
        self.since = since
        self.prompt_bytes = prompt_bytes
        self.sign = 0.0
        """When its last data came."""
        self.in_silence = False
        """Whether it waits for an answer, or for the beginning of one."""
        self.paused = False
        """Whether its client does not read."""
        self.ended_well: float | None = None
        """When, if its engine has answered as it should."""

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._legs.add(self)
        self._legs.suspects += bool(self.stalled_before)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._legs.remove(self, ended_well=self.ended_well)
        self._legs.suspects -= bool(self.stalled_before)
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            if self._error is None:
                raise
            raise self._error from None

    def last_sign(self) -> float:
        """Return when its last data came."""
        return self.sign

    @property
    def must_progress(self) -> bool:
        """Whether its client reads."""
        return not self.paused

    def source_lost(self, why: str) -> None:
        """It waits for no KV."""

    def fail(self, error: EngineError) -> None:
        """End it: its task gets the error. Doing so twice changes nothing."""
        if self._error is None:
            self._error = error
            self._limit.reschedule(0.0)  # at once


class OpenWebSocketLeg(OpenPassedLeg):
    """The leg of a WebSocket with live speech. Its engine owes it the rest of a text once it has
    all of the audio. Otherwise it owes nothing: nobody may have spoken.
    """

    __slots__ = ("heard", "owed")

    is_counted = False

    def __init__(self, legs: OpenLegs, since: float) -> None:
        super().__init__(legs, since, 0)
        self.owed = False
        """Whether it is owed something."""
        self.heard = since
        """Since when it has waited for what it is owed: when the last of that came."""

    @property
    def must_progress(self) -> bool:
        """Whether it is owed something, and its client reads."""
        return self.owed and not self.paused

    def owes(self, now: float) -> None:
        """The engine owes it something from now on."""
        self.since = self.heard = now
        self.owed = True

    def wrote(self, now: float) -> None:
        """The engine's core has made a piece of text."""
        self.sign = now
        if not self.owed:
            self.since = now  # nothing that was sent before is without an answer
