"""An observer that keeps what it hears."""

from __future__ import annotations

from typing import TypeVar

from pdproxy.observe.events import Event

_E = TypeVar("_E")


class Recorder:
    """Keeps events in their order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        """Hear one."""
        self.events.append(event)

    def of(self, kind: type[_E]) -> list[_E]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]
