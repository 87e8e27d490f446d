"""A request at one virtual engine, and what the engine asks of those around it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

At = Callable[[float, Callable[[Any, float], None], Any], None]
"""`at(time, what, argument)` calls `what(argument, time)` at a time, in seconds."""


class Work:
    """A request at one engine. `keys`: of the whole units of its prompt; `pulls`: its KV comes from
    another engine.
    """

    __slots__ = (
        "_blocks",
        "base",
        "call",
        "computed",
        "end_step",
        "first_at",
        "held",
        "joined",
        "keys",
        "last_at",
        "loaded",
        "made",
        "output",
        "prompt",
        "pulls",
        "slot",
        "ticket",
        "units",
        "worst_s",
    )

    def __init__(
        self, call: Any, prompt: int, output: int, keys: Sequence[int], *, pulls: bool = False
    ) -> None:
        self.call, self.prompt, self.output, self.keys, self.pulls = (
            call,
            prompt,
            output,
            keys,
            pulls,
        )
        self.made = 0
        """Tokens of the answer."""
        self.computed = 0
        """Tokens whose KV is in the memory, while it does not decode."""
        self.loaded = False
        """Its KV came from elsewhere, and it waits for its first step."""
        self.held: list[int] = []
        """Keys of the cached units that it uses."""
        self.units = 0
        """Units of its prompt that were found or computed."""
        self.joined = self.base = self.slot = self.end_step = 0
        """Decoding: the step before its first one, the tokens that it had then, when it needs
        blocks, its last step.
        """
        self.ticket = -1
        self.first_at: float | None = None
        self.last_at = 0.0
        self.worst_s = 0.0
        """The worst gap between two tokens; complete at its end."""

    @property
    def length(self) -> int:
        """The tokens that must be computed before its next one."""
        return self.prompt + self.made


class Listener(Protocol):
    """What an engine reports."""

    def pulled(self, work: Work, now: float) -> None:
        """The KV of a request is here."""

    def began(self, work: Work, now: float) -> None:
        """A request has its first token. Not of one that was preempted."""

    def ended(self, work: Work, now: float) -> bool:
        """A request has all its tokens. Return whether its blocks are kept until
        `Engine.release`.
        """
