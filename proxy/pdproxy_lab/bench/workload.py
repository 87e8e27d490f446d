"""What a run sends: requests with the time at which each is due, and their lengths. Pure: a seed
gives the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from pdproxy_lab.bench.arrivals import MAX_REQUESTS, Arrivals
from pdproxy_lab.bench.trace import TraceEntry


class Planned(msgspec.Struct, frozen=True):
    """A request of a run: when it is due (seconds from the start), tokens of prompt and answer, a
    trace's hash ids, or the prompt itself.
    """

    at: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    text: str | None = None
    """The prompt. None: it is made, with as many tokens as it is to have."""


class Lengths(msgspec.Struct, frozen=True):
    """Numbers of tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, chance: random.Random) -> int:
        """Return one of them."""
        return chance.randint(self.low, self.high)


def synthetic(
    arrivals: Arrivals,
    inputs: Lengths,
    outputs: Lengths,
    seed: int,
    *,
    duration: float | None = None,
    requests: int | None = None,
) -> list[Planned]:
    """Return requests with random lengths and unique prompts.

    Raises:
        ValueError: they are too many.
    """
    chance = random.Random(f"{seed}:lengths")
    times = arrivals.times(seed, duration=duration, requests=requests)
    return [Planned(time, inputs.draw(chance), outputs.draw(chance)) for time in times]


def replayed(
    entries: Sequence[TraceEntry],
    seed: int,
    *,
    scale: float = 1.0,
    arrivals: Arrivals | None = None,
    duration: float | None = None,
    requests: int | None = None,
) -> list[Planned]:
    """Return a trace's requests, at most `requests` and those that are due before `duration`
    seconds.

    `scale`: how many times faster than in the trace they come. With `arrivals` they come as these
    say, in the trace's order.

    Raises:
        ValueError: they are too many.
    """
    if arrivals is None:
        times = [entry.time / scale for entry in entries]
    elif duration is not None:
        times = arrivals.times(seed, duration=duration)
    else:
        times = arrivals.times(seed, requests=min(len(entries), requests or len(entries)))
    found = [
        Planned(time, entry.input_tokens, entry.output_tokens, entry.hash_ids)
        for time, entry in zip(times, entries, strict=False)
        if duration is None or time < duration
    ]
    if len(found[:requests]) > MAX_REQUESTS:
        raise ValueError(f"{len(found)} requests are more than {MAX_REQUESTS} in one run")
    return found[:requests]
