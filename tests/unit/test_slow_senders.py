"""A body that comes too slowly: each stretch of time is judged by what came in it, and the whole
body by its own time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdproxy.web.slow_senders import SendWatch
from tests.fakes.clock import ManualClock


class Sender:
    """A body that a test sends, 100 bytes/s and 10 s at least; 35 s at most."""

    def __init__(self) -> None:
        self.clock, self.came, self.said = ManualClock(), 0, list[str]()
        bounds: Any = SimpleNamespace(
            slow_readers=SimpleNamespace(clock=self.clock),
            body_timeout=10.0,
            min_send_rate=100.0,
            longest_body=35.0,
        )
        self.watch = SendWatch(
            bounds, lambda: self.came, lambda error: self.said.append(str(error))
        )

    async def send(self, *sizes: int) -> None:
        """Send so many bytes in each stretch of ten seconds."""
        for size in sizes:
            self.came += size
            await self.clock.advance(10.0)


@pytest.mark.parametrize("good", [0, 1, 2])
async def test_a_stretch_in_which_too_little_came_ends_it(good: int) -> None:
    """However much came before."""
    sender = Sender()
    await sender.send(*[5000] * good)
    assert sender.said == []
    await sender.send(999)
    assert sender.said == ["The body came too slowly: 999 bytes in 10 s"]
    await sender.send(0)
    assert len(sender.said) == 1, "it is judged no more"


async def test_what_comes_in_time_may_go_on_until_the_whole_time_is_over() -> None:
    sender = Sender()
    await sender.send(1000, 1000, 1000)
    assert sender.said == []
    await sender.send(5000)
    assert sender.said == ["The body was not complete in 35 s"]


async def test_a_body_that_is_complete_is_judged_no_more() -> None:
    sender = Sender()
    await sender.send(1000)
    sender.watch.cancel()
    await sender.send(0, 0, 0)
    assert sender.said == []
    assert sender.clock.pending() == []
