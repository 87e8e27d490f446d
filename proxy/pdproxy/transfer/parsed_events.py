"""Makes a chat's stream, as an engine's parsers make it, of a completion that goes on behind some
of its answer. Pure.

The completion's text is not used: an engine derenders its token ids, call by call, and parses all
ids of the answer anew in each. What came meanwhile is put into one call. Source of the shapes and
of what derender does otherwise than a chat's own route: vLLM 0.32.0 `entrypoints/scale_out`,
`renderers/online_derenderer.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from pdproxy.transfer.chat_chunks import (
    NULL,
    NotACompletionError,
    body_decoder,
    choices_decoder,
    moved_usage,
)
from pdproxy.transfer.continued_events import ContinuedEvents
from pdproxy.transfer.contract import raw
from pdproxy.wire import sse
from pdproxy.wire.continuable import Continuable, NotContinued
from pdproxy.wire.engine import UNREADABLE
from pdproxy.wire.fields import Fields
from pdproxy.wire.tool_calls import MAX_CALLS, MAX_ID

RENDER, DERENDER = "/v1/chat/completions/render", "/v1/chat/completions/derender"
MAX_SHOWN = 65_536
"""Bytes of what a call returns, but for the ids that it returns as well."""
_PER_ID = 24
"""Bytes of an id and of its length in the state that a call returns."""
_NOT_READ = frozenset(
    (
        *(
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "max_tokens",
            "min_tokens",
        ),
        *(
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
            "logit_bias",
        ),
        *("detokenize", "skip_reading_prefix_cache", "output_kind", "n"),
        *("skip_clone", "stream_interval", "output_text_buffer_length"),  # vLLM's own
    )
)
"""Parameters that a completion has as well, or that mean the same behind some of the answer."""
_NEUTRAL = {
    "presence_penalty": (b"0", b"0.0"),
    "frequency_penalty": (b"0", b"0.0"),
    "repetition_penalty": (b"1", b"1.0"),
    "bad_words": (b"[]",),
}
_REASONS = {
    "structured_outputs": NotContinued.GRAMMAR,
    "presence_penalty": NotContinued.PENALTY,
    "frequency_penalty": NotContinued.PENALTY,
    "repetition_penalty": NotContinued.PENALTY,
    "bad_words": NotContinued.BAD_WORDS,
    "seed": NotContinued.SEED,
    "thinking_token_budget": NotContinued.THINKING_BUDGET,
    "repetition_detection": NotContinued.REPETITION_DETECTION,
}
_ids_decoder = msgspec.json.Decoder(list[int] | None)
_finish_decoder = msgspec.json.Decoder(str | None)


class TooManyTokensError(Exception):
    """An answer has become longer than engines are asked to parse."""


class _Rendered(msgspec.Struct):
    sampling_params: Fields


class _Function(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, omit_defaults=True):
    id: str | None = None
    type: str | None = None
    index: int = -1
    function: _Function | None = None


class _Delta(msgspec.Struct, omit_defaults=True):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


class _Derendered(msgspec.Struct):
    chunk: _Chunk


_rendered_decoder = msgspec.json.Decoder(_Rendered)
_derendered_decoder = msgspec.json.Decoder(_Derendered)


def why_not(rendered: bytes) -> NotContinued | None:
    """Return why nobody can go on with a chat, from what an engine rendered of it; None if an
    engine can.

    It shows what the client did not ask for: a grammar of its tools, and defaults of the model's
    generation config.
    """
    try:
        params = _rendered_decoder.decode(rendered).sampling_params
    except UNREADABLE:
        return NotContinued.DERENDER
    for name, value in params.items():
        text = bytes(value)
        if name not in _NOT_READ and text != b"null" and text not in _NEUTRAL.get(name, ()):
            return _REASONS.get(name, NotContinued.UNKNOWN_FIELD)
    return None


class ParsedEvents:
    """The events of one stream.

    `plain`: rewrites its usage; `shown`: what all its events show; `kept`, `chat`: the client's
    request, as of its record; `prompt_ids`: a JSON array; `ids`: of the answer so far, `lens`: how
    many of them came in each event; `calls`: ids of the tool calls so far; `most`: tokens of prompt
    and answer together at the most.
    """

    def __init__(
        self,
        plain: ContinuedEvents,
        shown: Fields,
        kept: Continuable,
        chat: bytes,
        prompt_ids: bytes,
        ids: array[int],
        lens: Sequence[int],
        calls: Sequence[str],
        most: int,
    ) -> None:
        self._plain = plain
        self._shown = shown
        self._done = len(ids)
        self._keeps_stop = kept.shows_stop
        head = b"" if kept.model is None else b'"model":%b,' % msgspec.json.encode(kept.model)
        self._head = b'{"stream":true,%b"prompt_token_ids":%b,"chat_request":%b,' % (
            head,
            prompt_ids,
            chat,
        )
        self._ids = bytearray(_listed(ids))
        self._lens = bytearray(_listed(lens))
        self._calls = list(calls)
        self._count = len(ids) + prompt_ids.count(b",") + 1
        self._made = len(ids)
        self._most = most
        self._new: list[int] = []  # of the next call
        self._asked: list[int] = []  # of the present call
        self._ended = False
        self._end: Fields | None = None  # the choice with the finish reason, before it is of a call
        self._asked_end: Fields | None = None  # that of the present call
        # usage and fingerprint of the last event, before they are of a call
        self._about: Fields = {}
        self._asked_about: Fields = {}
        self._behind = b""  # events behind the choice

    def __repr__(self) -> str:
        return f"<ParsedEvents behind {self._made} ids, {len(self._new)} are new>"

    @property
    def max_answer(self) -> int:
        """Bytes that a call may return."""
        return MAX_SHOWN + _PER_ID * (self._made + len(self._asked))

    def take(self, batch: bytes) -> None:
        """Take whole events of the completion.

        Raises:
            NotACompletionError: one of them is no event of a completion with ids.
            TooManyTokensError: prompt and answer have become too long.
        """
        for bare in batch.split(sse.END):
            lines = sse.data_lines(bare + sse.END) if bare else ()
            if not lines:
                continue  # a comment
            if sse.is_done(lines[0]):
                self._behind += bare + sse.END
                continue
            try:
                event = body_decoder.decode(sse.payload(bare))
                choices = choices_decoder.decode(event["choices"])
                if not choices:
                    self._behind += self._plain.event(bare + sse.END)
                    if len(self._behind) > MAX_SHOWN:
                        raise NotACompletionError("too many events without a choice")
                    continue
                self._take(event, choices[0])
            except (*UNREADABLE, KeyError) as error:
                raise NotACompletionError(str(error)) from None

    def _take(self, event: Fields, choice: Fields) -> None:
        if self._ended:
            raise NotACompletionError("an event behind the end of its choice")
        ids = _ids_decoder.decode(choice.get("token_ids", NULL)) or []
        finish = _finish_decoder.decode(choice.get("finish_reason", NULL))
        if finish is not None:
            self._ended, self._end = True, choice
            ended_by_id = bytes(choice.get("stop_reason", NULL))[:1] != b'"'
            if finish == "stop" and ended_by_id and not self._keeps_stop:
                ids = ids[:-1]  # its text is no part of the answer
        self._new += ids
        self._count += len(ids)
        if self._count > self._most:
            raise TooManyTokensError(
                f"more than {self._most} tokens (continuations.max_parsed_tokens)"
            )
        self._about = {name: event[name] for name in ("system_fingerprint",) if name in event}
        if bytes(event.get("usage", NULL)) != b"null":
            self._about["usage"] = moved_usage(event["usage"], self._done, of_chat_event=True)

    def call(self) -> bytes | None:
        """Return the body of the next call, None if there is nothing to ask for. The answer goes to
        `answered`.
        """
        if not self._new and self._end is None:
            return None
        self._asked, self._new = self._new, []
        self._asked_end, self._end = self._end, None
        self._asked_about, self._about = self._about, {}
        finish = NULL if self._asked_end is None else self._asked_end["finish_reason"]
        choice = {"index": 0, "token_ids": self._asked, "finish_reason": finish}
        state = {"tools_streamed": bool(self._calls), "last_tool_call_ids": self._calls}
        return b'%b"generate_chunk":{"choices":%b},"stream_state":{"role_sent":true,%b,%b,%b' % (
            self._head,
            msgspec.json.encode([choice]),
            b'"output_token_ids":[%b]' % bytes(self._ids),
            b'"output_chunk_lens":[%b]' % bytes(self._lens),
            msgspec.json.encode(state)[1:] + b"}",
        )

    def answered(self, answer: bytes) -> bytes:
        """Return the client's events for the answer to the present call; with the last of them all
        that is behind them.

        Raises:
            NotACompletionError: the engine answered something else.
        """
        try:
            choices = _derendered_decoder.decode(answer).chunk.choices
        except UNREADABLE as error:
            raise NotACompletionError(str(error)) from None
        if len(choices) != 1:
            raise NotACompletionError("not one choice")
        if self._asked:
            comma = b"," if self._ids else b""
            self._ids += comma + _listed(self._asked)
            self._lens += comma + b"%d" % len(self._asked)
            self._made += len(self._asked)
            self._asked = []
        delta = choices[0].delta
        delta.tool_calls = self._known(delta.tool_calls) or None
        end, self._asked_end = self._asked_end, None
        if delta.content or delta.reasoning or delta.tool_calls or end is not None:
            return sse.data(self._event(delta, end))
        return b""

    def rest(self) -> bytes:
        """Return what is behind the choice, as far as it has come: its usage and the end mark. For
        when `call` returns None.
        """
        found, self._behind = self._behind, b""
        return found

    def _known(self, calls: Sequence[_Call] | None) -> list[_Call]:
        """Return calls with the ids that the client knows them by, and keep the ids of new ones."""
        found = list(calls or ())
        for call in found:
            if not 0 <= call.index < MAX_CALLS or len(call.id or "") > MAX_ID:
                raise NotACompletionError("a tool call with another index or id")
            if call.id is not None and call.index >= len(self._calls):
                self._calls.append(call.id)
            elif call.id is not None:
                call.id = self._calls[call.index]
        return found

    def _event(self, delta: _Delta, end: Fields | None) -> bytes:
        choice: Fields = {
            "index": raw(b"0"),
            "delta": raw(msgspec.json.encode(delta)),
            "logprobs": NULL,
            "finish_reason": NULL,
        }
        about = self._asked_about
        if end is not None:
            finish = end["finish_reason"]
            called = self._calls and bytes(finish) == b'"stop"'
            choice["finish_reason"] = raw(b'"tool_calls"') if called else finish
            choice["stop_reason"] = end.get("stop_reason", NULL)
        choice["token_ids"] = NULL
        event = self._shown | {"choices": raw(msgspec.json.encode([choice]))}
        if "usage" in about:
            event["usage"] = about["usage"]
        if end is not None and "system_fingerprint" in about:
            event["system_fingerprint"] = about["system_fingerprint"]
        return msgspec.json.encode(event)


def _listed(numbers: Sequence[int] | array[int]) -> bytes:
    return b",".join([b"%d" % one for one in numbers])
