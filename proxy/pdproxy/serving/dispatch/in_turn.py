"""One question to several engines, one after the other, until one answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, OverloadedError, Wait
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.scheduling.nodes import Node

MOST = 2
"""Engines that are asked one question."""

Answer = TypeVar("Answer")


async def first_answer(
    nodes: Sequence[Node],
    ask: Callable[[Node], Awaitable[Answer]],
    clock: Clock,
    seconds: float,
    wait: Wait,
    observers: Observers,
) -> Answer | None:
    """Return the first answer, None if none of the first engines gives one in time. Each has an equal part of the time."""
    asked = nodes[:MOST]
    for node in asked:
        try:
            with clock.within(seconds / len(asked)):
                return await ask(node)
        except (EngineError, OverloadedError):
            continue
        except TimeoutError:
            observers.notify(DeadlinePassed(wait.value))
    return None
