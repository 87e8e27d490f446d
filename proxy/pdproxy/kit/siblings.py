"""What a process may ask and tell the others that serve with it. Who serves alone has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

ALL = -1
"""Whom something is passed on to: all processes, who sends it included."""


@dataclass(slots=True)
class SiblingAnswers:
    """What the others have answered, by their numbers. `silent`: those that did not in time, or
    have ended meanwhile.
    """

    of: dict[int, bytes] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    last: dict[int, bytes] = field(default_factory=dict)
    """The last reports of the silent ones, empty where there was none."""
    complete: bool = True
    """Whether the parent has answered: without that nothing is known of the others."""
    past: bytes = b""
    """What is left of workers that have ended."""
    restarts: int = 0
    scheduler_restarts: int = 0
    absent: tuple[int, ...] = ()
    """Processes that were not asked: they have ended, or begin."""


class Siblings(Protocol):
    """The others. `answers`: how this process answers their questions, by their names.

    `answers_about`: the same for questions that say what they are about, behind their name and a
    space. `hears`: what it does with what others tell, by topic. `is_behind`: whether so much waits
    to be sent that nothing more is passed on.
    """

    answers: dict[str, Callable[[], bytes]]
    answers_about: dict[str, Callable[[str], bytes]]
    hears: dict[str, Callable[[bytes], None]]
    is_behind: Callable[[], bool]

    def tell(self, topic: str, body: bytes) -> None:
        """Tell all others something: those that listen for this topic. What is told by one process
        comes in order.
        """

    def pass_on(self, worker: int, topic: str, body: bytes) -> bool:
        """Tell one of them something, or with `ALL` all of them, this one included, in the order in
        which all hear it.

        Return whether it was sent. It is dropped if that process has ended, or is far behind.
        """

    async def ask(self, question: str) -> SiblingAnswers:
        """Return what the others answer in time."""
