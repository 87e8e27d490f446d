"""Room for what engines have sent and nobody may have yet: whole answers, events that are not whole, streams not yet proven.

Owns the number of those bytes, over all legs. A leg ends in a dozen ways, so its share is given back with the last reference to
it: what is counted is what is held.
"""

from __future__ import annotations

from pdproxy.kit.errors import EngineError, NoAnswerRoomError

MOST_ANSWER = 128 << 20
"""Bytes of one answer, where nobody sets another bound."""
MOST_TOGETHER = 256 << 20
"""Bytes of all answers that are held at once, where nobody sets another bound."""
WHOLE = "the engine sent an answer"
"""How an error names a whole answer that is too large."""

Headers = list[tuple[bytes, bytes]]


class AnswerBudget:
    """At most `most` bytes of one answer, and `together` bytes at once; `held` are."""

    __slots__ = ("held", "most", "together")

    def __init__(self, most: int = MOST_ANSWER, together: int = MOST_TOGETHER) -> None:
        self.most = most
        self.together = together
        self.held = 0

    def __repr__(self) -> str:
        return f"<AnswerBudget {self.held} of {self.together} bytes>"

    def share(self, most: int | None = None, what: str = WHOLE) -> BudgetShare:
        """Return an empty share for one leg, of `most` bytes or of one answer. `what`: how an error begins if that is passed."""
        return BudgetShare(self, self.most if most is None or most > self.most else most, what)


class BudgetShare:
    """What one leg holds: `size` bytes, of which those that were added are kept here, in one buffer.

    One buffer, since a list of tiny parts would cost many times their bytes.
    """

    __slots__ = ("_buffer", "_most", "_room", "_what", "kept", "size")

    def __init__(self, room: AnswerBudget, most: int, what: str) -> None:
        self._room = room
        self._most = most
        self._what = what
        self._buffer: bytes | bytearray = b""
        self.kept = 0
        """Bytes in the buffer."""
        self.size = 0

    def __del__(self) -> None:
        self._room.held -= self.size

    def __repr__(self) -> str:
        return f"<BudgetShare of {self.size} of {self._most} bytes>"

    def limit(self, most: int, what: str) -> None:
        """Have another bound, and other words for what passes it, before anything is held."""
        self._most, self._what = min(most, self._most), what

    def expect(self, headers: Headers) -> None:
        """Look at an answer's headers; raise EngineError if it says that it is too large."""
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._most:
                raise self._too_large()

    def grow(self, count: int, what: str | None = None) -> None:
        """Hold so many bytes more, somewhere else. `what`: how the error begins, if not as said. Nothing is held after an error.

        Raises:
            EngineError: they are more than one answer may have.
            NoAnswerRoomError: other answers take all of the room.
        """
        size = self.size + count
        room = self._room
        if size > self._most:
            self.drop()
            raise self._too_large(what)
        if room.held + count > room.together:
            self.drop()
            raise NoAnswerRoomError(
                f"answers of {room.together} bytes are held (limits.max_buffered_answer_bytes): no room for more"
            )
        room.held += count
        self.size = size

    def hold(self, count: int) -> None:
        """Hold so many bytes in all, somewhere else. Raises as `grow`."""
        if count > self.size:
            self.grow(count - self.size)
        else:
            self.shrink(self.size - count)

    def drop(self) -> None:
        """Hold nothing more: the leg has failed, and what refers to the share may live on."""
        self.shrink(self.size)
        self._buffer, self.kept = b"", 0

    def shrink(self, count: int) -> None:
        """Hold so many bytes less."""
        self.size -= count
        self._room.held -= count

    def add(self, chunk: bytes) -> None:
        """Keep bytes behind those that are kept. Raises as `grow`."""
        count = len(chunk)
        room, size = self._room, self.size + count
        if size > self._most or room.held + count > room.together:
            self.grow(count)  # which raises
        room.held += count
        self.size = size
        if not self.kept:
            self._buffer = chunk  # most answers come in one read: no copy is made of those
        else:
            if not isinstance(self._buffer, bytearray):
                self._buffer = bytearray(self._buffer)
            self._buffer += chunk
        self.kept += count

    def ends_with(self, end: bytes) -> bool:
        """Tell how the bytes end that are kept."""
        return self._buffer.endswith(end)

    def whole(self) -> bytes:
        """Return the bytes that were kept, and keep them no longer: they count on, for whoever has them now."""
        whole, self._buffer, self.kept = self._buffer, b"", 0
        return whole if isinstance(whole, bytes) else bytes(whole)

    def taken(self) -> bytes:
        """Return the bytes that were kept, and count them no longer."""
        kept, buffer = self.kept, self._buffer
        self._buffer, self.kept = b"", 0
        self.size -= kept
        self._room.held -= kept
        return buffer if isinstance(buffer, bytes) else bytes(buffer)

    def _too_large(self, what: str | None = None) -> EngineError:
        setting = " (limits.max_answer_bytes)" if self._most == self._room.most else ""
        return EngineError(f"{what or self._what} of more than {self._most} bytes{setting}")
