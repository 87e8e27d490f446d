"""What the scheduler process and workers tell each other about the legs of one pool. Only data.

A leg, or a push that a leg awaits, is named by a number and the time since when it exists. Two that
are there at the same time have different numbers, and the number of one that is over may come
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# -- from the scheduler process


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
