"""What a run sends: requests with the time at which each is due, and their lengths. Pure: a seed
gives the same requests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from pdproxy_lab.bench.arrivals import MAX_REQUESTS, Arrivals
from pdproxy_lab.bench.slo import BenchSlo
from pdproxy_lab.bench.trace import BLOCK, TraceEntry


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
    class_name: str | None = None
    """The class that it is of."""
    conversation: int | None = None
    """What the requests of one conversation have in common. None: it is the only one of its
    conversation.
    """


class Lengths(msgspec.Struct, frozen=True):
    """Numbers of tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, chance: random.Random) -> int:
        """Return one of them."""
        return chance.randint(self.low, self.high)


INPUTS, OUTPUTS = Lengths(1024, 1024), Lengths(128, 128)
"""Of requests for which no other lengths are given."""


class RequestClass(msgspec.Struct, frozen=True, kw_only=True):
    """A class of requests. Without a name, all requests are alike.

    `share`: how many of the requests are of it, in relation to the other classes' shares.
    `inputs`, `outputs`: the lengths of its prompts and answers. `slo`: what its requests are to
    keep.
    """

    name: str | None = None
    share: float | None = None
    inputs: Lengths | None = None
    outputs: Lengths | None = None
    slo: BenchSlo | None = None


def synthetic(
    arrivals: Arrivals,
    classes: Sequence[RequestClass],
    seed: int,
    *,
    duration: float | None = None,
    requests: int | None = None,
) -> list[Planned]:
    """Return requests with random lengths and unique prompts, each of a class that chance draws.

    Raises:
        ValueError: they are too many.
    """
    chance = random.Random(f"{seed}:lengths")
    times = arrivals.times(seed, duration=duration, requests=requests)
    shares = [1.0 if one.share is None else one.share for one in classes]
    drawn = random.Random(f"{seed}:classes").choices(classes, shares, k=len(times))
    return [
        Planned(
            time,
            (one.inputs or INPUTS).draw(chance),
            (one.outputs or OUTPUTS).draw(chance),
            class_name=one.name,
        )
        for time, one in zip(times, drawn, strict=True)
    ]


def classified(planned: Sequence[Planned], classes: Sequence[RequestClass]) -> list[Planned]:
    """Return requests with their classes: each is of the first one that has prompts of its length.
    One without `inputs` has all.
    """

    def class_of(tokens: int) -> str | None:
        for one in classes:
            if one.inputs is None or one.inputs.low <= tokens <= one.inputs.high:
                return one.name
        return None

    return [msgspec.structs.replace(one, class_name=class_of(one.input_tokens)) for one in planned]


def conversations(planned: Sequence[Planned]) -> list[Planned]:
    """Return a trace's requests with their conversations: those whose prompts have the same first
    block behind what more than half of the prompts begin with, such as a system prompt.

    A trace does not name conversations. Two that begin with the same document are one here.
    """
    whole = [(one.hash_ids or ())[: one.input_tokens // BLOCK] for one in planned]
    counts = Counter(number for ids in whole for number in ids)
    return [
        msgspec.structs.replace(
            one,
            conversation=next((number for number in ids if 2 * counts[number] <= len(whole)), None),
        )
        for one, ids in zip(planned, whole, strict=True)
    ]


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
