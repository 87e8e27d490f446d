"""What is kept of a request while its stream flows, so that another engine can go on with the
stream: no more than that.

Owns the bytes of all these records, which are bounded: a prompt's ids are most of them.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.serving.stream.relay import Relay
from pdproxy.transfer.contract import encode
from pdproxy.wire.continuable import Continuable, NotContinued, plan
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route

_OVERHEAD = 512
"""Bytes of a record beside the ids and the fields."""


class Record:
    """What another engine needs to go on. `prompt_ids`: a JSON array, b"" before they are known.
    `new_relay`: of the request.

    `is_parsed`: as of `Beginning`; `chat`: the client's body, b"" if nobody can parse what its
    parser would.
    """

    __slots__ = ("chat", "is_parsed", "kept", "new_relay", "prompt_ids", "size")

    def __init__(
        self, kept: Continuable, new_relay: Callable[[], Relay], chat: bytes = b""
    ) -> None:
        self.kept = kept
        self.chat = chat
        self.new_relay = new_relay
        self.prompt_ids = b""
        self.is_parsed = False
        self.size = 0
        """Bytes that count."""

    def __repr__(self) -> str:
        return f"<Record of {self.size} bytes>"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.prompt_ids.count(b",") + 1


class ContinuationRecords:
    """The records of one process. `sampled`: also of answers that are drawn by chance; `max_bytes`:
    of all of them.

    `derenders`: whether all engines of a model can parse its chats behind any token.
    """

    def __init__(
        self,
        *,
        sampled: bool,
        max_bytes: int,
        derenders: Callable[[str | None], bool] = lambda _: False,
    ) -> None:
        self._derenders = derenders
        self._sampled = sampled
        self._max_bytes = max_bytes
        self.held = 0
        """Bytes of all records that count."""

    def __repr__(self) -> str:
        return f"<Records {self.held} of {self._max_bytes} bytes>"

    def planned(self, parsed: Parsed, new_relay: Callable[[], Relay]) -> Record | NotContinued:
        """Return a record of a request whose stream is about to flow, or why nobody may go on with
        it. It does not count yet.
        """
        kept = plan(parsed, sampled=self._sampled)
        if isinstance(kept, NotContinued):
            return kept
        is_chat = parsed.route is Route.CHAT and not (
            kept.stops or kept.shows_ids or kept.ignores_eos
        )
        may_parse = is_chat and (parsed.derenders or self._derenders(kept.model))
        if kept.calls_tools and not may_parse:
            return NotContinued.TOOLS
        return Record(kept, new_relay, encode(parsed.fields) if may_parse else b"")

    def keep(self, record: Record, prompt_ids: bytes) -> Record | NotContinued:
        """Complete a record and count it, until `drop`. Return why it is not kept, if it is not."""
        if not prompt_ids:
            return NotContinued.NO_IDS
        if not record.is_parsed and not record.kept.calls_tools:
            record.chat = b""  # no parser makes its events
        size = len(prompt_ids) + len(record.kept.sampling) + len(record.chat) + _OVERHEAD
        if self.held + size > self._max_bytes:
            return NotContinued.MEMORY
        record.prompt_ids, record.size = prompt_ids, size
        self.held += size
        return record

    def drop(self, record: Record) -> None:
        """Count a record no more."""
        self.held -= record.size
        record.size = 0
