"""What the scheduler process and workers say to each other about the legs of one pool: the topic of
these messages, and their bodies.

A leg, or a push that a leg awaits, is named by a number and the time since when it exists. Two that
are there at the same time have different numbers, and the number of one that is over may come
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


def topic(pool: int) -> str:
    """Return the topic of the pool with this number."""
    return f"legs {pool}"


# -- from the scheduler process


class Ask(msgspec.Struct, array_like=True, tag=0):
    """Asks a worker to tell what its legs have shown. `number`: of the question; `legs`: whether
    the legs themselves are to be told, and not only what they have moved.
    """

    number: int
    legs: bool


class End(msgspec.Struct, array_like=True):
    """Ends a leg, or one that awaits a push, and says why. `wait`: of the error; `may_be_cause`:
    see `StandstillError`.

    `of_source`: the engine whose KV it waits for stands still.
    """

    number: int
    since: float
    why: str
    wait: str | None = None
    may_be_cause: bool = False
    of_source: bool = False


class Ends(msgspec.Struct, array_like=True, tag=1):
    """What is to end at one engine: legs; and pushes that are lost."""

    url: str
    legs: Sequence[End]
    pushes: Sequence[End]


class Answer(msgspec.Struct, array_like=True, tag=2):
    """The answer to a `Question`."""

    number: int
    may_wait: bool


# -- from a worker


class ToldLeg(msgspec.Struct, array_like=True):
    """An open leg: see `fleet.open_legs.OpenLeg`."""

    number: int
    since: float
    last_sign: float
    prompt_bytes: int
    stalled_before: int
    is_counted: bool
    must_progress: bool
    waits_for: str | None


class ToldPush(msgspec.Struct, array_like=True):
    """A push that a leg awaits: see `serving.kv.lost_pushes.AwaitedPush`."""

    number: int
    since: float
    prefill: str
    promised: bool


class Shown(msgspec.Struct, array_like=True):
    """What the legs at one engine show: all that are open, and the pushes that they await.
    `busy_since`, `last_sign`: see `OpenLegs`; `prefilled`: what its pace was told since.
    """

    busy_since: float
    last_sign: float
    legs: Sequence[ToldLeg]
    pushes: Sequence[ToldPush]
    prefilled: Sequence[tuple[int, float]]


class EngineLegs(msgspec.Struct, array_like=True):
    """What a worker's legs have shown of one engine. `shown`: None where the legs are not told.

    Since it was told last, in prompt tokens: by how much those have changed whose KV is `loading`,
    and how many have `arrived`.
    """

    url: str
    loading: int = 0
    arrived: int = 0
    shown: Shown | None = None


class Told(msgspec.Struct, array_like=True, tag=0):
    """The answer to `Ask`; number 0 comes without a question, from a worker that is asked from now
    on. Of engines that it does not name nothing has changed.
    """

    number: int
    engines: Sequence[EngineLegs] = ()


class Question(msgspec.Struct, array_like=True, tag=1):
    """Asks whether a leg at an engine may go on waiting behind its deadline. `wait`: which; or
    `push`, if that may be lost: its number and time.
    """

    number: int
    url: str
    wait: str
    push: tuple[int, float] | None


class Questions(msgspec.Struct, array_like=True, tag=2):
    """All questions of a worker that are open: the first thing that a new process is told."""

    questions: Sequence[Question]


encode = msgspec.msgpack.Encoder().encode
decode_of_worker = msgspec.msgpack.Decoder(Told | Question | Questions).decode
"""Returns what a worker has said. Raises msgspec.MsgspecError."""
decode_of_scheduler = msgspec.msgpack.Decoder(Ask | Ends | Answer).decode
"""Returns what the scheduler process has said. Raises msgspec.MsgspecError."""
