"""What an input costs in numbers that are the same on every machine: for tests, which look at no
clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.fuzz.cost.bounds import FREE_STEPS, KIB, MIB
from tests.fuzz.cost.measure import steps, traced
from tests.fuzz.cost.paths import Path
from tests.fuzz.cost.recipes import Recipe

SIZE = 128 * KIB
"""Bytes of an input whose steps are counted."""
LARGE = MIB
"""Bytes of one whose memory is: `free` must not hide what a byte takes. Where it would hide that of
a MiB, too, SIZE shows as much; the search takes larger inputs.
"""


def over(path: Path, one: Recipe) -> str | None:
    """Return the first bound that an input is over, in words; None if it is within all of them."""
    return next(_over(path, one), None)


def _over(path: Path, one: Recipe) -> Iterator[str]:
    steps(path.run, one.render(KIB))  # what is built at the first use is no input's
    data = one.render(min(SIZE, path.most))
    counted = steps(path.run, data)
    if counted > FREE_STEPS + path.bound.steps * len(data):
        yield f"{counted} steps for {len(data)} bytes"
    data = one.render(min(LARGE if path.bound.free < 16 * LARGE else SIZE, path.most))
    peak, made = traced(path.run, data)
    if made > path.bound.made:
        yield f"{made} bytes written for {len(data)} bytes"
    if peak > path.bound.free + path.bound.memory * len(data):
        yield f"{peak} bytes of memory for {len(data)} bytes"
