"""The beginning of a stream, held back until one of its events is real data: until then its engine
may fail unseen.
"""

from __future__ import annotations

import msgspec

from pdproxy.upstream.answer_budget import BudgetShare


class HeldEvents(msgspec.Struct, eq=False):
    """Whole events of one stream, which are counted in its share of the answer budget."""

    _share: BudgetShare
    _events: list[bytes] = []

    def __repr__(self) -> str:
        return f"<HeldEvents {len(self._events)} reads>"

    def add(self, batch: bytes) -> None:
        """Keep events.

        Raises:
            AnswerTooLargeError: they are too many.
        """
        self._share.grow(len(batch), "the engine sent a stream without data")
        self._events.append(batch)

    def take(self) -> bytes:
        """Return all that was kept, and keep it no more."""
        batch = b"".join(self._events)
        if batch:
            self._events = []
            self._share.shrink(len(batch))
        return batch

    def drop(self) -> None:
        """Keep nothing any more. The owner of the share gives that back."""
        self._events = []
