"""What was measured of each request, in arrays. Pure."""

from __future__ import annotations

import math
from array import array


class RequestTimes:
    """The times of all requests, by their numbers, which ascend from 0. Seconds from the start of
    the run; NaN: none.
    """

    def __init__(self) -> None:
        self.due = array("d")
        self.first = array("d")
        self.last = array("d")
        self.worst_gap = array("d")
        self.prompt = array("q")
        self.output = array("q")
        self.refusals = 0

    def __len__(self) -> int:
        return len(self.due)

    def arrived(self, number: int, due: float, prompt: int, output: int) -> None:
        """Note a request."""
        assert number == len(self.due)
        self.due.append(due)
        for times in (self.first, self.last, self.worst_gap):
            times.append(math.nan)
        self.prompt.append(prompt)
        self.output.append(output)

    def refused(self, number: int) -> None:
        """Note that a request got no answer."""
        self.first[number] = self.last[number] = self.worst_gap[number] = math.nan
        self.refusals += 1

    def ended(self, number: int, first: float, last: float, worst_gap: float) -> None:
        """Note a whole answer: when the client had its first and its last token, and the worst gap
        between two.
        """
        self.first[number], self.last[number], self.worst_gap[number] = first, last, worst_gap
