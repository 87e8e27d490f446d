"""The totals of one request over its exchanges: the engines that served it, the gaps of its
streams, and its meter.

Owns the sums. An exchange is added once it is over and is not kept: a list may have thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdproxy.observe.events import Gaps, LegTimes
from pdproxy.serving.dispatch.exchange import Exchange
from pdproxy.serving.dispatch.following import Streams
from pdproxy.serving.request.meter import Meter


class RequestTotals(msgspec.Struct, eq=False):
    """The sums of one request. Owned by one `LiveRequest`."""

    _gaps: Gaps | None = None
    _legs: list[tuple[int, LegTimes]] = []
    meter: Meter = msgspec.field(default_factory=Meter)

    @property
    def legs(self) -> Sequence[LegTimes]:
        """The legs of each prompt that was begun, in the order of the list."""
        if len(self._legs) == 1:
            return [self._legs[0][1]]
        return [times for _, times in sorted(self._legs, key=lambda one: one[0])]

    @property
    def gaps(self) -> Gaps:
        """Gaps between the events of all streams."""
        return self._gaps or Gaps()

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all prompts, None if no engine was asked for anything that counts."""
        meter = self.meter
        return meter.prompt if meter.asked else None

    @property
    def completion_tokens(self) -> int | None:
        """Tokens of all answers, None if nothing is known of them."""
        meter = self.meter
        return meter.completion if meter.measured else None

    def add_legs(self, index: int, times: LegTimes) -> None:
        """Add the legs of the prompt at `index`."""
        self._legs.append((index, times))

    def add(self, index: int, exchange: Exchange) -> Streams:
        """Add the exchange of the prompt at `index`: its legs and gaps. Return its streams, for
        `Meter.add`.
        """
        self._legs.append((index, exchange.times()))
        streams = exchange.streams
        for fast_path in streams.paths:
            gaps = self._gaps
            if gaps is None:
                self._gaps = Gaps(fast_path.buckets, fast_path.total)
            else:
                buckets = [a + b for a, b in zip(gaps.buckets, fast_path.buckets, strict=True)]
                self._gaps = Gaps(buckets, gaps.total + fast_path.total)
        return streams
