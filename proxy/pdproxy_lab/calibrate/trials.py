"""One experiment on an engine, and what the client saw of it. Pure: the same trial runs over HTTP
and in virtual time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

BESIDE_AFTER = 6
"""Tokens that each stream has before the prompts beside it are sent."""


class TrialError(Exception):
    """A trial could not be carried out. `str()` is one line."""


class MergedError(TrialError):
    """Several tokens came in one event, in each attempt: their times are not known. Another trial
    may do.
    """


class OutOfTimeError(TrialError):
    """The time for all trials is over (`--max-seconds`)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is sent: streams all at once, and prompts beside them when each stream has
    `BESIDE_AFTER` tokens.

    Without streams the prompts are sent at once. No two prompts share a prefix.
    """

    name: str
    streams: int = 0
    prompt_tokens: int = 0
    """Of each stream."""
    output_tokens: int = 0
    """Of each stream."""
    beside: tuple[int, ...] = ()
    """Tokens of the prompts beside the streams. Each asks for one token."""

    @property
    def tokens(self) -> int:
        """Tokens that the engine holds at most."""
        return (
            self.streams * (self.prompt_tokens + self.output_tokens)
            + sum(self.beside)
            + len(self.beside)
        )


@dataclass(frozen=True, slots=True)
class TrialPrompt:
    """A prompt beside the streams: when it was sent and when its token came, in seconds."""

    sent: float
    answered: float

    @property
    def ttft(self) -> float:
        """Seconds from one to the other."""
        return self.answered - self.sent


@dataclass(frozen=True, slots=True)
class Seen:
    """What came back, in seconds of one clock."""

    streams: tuple[tuple[float, ...], ...]
    """When each token of each stream came."""
    beside: tuple[TrialPrompt, ...]
    prefilled: float | None = None
    """When the first of the prompts beside was prefilled by another engine: no KV is pulled before.
    None: not known.
    """


Runner = Callable[[Trial], Awaitable[Seen]]
"""Carries out a trial.

Raises:
    TrialError: it could not.
"""
