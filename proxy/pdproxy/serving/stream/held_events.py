"""The beginning of a stream, held back until one of its events is real data: until then its engine
may fail unseen.
"""

from __future__ import annotations

import msgspec

from pdproxy.upstream.answer_budget import BudgetShare
from pdproxy.wire import tokens


class HeldEvents(msgspec.Struct, eq=False):
    """Whole events of one stream, which are counted in its share of the answer budget.

    `takes_ids`: the prompt's ids, thousands in one event, are cut out before anything searches the
    events, and are in `prompt_ids` then: a JSON array, b"" if there are none.
    """

    _share: BudgetShare
    _takes_ids: bool = False
    _events: list[bytes] = []
    prompt_ids: bytes = b""

    def __repr__(self) -> str:
        return f"<HeldEvents {len(self._events)} reads>"

    def add(self, batch: bytes) -> bytes:
        """Keep events. Return them as they are kept.

        Raises:
            AnswerTooLargeError: they are too many.
        """
        self._share.grow(len(batch), "the engine sent a stream without data")
        if self._takes_ids and not self.prompt_ids:
            size = len(batch)
            batch, self.prompt_ids = tokens.split_prompt(batch)
            self._share.shrink(size - len(batch) - len(self.prompt_ids))
        self._events.append(batch)
        return batch

    def take(self) -> tuple[bytes, bytes]:
        """Return all that was kept, and the prompt's ids, and keep them no more."""
        batch, prompt_ids = b"".join(self._events), self.prompt_ids
        if batch:
            self.drop()
            self._share.shrink(len(batch) + len(prompt_ids))
        return batch, prompt_ids

    def drop(self) -> None:
        """Keep nothing any more. The owner of the share gives that back."""
        self._events, self.prompt_ids = [], b""
