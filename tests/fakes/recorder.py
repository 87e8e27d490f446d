"""An observer that keeps what it hears."""

from __future__ import annotations

from typing import TypeVar

from pdproxy.observe.events import Event, NodeChanged, Observer

_E = TypeVar("_E")


class Recorder:
    """Keeps events in their order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        """Hear one."""
        self.events.append(event)

    def of_follower(self) -> Observer:
        """What hears events of a worker that chooses no engines: it sees the changes of their
        states once more.
        """
        return _Follower(self)

    def of(self, kind: type[_E]) -> list[_E]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]


class _Follower:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def notify(self, event: Event) -> None:
        if not isinstance(event, NodeChanged):
            self._recorder.notify(event)
