"""What the garbage collector finds of pdproxy after a piece of work: it should find nothing."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType
from typing import TypeVar

import uvloop

from tests.fakes.clock import later_turns

_S = TypeVar("_S")


@contextmanager
def left_to_the_collector() -> Iterator[list[object]]:
    """Yield a list. At the end it holds pdproxy's objects that the work has made and left in
    reference cycles.

    What was there before does not count: a proxy of an earlier test may lose its last reference
    meanwhile. It stays frozen, as `tests/conftest.py` leaves the modules: neither this search nor
    later ones look through it.
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
        gc.enable()


def _ours(garbage: list[object]) -> list[object]:
    """Return what is pdproxy's. Simulated engines, which serve in this process, too, are not."""
    return [one for one in garbage if _is_ours(one)]


def _is_ours(one: object) -> bool:
    if isinstance(one, FrameType):
        return str(one.f_globals.get("__name__")).startswith("pdproxy.")
    return type(one).__module__.startswith("pdproxy.")


def check(
    world: AbstractAsyncContextManager[_S],
    act: Callable[[_S], Awaitable[None]],
    rest: Callable[[_S], Awaitable[None]],
    *,
    before: Callable[[_S], Awaitable[None]] | None = None,
) -> None:
    """Act in a world, on uvloop: nothing of pdproxy may be left to the collector.

    `rest` waits until what was begun is over. `before` makes what is made once, None: `act` does.
    """

    async def run() -> None:
        async with world as made:
            await (before or act)(made)
            await rest(made)
            with left_to_the_collector() as found:
                await act(made)
                await rest(made)
                await later_turns()  # connections are lost in a later turn of the loop
        assert not found

    uvloop.run(run())
