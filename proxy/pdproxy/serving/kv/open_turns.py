"""Turns whose answer is under way, until both are known: all token ids, and the handle of the KV.

Owns the turns that decode engines were asked for. The handle comes with the answer (of a stream
since vLLM 0.33.0), and in the notifier's notice, which may be earlier or later than a stream's end.
A turn that is not kept is remembered for a while: its notice may still come, and then names blocks
that have to be released.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from pdproxy.transfer.kept_turn import KeptTurn, TurnRecord
from pdproxy.transfer.turns import DecodeHandle, TurnRules
from pdproxy.wire.notices import Notice, NoticeEvent

WAIT = 30.0
"""Seconds for which a notice is awaited. It comes milliseconds before or after the end of a
stream.
"""
MAX_OVER = 4096
"""Names of turns that are remembered without being kept."""
MAX_NAMESAKES = 8
"""Turns of one name that are remembered."""


class TurnKeeper(Protocol):
    """Where turns go that are not open any more. All methods return at once."""

    def keep(self, turn: KeptTurn) -> None:
        """Keep a turn that has just finished."""

    def dropped(self, record: TurnRecord, handle: DecodeHandle | None, reason: str) -> None:
        """Count a turn that is not kept, and release its KV. `handle`: None if none has come."""

    def freed(self, name: str, reason: str) -> None:
        """Drop a turn whose blocks its engine has freed. `name`: the prefill engine's id of it; if
        unknown, nothing changes.
        """

    def leave_space(self, size: int) -> None:
        """Leave space for open turns: so many bytes."""


class OpenTurn:
    """One turn. Call `answered` once its answer is complete, and `close` in any case."""

    __slots__ = ("_where", "handle", "key", "known", "received", "record")

    def __init__(self, where: OpenTurns, record: TurnRecord) -> None:
        self._where = where
        self.record = record
        self.handle: DecodeHandle | None = None
        self.received = 0.0
        """When the handle came."""
        self.key: bytes | None = None
        """The scope and the ids of prompt and answer, None before the answer is complete."""
        self.known = 0

    def __repr__(self) -> str:
        return f"<OpenTurn {self.record.remote_request_id} of {self.record.decode}>"

    def keeps(self, params: bytes) -> None:
        """Take the handle in the answer. A notice's was perhaps of a request that was sent again:
        its answer may be another.
        """
        self._where.keeps(self, params, of_answer=True)

    def answered(self, ids: array[int], completion_tokens: int | None) -> None:
        """Take the answer's ids. If they are not all of it (`completion_tokens`, by the engine),
        only the prompt's are used.
        """
        prompt = self.record.prompt
        if prompt is not None:
            complete = len(ids) == completion_tokens
            self.key = (
                b"%b%b," % (prompt, b",".join([b"%d" % one for one in ids]))
                if complete and ids
                else prompt
            )
            # The token that was generated last has no KV.
            self.known = self.record.prompt_tokens + (max(len(ids) - 1, 0) if complete else 0)
        self._where.answered(self)

    def close(self) -> None:
        """End a turn whose answer is not complete. Afterwards, and after `answered`, this changes
        nothing.
        """
        self._where.abandoned(self)


class OpenTurns:
    """All such turns of one pool. `by_notice`: whether handles come in notices, too.

    `checked(handle, decode)` returns a handle of the engine with this URL, or why it may not be
    used. `keeper`: where they go.
    """

    def __init__(
        self,
        rules: TurnRules,
        keeper: TurnKeeper,
        now: Callable[[], float],
        *,
        max_bytes: int,
        by_notice: bool,
        host_of: Callable[[str], str | None] = lambda _: None,
        checked: Callable[[DecodeHandle | str, str], DecodeHandle | str] = lambda handle, _: handle,
    ) -> None:
        self._rules = rules
        self._keeper = keeper
        self._dropped = keeper.dropped
        self._now = now
        self._max_bytes = max_bytes
        self._by_notice = by_notice
        self._host_of = host_of
        self._checked = checked
        self._open: dict[str, OpenTurn] = {}
        self._awaited: OrderedDict[str, tuple[float, OpenTurn]] = OrderedDict()
        self._over: OrderedDict[str, tuple[float, tuple[TurnRecord, ...]]] = OrderedDict()
        """By name, the turns whose notice is released: until when, and the turns of that name. The
        soonest ends first.
        """
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return (
            f"<OpenTurns {len(self._open)} open, {len(self._awaited)} without a notice, "
            f"{self._bytes} bytes>"
        )

    @property
    def size(self) -> int:
        """Bytes of ids that are held."""
        return self._bytes

    def open(self, record: TurnRecord, *, in_answer: bool) -> OpenTurn | None:
        """Begin a turn whose decode engine is asked now. None: no handle of it can come.

        `in_answer`: whether the answer has the handle.
        """
        if not in_answer and not self._by_notice:
            return None
        self._sweep()
        if record.prompt is not None and self._bytes + len(record.prompt) > self._max_bytes // 2:
            record = msgspec.structs.replace(record, prompt=None)
        if self._has_namesake(record):
            return None
        turn = self._open[record.remote_request_id] = OpenTurn(self, record)
        self._hold(len(record.prompt or b""))
        return turn

    def noticed(self, notice: Notice) -> None:
        """Take a decode engine's notice about KV that it keeps."""
        name = notice.remote_request_id
        if notice.role != "D" or name is None:
            return
        if notice.event is NoticeEvent.KEPT and notice.params is not None:
            self.receive(name, notice.params)
        elif notice.event is NoticeEvent.EXPIRED:
            self._keeper.freed(name, "expired")
        elif notice.event is NoticeEvent.RELEASED:
            self._keeper.freed(name, "released")

    def receive(self, name: str, params: bytes) -> None:
        """Take the handle in a notice. `name`: the prefill engine's id of the turn. An unknown one
        is another proxy's.
        """
        self._sweep()
        turn = self._open.get(name)
        if turn is not None:
            self.keeps(turn, params)
        elif (record := self._forgotten(name)) is not None:
            self._release(record, params)

    def keeps(self, turn: OpenTurn, params: bytes, *, of_answer: bool = False) -> None:
        """Take the handle of a turn. Only the first one counts, and the answer's: KV that another
        one names is released.
        """
        is_open, first = self._open.get(turn.record.remote_request_id) is turn, turn.handle
        if first is not None and not (of_answer and is_open):
            return
        if not is_open:
            if not self._by_notice:
                self._release(turn.record, params)  # another turn has got its name meanwhile
            return
        handle = self._read(turn.record, params)
        if isinstance(handle, str):
            self._end(turn)
            self._dropped(turn.record, first, "unusable")
            return
        if first is not None and first.request_id != handle.request_id:
            self._dropped(turn.record, first, "abandoned")
        turn.handle, turn.received = handle, self._now()
        if turn.record.remote_request_id in self._awaited:
            self._keep(turn, handle)

    def answered(self, turn: OpenTurn) -> None:
        """The answer is complete: keep the turn if its handle is here, else await the notice."""
        name = turn.record.remote_request_id
        if self._open.get(name) is not turn:
            return
        if turn.handle is not None:
            self._keep(turn, turn.handle)
        elif self._by_notice:
            self._hold(len(turn.key or b"") - len(turn.record.prompt or b""))
            self._awaited[name] = (self._now() + WAIT, turn)
        else:
            self._end(turn)

    def abandoned(self, turn: OpenTurn) -> None:
        """The answer will not be complete."""
        name = turn.record.remote_request_id
        if self._open.get(name) is not turn or name in self._awaited:
            return
        self._end(turn)
        if turn.handle is not None:
            self._dropped(turn.record, turn.handle, "abandoned")
        else:
            self._remember(turn.record)

    def drop_all(self) -> None:
        """Keep none of them any more."""
        for turn in list(self._open.values()):
            self._end(turn)
            if turn.handle is not None:
                self._dropped(turn.record, turn.handle, "shutdown")

    def _has_namesake(self, record: TurnRecord) -> bool:
        """Process a new turn whose name another one has. Return whether nothing may be kept of the
        new one.

        A prefill engine may give prompts the client's own ids. Notices name a turn by that id
        alone: if two are to come, nobody knows which turn the first one is of, and KV of the wrong
        one must not be used. So both are released.
        """
        name = record.remote_request_id
        other = self._open.get(name)
        if other is not None:
            self._end(other)
            if other.handle is not None:
                self._dropped(other.record, other.handle, "abandoned")
            else:
                self._remember(other.record)
        if name not in self._over:
            return False
        self._remember(record)
        return True

    def _release(self, record: TurnRecord, params: bytes) -> None:
        handle = self._read(record, params)
        if isinstance(handle, DecodeHandle):
            self._dropped(record, handle, "abandoned")

    def _read(self, record: TurnRecord, params: bytes) -> DecodeHandle | str:
        """Return the handle as other engines use it, or why there is none."""
        handle, host = (
            self._checked(self._rules.read(params), record.decode),
            self._host_of(record.decode),
        )
        return (
            handle if host is None or isinstance(handle, str) else self._rules.at_host(handle, host)
        )

    def _keep(self, turn: OpenTurn, handle: DecodeHandle) -> None:
        self._end(turn)
        if turn.key is None or handle.groups != 1:
            self._dropped(turn.record, handle, "no_ids" if turn.key is None else "groups")
            return
        record = msgspec.structs.replace(turn.record, prompt=None)
        self._keeper.keep(KeptTurn(record, handle, turn.key, turn.known, turn.received))

    def _end(self, turn: OpenTurn) -> None:
        name = turn.record.remote_request_id
        del self._open[name]
        awaited = self._awaited.pop(name, None) is not None
        self._hold(-len((turn.key if awaited else turn.record.prompt) or b""))

    def _remember(self, record: TurnRecord) -> None:
        if not self._by_notice:
            return
        name, record = record.remote_request_id, msgspec.structs.replace(record, prompt=None)
        _, records = self._over.pop(name, (0.0, ()))
        self._over[name] = (self._now() + WAIT, (*records[-MAX_NAMESAKES + 1 :], record))
        if len(self._over) > MAX_OVER:
            self._over.popitem(last=False)

    def _forgotten(self, name: str) -> TurnRecord | None:
        """Return the oldest turn of this name that is not kept, and forget it."""
        if (found := self._over.get(name)) is None:
            return None
        until, (record, *others) = found
        if others:
            self._over[name] = (until, tuple(others))
        else:
            del self._over[name]
        return record

    def _hold(self, more: int) -> None:
        self._bytes += more
        if more:
            self._keeper.leave_space(self._bytes)

    def _sweep(self) -> None:
        now = self._now()
        while self._awaited and (first := next(iter(self._awaited.values())))[0] <= now:
            turn = first[1]
            self._end(turn)
            self._remember(turn.record)
            self._dropped(turn.record, None, "no_notice")
        while self._over and next(iter(self._over.values()))[0] <= now:
            self._over.popitem(last=False)
