"""The totals of one request over its exchanges: the engines that served it, its tokens, the gaps of its streams.

Owns the sums. An exchange is added once it is over and is not kept: a list may have thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdproxy.observe.events import Gaps, LegTimes
from pdproxy.serving.dispatch.exchange import Exchange


class RequestTotals(msgspec.Struct, eq=False):
    """The sums of one request. Owned by one `LiveRequest`."""

    _gaps: Gaps | None = None
    _legs: list[tuple[int, LegTimes]] = []
    _reported: bool = False
    """Whether an engine has reported a usage."""
    _prompt: int = 0
    _completion: int = 0
    _counted: int = 0
    """Tokens of streams without a usage; events, where their tokens are not known."""

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
        """Tokens of all prompts as engines reported them, None if no engine did."""
        return self._prompt if self._reported else None

    @property
    def completion_tokens(self) -> int | None:
        """Tokens of all answers as engines reported them, otherwise as counted in the streams; None if there were none."""
        return self._completion if self._reported else self._counted or None

    def add_legs(self, index: int, times: LegTimes) -> None:
        """Add the legs of the prompt at `index`."""
        self._legs.append((index, times))

    def add(self, index: int, exchange: Exchange) -> None:
        """Add the exchange of the prompt at `index`: its legs, tokens and gaps."""
        self._legs.append((index, exchange.times()))
        streams = exchange.streams
        for fast_path in streams.paths:
            gaps = self._gaps
            if gaps is None:
                self._gaps = Gaps(fast_path.buckets, fast_path.total)
            else:
                buckets = [a + b for a, b in zip(gaps.buckets, fast_path.buckets, strict=True)]
                self._gaps = Gaps(buckets, gaps.total + fast_path.total)
        usage = streams.usage
        if usage is not None:
            self._reported = True
            self._prompt += usage.prompt_tokens - streams.done
            self._completion += (usage.completion_tokens or 0) + streams.done
        elif streams.paths:
            last = streams.paths[-1]
            self._counted += streams.done + (last.tokens or last.events)
