"""The requests of a simulated run: those of `pdproxy bench`, or a trace that is repeated as often
as needed. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import msgspec

from pdproxy_lab.bench.arrivals import MAX_REQUESTS, Arrivals
from pdproxy_lab.bench.trace import BLOCK, TraceEntry
from pdproxy_lab.bench.workload import Lengths, Planned
from pdproxy_lab.simulate.cluster import Call


class Synthetic(msgspec.Struct, frozen=True, kw_only=True):
    """Unique prompts with lengths that are drawn evenly from ranges. Either `duration` (seconds) or
    `requests` is given.
    """

    arrivals: Arrivals
    inputs: Lengths
    outputs: Lengths
    duration: float | None = None
    requests: int | None = None

    def calls(self, seed: int) -> Iterator[Call]:
        """Return the requests of a seed, in the order in which they are due.

        Raises:
            ValueError: they are too many.
        """
        times = self.arrivals.times(seed, duration=self.duration, requests=self.requests)
        chance = random.Random(f"{seed}:lengths")
        return (
            Call(number, time, self.inputs.draw(chance), self.outputs.draw(chance))
            for number, time in enumerate(times)
        )


class TraceReplay(msgspec.Struct, frozen=True, kw_only=True):
    """A trace, from its beginning. Where its requests don't suffice, it comes again, with other
    prompts of the same structure.

    `scale`: how many times faster than in the trace they come. With `arrivals` they come as these
    say, in the trace's order. `duration`: in seconds; `requests`: how many; with both None the
    trace once.
    """

    entries: Sequence[TraceEntry]
    scale: float = 1.0
    arrivals: Arrivals | None = None
    duration: float | None = None
    requests: int | None = None

    def calls(self, seed: int) -> Iterator[Call]:
        """Return the requests of a seed, in the order in which they are due.

        Raises:
            ValueError: they are too many.
        """
        count = (
            self.requests
            if self.requests is not None or self.duration is not None
            else len(self.entries)
        )
        if self.arrivals is None:
            times = self._own_times()
        elif self.duration is not None:
            times = iter(self.arrivals.times(seed, duration=self.duration))
        else:
            times = iter(self.arrivals.times(seed, requests=count))
        return self._calls(times, count)

    def _calls(self, times: Iterator[float], count: int | None) -> Iterator[Call]:
        entries = self.entries
        ids = 1 + max(
            (max(entry.hash_ids, default=0) for entry in entries if entry.hash_ids), default=0
        )
        for number, time in enumerate(times):
            if number == count or (self.duration is not None and time >= self.duration):
                return
            if number >= MAX_REQUESTS:
                raise ValueError(f"more than {MAX_REQUESTS} requests in one run")
            turn, place = divmod(number, len(entries))
            entry = entries[place]
            whole = (entry.hash_ids or ())[: entry.input_tokens // BLOCK]
            keys = [one + turn * ids for one in whole]
            yield Call(number, time, entry.input_tokens, entry.output_tokens, keys)

    def _own_times(self) -> Iterator[float]:
        """Return the trace's times, again and again: its last request and the next first one are a
        mean gap apart.
        """
        first, last = self.entries[0].time, self.entries[-1].time
        length = (last - first) * len(self.entries) / max(len(self.entries) - 1, 1) or 1.0
        for turn, entries in enumerate(repeat(self.entries)):
            for entry in entries:
                yield (entry.time - first + turn * length) / self.scale


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that `pdproxy bench` plans: the same ones, at the same times."""

    plan: Callable[[int], Sequence[Planned]]

    def calls(self, seed: int) -> Iterator[Call]:
        """Return the requests of a seed, in the order in which they are due."""
        for number, one in enumerate(self.plan(seed)):
            whole = (one.hash_ids or ())[: one.input_tokens // BLOCK]
            yield Call(number, one.at, one.input_tokens, one.output_tokens, whole)


Load = Synthetic | TraceReplay | Given
