"""A kind of fault: the base class of all faults.

A kind acts in one of four ways, by the method that it overrides: `on_connection` (no answer is
under way), `on_answer` (the application's answer goes on), `take_over` (the client gets something
else instead), `on_notice`. Kinds with `closes_port` act by being armed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.faults.targets import AnswerTarget, Connection, Delivery

Argument = str | int | float | bool


class FaultError(ValueError):
    """A fault that can't be used. `str()` says what is wrong, in one line."""


class Occurrence(msgspec.Struct, frozen=True):
    """One time that a fault happens."""

    kind: FaultKind
    at: Moment
    args: Mapping[str, Any]
    """Complete, with the types of the kind's defaults."""
    chance: random.Random
    """The fault's own source of draws."""


class FaultKind:
    """One kind of fault. Subclasses set the facts and override the actions that their moments
    need.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """What happens, for people."""
    moments: ClassVar[Sequence[Moment]]
    """When it can happen; the first is the default."""
    args: ClassVar[Mapping[str, Argument]] = {}
    """Its own arguments and their defaults. Times are in seconds."""
    streams: ClassVar[bool] = False
    """It can only happen to streamed answers."""
    replaces: ClassVar[bool] = False
    """It can only happen while nothing of the answer has been sent."""
    closes_port: ClassVar[bool] = False
    """The port refuses connections while it is armed, for `seconds` (0: until it is disarmed). It
    has no other action.
    """
    engine_continues: ClassVar[bool] = False
    """The engine goes on working for an answer that was taken over."""

    def check(self, at: Moment, args: Mapping[str, Any]) -> None:
        """Check the moment and the complete arguments, beyond their names and types.

        Raises:
            FaultError: they don't fit.
        """

    def on_connection(self, connection: Connection, now: Occurrence) -> bool:
        """Act on a connection before its first request or right after a whole answer; return
        whether it has acted.
        """
        return False

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        """Act and leave the answer to the application; return False to take the answer over
        instead.
        """
        return False

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        """Give the client something else. On return the answer is complete, or the connection ends
        by itself or by the client.
        """
        raise NotImplementedError(
            self.name
        )  # pragma: no cover - a kind that nothing implements is a defect

    def on_notice(self, delivery: Delivery, now: Occurrence) -> None:
        """Change how a notice, or a message with KV events, is sent, or a replay of them is
        answered.
        """


def arguments(**defaults: Argument) -> Mapping[str, Argument]:
    """Return a kind's arguments with their defaults."""
    return defaults
