"""The memory for engines' data that can't be forwarded yet: whole answers, events that are not
whole, streams not yet proven.

Owns the number of those bytes, over all legs. A leg ends in many ways, so its share is released
with the last reference to it: then the count is always right.
"""

from __future__ import annotations

from typing import ClassVar

from pdproxy.kit.errors import AnswerBudgetError, AnswerTooLargeError, EngineError
from pdproxy.kit.pieces import Pieces, added, joined

MAX_ANSWER = 128 << 20
"""The default limit of bytes for one answer."""
MAX_TOTAL = 256 << 20
"""The default limit of bytes for all answers that are held at once."""
WHOLE = "the engine sent an answer"
"""How an error names a whole answer that is too large."""

Headers = list[tuple[bytes, bytes]]


class AnswerBudget:
    """At most `max_answer` bytes of one answer, and `max_total` bytes at once. `held`: bytes that
    are held now.
    """

    __slots__ = ("held", "max_answer", "max_total")

    def __init__(self, max_answer: int = MAX_ANSWER, max_total: int = MAX_TOTAL) -> None:
        self.max_answer = max_answer
        self.max_total = max_total
        self.held = 0

    def __repr__(self) -> str:
        return f"<AnswerBudget {self.held} of {self.max_total} bytes>"

    def share(self, limit: int | None = None, what: str = WHOLE) -> BudgetShare:
        """Return an empty share for one leg, of at most `limit` bytes (None: one answer). `what`:
        the beginning of its error.

        A caller that names a limit knows what its request may be answered: an engine that sends
        more has failed.
        """
        if limit is None or limit >= self.max_answer:
            return BudgetShare(self, self.max_answer, what)
        return _NamedShare(self, limit, what)


class BudgetShare:
    """What one leg holds: `size` bytes. Those that were added are kept here."""

    __slots__ = ("_budget", "_held", "_limit", "_what", "kept", "size")
    _error: ClassVar[type[EngineError]] = AnswerTooLargeError
    """What is raised over the limit."""

    def __init__(self, budget: AnswerBudget, limit: int, what: str) -> None:
        self._budget = budget
        self._limit = limit
        self._what = what
        self._held: Pieces = b""
        self.kept = 0
        """Bytes that are kept here."""
        self.size = 0

    def __del__(self) -> None:
        self._budget.held -= self.size

    def __repr__(self) -> str:
        return f"<BudgetShare of {self.size} of {self._limit} bytes>"

    def set_limit(self, limit: int, what: str) -> None:
        """Set another limit, and another beginning of its error, before anything is held."""
        self._limit, self._what = min(limit, self._limit), what

    def check_length(self, headers: Headers) -> None:
        """Raise, as `grow`, if an answer's headers announce more than the limit."""
        length = dict(headers).get(b"content-length")  # the parser refuses a second one
        if length is not None and length.isdigit() and int(length) > self._limit:
            raise self._too_large()

    def grow(self, count: int, what: str | None = None) -> None:
        """Hold `count` bytes more, which are kept elsewhere. After an error nothing is held.

        `what`: the beginning of the error about the limit, None for that of the share.

        Raises:
            AnswerTooLargeError: the share is over its limit; another EngineError if the caller has
                named that.
            AnswerBudgetError: the budget is used up by other answers.
        """
        size = self.size + count
        budget = self._budget
        if size > self._limit:
            self.drop()
            raise self._too_large(what)
        if budget.held + count > budget.max_total:
            self.drop()
            error = AnswerBudgetError(
                f"answers of {budget.max_total} bytes are held "
                f"(limits.max_buffered_answer_bytes): no space for more"
            )
            error.held = size
            raise error
        budget.held += count
        self.size = size

    def hold(self, count: int) -> None:
        """Hold `count` bytes in all, which are kept elsewhere. Raises as `grow`."""
        if count > self.size:
            self.grow(count - self.size)
        else:
            self.shrink(self.size - count)

    def drop(self) -> None:
        """Hold nothing any more: the leg has failed, and others may still refer to the share."""
        self.shrink(self.size)
        self._held, self.kept = b"", 0

    def shrink(self, count: int) -> None:
        """Hold `count` bytes less."""
        self.size -= count
        self._budget.held -= count

    def add(self, chunk: bytes) -> None:
        """Keep bytes behind those that are kept. Raises as `grow`."""
        count = len(chunk)
        budget, size = self._budget, self.size + count
        if size > self._limit or budget.held + count > budget.max_total:
            self.grow(count)  # which raises
        budget.held += count
        self.size = size
        if not self.kept:
            self._held = chunk  # most answers come in one read: those are not copied
        elif isinstance(self._held, bytearray):
            self._held += chunk
        else:
            self._held = added(self._held, chunk)
        self.kept += count

    def ends_with(self, byte: bytes) -> bool:
        """Return whether this is the last byte that is kept."""
        last = self._held[-1] if isinstance(self._held, list) else self._held
        return last.endswith(byte)

    def take_counted(self) -> bytes:
        """Return the bytes that are kept, and keep them no more. They still count, although the
        caller has them now.
        """
        held, self._held, self.kept = self._held, b"", 0
        return joined(held)

    def take(self, behind: bytes = b"") -> bytes:
        """Return the bytes that are kept, and those `behind` them, and keep them no more. They no
        longer count.
        """
        kept, held = self.kept, self._held
        self._held, self.kept = b"", 0
        self.size -= kept
        self._budget.held -= kept
        if behind:
            held = added(held, behind) if kept else behind
        return joined(held)

    def _too_large(self, what: str | None = None) -> EngineError:
        setting = " (limits.max_answer_bytes)" if self._limit == self._budget.max_answer else ""
        return self._error(f"{what or self._what} of more than {self._limit} bytes{setting}")


class _NamedShare(BudgetShare):
    """A share whose limit its caller has named."""

    __slots__ = ()
    _error = EngineError
