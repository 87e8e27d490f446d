"""The legs that are under way at one engine: when each has last shown that the engine works, and
how to end them.
"""

from __future__ import annotations

from typing import Protocol

from pdproxy.kit.errors import EngineError
from pdproxy.scheduling.pace import LARGE, Pace


class OpenLeg(Protocol):
    """A leg that was sent to an engine, until its end. Times are the clock's, in seconds."""

    since: float
    """When it was sent."""
    prompt_bytes: int
    """Of the prompt that the engine computes for it; 0 where it gets the KV."""

    @property
    def phase(self) -> str:
        """Which leg it is, as of `LegFailed`."""

    @property
    def is_counted(self) -> bool:
        """Whether the engine has it among the requests that it reports, soon after it was sent."""

    @property
    def in_silence(self) -> bool:
        """Whether its engine sends nothing now, for as long as it works, so that only probes show
        that it is down.
        """

    @property
    def stalled_before(self) -> int:
        """How many engines have stood still under its request before, perhaps because of it."""

    def last_sign(self) -> float:
        """Return when its last data came, or a time before `since` if none has."""

    @property
    def must_progress(self) -> bool:
        """Whether only the engine itself keeps it from going on: it waits for no KV, and its client
        reads.
        """

    @property
    def waits_for(self) -> str | None:
        """The URL of the engine whose KV the leg may still wait for, None where it waits for no
        KV.
        """

    def source_lost(self, why: str) -> None:
        """End the leg: the engine whose KV it waits for stands still. A leg whose engine has sent
        data is not affected.
        """

    def fail(self, error: EngineError) -> None:
        """End it: its engine stands still. One that is over is not affected."""


class OpenLegs:
    """The open legs of one engine, in the order in which they were sent."""

    __slots__ = (
        "busy_since",
        "canaries",
        "doubted",
        "flowing",
        "last_sign",
        "legs",
        "life",
        "pace",
        "shows_nothing",
        "suspects",
        "waits_out",
    )

    def __init__(self) -> None:
        self.legs: dict[OpenLeg, None] = {}
        self.busy_since = 0.0
        """Since when there has always been one, where there is one."""
        self.flowing = 0
        """Streams of this process that have begun, and are not over: the engine makes a token of
        each in a step.
        """
        self.last_sign = 0.0
        """When a leg that is over has shown its last sign, or ended well."""
        self.pace = Pace()
        self.canaries = 0
        """Requests for one token that are under way, by which the engine is asked whether it
        works.
        """
        self.waits_out = False
        """Whether it stands still, and its legs wait for its sign nevertheless. Written by the
        watch over it, which ends them.
        """
        self.suspects = 0
        """Requests without data under which another engine has stood still, perhaps because of
        them.
        """
        self.doubted = 0.0
        """When the engine has last failed with a request with which another engine failed, too:
        either may be the cause.
        """
        self.life = 0.0
        """When the engine has shown last that its core works. Written by the watch over it."""
        self.shows_nothing = False
        """Whether it has shown nothing for as long as it may. Written by the watch over it, which
        may leave it in use.
        """

    def __repr__(self) -> str:
        return f"<OpenLegs {len(self.legs)}>"

    def add(self, leg: OpenLeg) -> None:
        """A leg begins."""
        if not self.legs:
            self.busy_since = leg.since
        self.legs[leg] = None

    def remove(self, leg: OpenLeg, *, ended_well: float | None = None) -> None:
        """A leg is over. `ended_well`: when, if its engine has answered as it should."""
        self.legs.pop(leg, None)
        if ended_well is None:
            sign = leg.last_sign()
        else:
            sign = ended_well
            if leg.prompt_bytes >= LARGE:
                self.pace.prefilled(leg.prompt_bytes, ended_well - leg.since)
        if sign > leg.since and sign > self.last_sign:
            self.last_sign = sign
