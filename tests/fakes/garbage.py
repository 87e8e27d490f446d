"""What the garbage collector finds of pdproxy after a piece of work: it should find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def left_to_the_collector() -> Iterator[list[object]]:
    """Yield a list. At the end it holds pdproxy's objects that the work has made and left in reference cycles.

    What was there before does not count: a proxy of an earlier test may lose its last reference meanwhile.
    """
    found: list[object] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.extend(_ours(gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def _ours(garbage: list[object]) -> list[object]:
    """Return what is pdproxy's, without the simulator's: its engines serve in this process, too."""
    return [one for one in garbage if _is_ours(one)]


def _is_ours(one: object) -> bool:
    if isinstance(one, FrameType):
        return "/pdproxy/" in one.f_code.co_filename and "/sim/" not in one.f_code.co_filename
    kind = type(one).__module__
    return kind.startswith("pdproxy.") and not kind.startswith("pdproxy_lab.sim")
