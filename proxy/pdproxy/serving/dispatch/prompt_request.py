"""What each attempt to serve a prompt needs of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.scheduling.prefix.prompts import Beginning
from pdproxy.serving.dispatch.fingerprint import Fingerprint
from pdproxy.serving.dispatch.record import Record
from pdproxy.serving.dispatch.resources import LegHeaders
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.tokens.ids import TokenIds
from pdproxy.wire.continuable import Reason
from pdproxy.wire.request import Parsed, Prompt, Route


def _no_relay() -> Relay:
    raise RuntimeError("the request was dropped")


def _no_writer(_: Relay) -> ResponseWriter:
    raise RuntimeError("the request was dropped")


class PromptRequest(msgspec.Struct, eq=False):
    """One prompt (or, with `prompt` None, a whole request for one engine alone), and where its answer goes.

    `ids` are the prompt's token ids, None while they are not known; `key`: what finds the turn that it continues
    (`dispatch.turn`), None if that is not known or not wanted; `beginning`: what indexes of engines' caches know the prompt by,
    None if nothing asks them; `stream_to` returns the writer for a relay's stream. Once a stream
    flows, nothing of this is needed: `drop` then frees the client's body. So nothing else may keep a reference to its parts.

    `kv_failed`: whether a prompt's KV did not get to a decode engine: only the first such failure of a request counts, since
    the request itself may be the cause.

    `left`: how often other engines may still go on with the stream; `record`: what they need for that, or why they can't;
    None before the stream flows, or if that is off.

    `stalled`: how many engines have stood still under it so far, perhaps because of it.

    `fingerprint`: None while nothing asks for it (`dispatch.engines_lost`).
    """

    parsed: Parsed
    prompt: Prompt | None
    headers: LegHeaders
    new_relay: Callable[[], Relay]
    stream_to: Callable[[Relay], ResponseWriter] = _no_writer
    ids: TokenIds | None = None
    key: bytes | None = None
    beginning: Beginning | None = None
    left: int = 0
    record: Record | Reason | None = None
    stalled: int = 0
    kv_failed: bool = False
    fingerprint: Fingerprint | None = None

    def __repr__(self) -> str:
        return f"<PromptRequest {self.headers.request_id}{' (dropped)' if self.parsed is _DROPPED else ''}>"

    @property
    def is_of_use(self) -> bool:
        """Whether the record is still of use while another engine goes on: what it makes is parsed with that."""
        return isinstance(self.record, Record) and self.record.chat != b""

    def drop(self) -> None:
        """Drop everything but the headers and the record. No further leg may be made from it."""
        self.parsed, self.prompt, self.new_relay, self.stream_to, self.ids = _DROPPED, None, _no_relay, _no_writer, None
        self.key = self.beginning = None


_DROPPED = Parsed(Route.COMPLETIONS, {}, None, True, False, False, (), None, 0)
