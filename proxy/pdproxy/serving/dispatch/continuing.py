"""From the failure of a stream's engine to the request by which another one goes on, or to the
stream's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs

from pdproxy.kit.errors import (
    EngineError,
    EngineRefusedError,
    EnginesLostError,
    EngineTimeoutError,
    EngineUnreachableError,
    OverloadedError,
    PdproxyError,
    Wait,
)
from pdproxy.serving.dispatch.cut import Cut, find_cut
from pdproxy.serving.dispatch.in_turn import AskedFor
from pdproxy.serving.dispatch.parsed_stream import ParsedStream
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.record import Record
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.stream.continued_writer import ContinuedWriter
from pdproxy.serving.stream.failures import GivenUpError
from pdproxy.serving.stream.fast_path import FastPath
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.transfer.chat_chunks import NotACompletionError
from pdproxy.transfer.continuation import continued
from pdproxy.transfer.continued_events import ContinuedEvents, LastEvent
from pdproxy.transfer.parsed_events import DERENDER, RENDER, ParsedEvents, why_not
from pdproxy.wire import sse
from pdproxy.wire.continuable import Continuable, NotContinued
from pdproxy.wire.engine import Usage
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

MAX_IDS = 65_536
"""Ids of an answer that another engine is given. More are not: writing them would hold up the event
loop.
"""

_OF_IDS = b"0123456789, "
_MAX_RENDERED = 1 << 20
"""Bytes of what an engine renders of a chat, without the prompt's ids."""

Asked = tuple[Parsed, Prompt, LegHeaders, Callable[[], Relay]]
"""What an engine is asked: the request, its prompt, the headers of its legs, and what makes the
relays of its answers.
"""
MakeParsed = Callable[[ResponseWriter, ContinuedEvents], ParsedStream]


class Continuation:
    """How another engine goes on with a stream: by `asked`, another request. `done`: tokens of the
    answer before that.

    `asked_for`: of the questions that the stream needs. `parsed`: makes the writer of a stream
    whose events a parser makes.
    """

    __slots__ = ("_asked", "_asked_for", "_events", "_held", "_stream", "_writer", "done", "parsed")

    def __init__(
        self,
        asked: Asked,
        writer: ResponseWriter,
        last: LastEvent,
        cut: Cut,
        cached: int | None,
        asked_for: AskedFor,
        parsed: MakeParsed | None = None,
    ) -> None:
        self._asked: Asked | None = asked
        self._asked_for = asked_for
        self.done = cut.done
        self.parsed = parsed
        self._stream: ParsedStream | None = None
        self._writer = writer
        self._held = sse.data(last.with_text(cut.held)) if cut.held else b""
        self._events = ContinuedEvents(
            last.shown, is_chat=last.is_chat, done=cut.done, cached=cached
        )

    def __repr__(self) -> str:
        return f"<Continuation behind {self.done} tokens>"

    def take_request(self) -> Asked:
        """Return what the engine is asked, once: only the exchange keeps it then."""
        asked, self._asked = self._asked, None
        assert asked is not None
        return asked

    def writer(self, engine: str | None) -> ResponseWriter:
        """Return where the stream of an engine, its URL, goes. The client first gets the text that
        was held back from it.
        """
        self._asked_for.engine = engine
        if self._held:
            self._writer.write(self._held)
        if self.parsed is not None:
            self._stream = self.parsed(self._writer, self._events)
            return self._stream
        return ContinuedWriter(self._writer, self._events)

    async def end(self) -> None:
        """Wait until all that the engine has sent is the client's. Raises as `ParsedStream.end`."""
        if self._stream is not None:
            await self._stream.end()

    def close(self) -> None:
        """Drop what nobody waits for any more."""
        if self._stream is not None:
            self._stream.close()

    def rewritten(self, event: bytes) -> bytes:
        """Return an event of the engine as the client gets it."""
        return self._events.event(event)


async def continuation(
    resources: ExchangeResources, request: PromptRequest, relay: Relay, failed: str, *, silent: bool
) -> Continuation | NotContinued:
    """Return how another engine goes on with the stream of `relay`, or why none can.

    `failed`: the URL of its engine; `silent`: it may not answer any more, and is not asked even if
    it is the only one.
    """
    record, writer, fast_path = request.record, relay.output, relay.fast_path
    if isinstance(writer, ParsedStream) and writer.is_broken:
        return NotContinued.DERENDER
    if not isinstance(record, Record):
        return record or NotContinued.NONE_LEFT
    # A broken connection is not an engine's end. But another prefill for one that is gone would be
    # for nothing.
    if not _others(resources, record.kept.model, failed) and (
        silent or not await resources.is_alive(failed)
    ):
        return NotContinued.NO_ENGINE
    if record.prompt_ids.translate(None, _OF_IDS) != b"[]" or record.prompt_ids == b"[]":
        return NotContinued.NO_IDS  # an engine may send anything
    ids = fast_path.ids
    if fast_path.tokens > min(len(ids), MAX_IDS):
        return NotContinued.TOO_LONG
    try:
        last = LastEvent(fast_path.sent)
    except NotACompletionError:
        return NotContinued.NO_IDS
    if writer is None:
        return NotContinued.REASONING_SEEN
    if isinstance(writer, ContinuedWriter) and writer.is_broken:
        return NotContinued.NO_IDS  # those of what was not written are counted
    kept = record.kept
    own = next((value for _, value in request.headers.authorization), None)
    asked_for = AskedFor(resources.lost, request.headers, request.fingerprint)

    async def text(some: Sequence[int]) -> str | None:
        detokenizing = resources.detokenizing
        if detokenizing is None:
            return None
        return await detokenizing.text(kept.model, some, own, without=failed, asked_for=asked_for)

    cut: Cut | NotContinued = (
        NotContinued.TOOLS if kept.calls_tools else NotContinued.REASONING_SEEN
    )
    if not last.is_chat or (not kept.calls_tools and _is_content(last, is_parsed=record.is_parsed)):
        cut = await find_cut(ids, last, kept, text, is_parsed=record.is_parsed)
    if kept.shows_ids and isinstance(cut, Cut) and cut.done < len(ids):
        return NotContinued.HALF_LETTER  # the client has these ids
    makes: MakeParsed | None = None
    if isinstance(cut, NotContinued):
        if not record.chat or not last.is_chat:
            return cut
        found = await _parsed(resources, record, fast_path, last, own, failed, asked_for)
        if isinstance(found, NotContinued):
            return found
        makes = found
        cut, kept = Cut(len(ids)), structs.replace(kept, shows_ids=True)
    limit = _limit(resources, kept, record.prompt_tokens, cut.done)
    if isinstance(limit, NotContinued):
        return limit
    parsed, prompt = continued(kept, record.prompt_ids, ids[: cut.done], limit=limit)
    headers = structs.replace(request.headers, path=Route.COMPLETIONS.path)
    new_relay = record.new_relay if makes is None else partial(_showing_ids, record.new_relay)
    asked, cached = (parsed, prompt, headers, new_relay), relay.filter.cached_tokens
    return Continuation(asked, writer, last, cut, cached, asked_for, makes)


async def _parsed(
    resources: ExchangeResources,
    record: Record,
    stream: FastPath,
    last: LastEvent,
    own: bytes | None,
    failed: str,
    asked_for: AskedFor,
) -> MakeParsed | NotContinued:
    """Return what makes the client's end of a stream whose events a parser makes, or why nobody can
    go on with it.

    `own`: the client's `Authorization`; `failed`: the URL of the engine that failed.
    """
    derendering, kept, calls = resources.derendering, record.kept, stream.calls
    if derendering is None or calls is None:
        return NotContinued.DERENDER
    if record.prompt_tokens + len(stream.ids) > derendering.most:
        return NotContinued.TOO_LONG
    if (lens := _lens(len(stream.ids), stream.several)) is None:
        return NotContinued.NO_IDS
    ask = partial(derendering.answer, authorization=own, without=failed, asked_for=asked_for)
    rendered = await ask(
        RENDER, kept.model, record.chat, max_bytes=_MAX_RENDERED + len(record.prompt_ids)
    )
    why = NotContinued.DERENDER if rendered is None else why_not(rendered)
    if why is not None:
        return why

    async def derender(body: bytes, max_bytes: int) -> bytes | None:
        return await ask(DERENDER, kept.model, body, max_bytes=max_bytes)

    about = (
        last.shown,
        kept,
        record.chat,
        record.prompt_ids,
        stream.ids,
        lens,
        calls,
        derendering.most,
    )
    return lambda output, plain: ParsedStream(output, ParsedEvents(plain, *about), derender)


def _lens(count: int, several: Sequence[int]) -> list[int] | None:
    """Return how many of `count` ids came in each event, None if that is not known. `several`: as
    of `FastPath`.
    """
    found: list[int] = []
    at = 0
    for start, length in zip(several[::2], several[1::2], strict=True):
        if not at <= start <= count - length:
            return None
        found += [1] * (start - at) + [length]
        at = start + length
    return found + [1] * (count - at)


def _showing_ids(new_relay: Callable[[], Relay]) -> Relay:
    """Return a relay that leaves the ids in the events, for a parser."""
    relay = new_relay()
    relay.fast_path.show_ids()
    return relay


def _others(resources: ExchangeResources, model: str | None, failed: str) -> bool:
    """Return whether another engine that makes answers seems to work."""
    now = resources.now()
    return any(
        engine.url != failed
        and engine.usable(now)
        and not engine.for_others
        and (model is None or engine.serves(model))
        for engine in resources.states.engines
    )


def _is_content(last: LastEvent, *, is_parsed: bool) -> bool:
    """Return whether a chat's answer is at its content, so that all that follows is content, too.

    `is_parsed`: only its last event can show that. Else an event without any text is one of content
    that is held back.
    """
    if is_parsed:
        return last.kind == "content" and last.text != ""
    return last.kind == "content" or (last.kind is None and last.ids > 0)


def _limit(
    resources: ExchangeResources, kept: Continuable, prompt: int, done: int
) -> int | NotContinued:
    """Return how many tokens the answer may have in all: of a chat without a limit, as many as fit
    into the engines' contexts.
    """
    lengths = [
        engine.evidence.max_model_len
        for engine in resources.states.engines
        if engine.evidence is not None and (kept.model is None or engine.serves(kept.model))
    ]
    longest = min((length for length in lengths if length is not None), default=None)
    if longest is not None and prompt + done >= longest:
        return NotContinued.TOO_LONG
    limit = kept.limit
    if limit is None:
        if longest is None:
            return NotContinued.NO_LIMIT
        limit = longest - prompt
    return limit if limit > done else NotContinued.NO_LIMIT


def finish(relay: Relay, record: Record | None) -> bool:
    """End a stream of which only its end is missing: its choice has ended. Return whether that was
    possible.

    The client gets the event with which the choice ended, if that was held back; its usage, if it
    wants that; and the mark. `record`: None if there is none. Then the engine's own usage must have
    come, which is behind the ends of all choices.
    """
    events, output, fast_path = relay.filter, relay.output, relay.fast_path
    if output is None or not events.finished:
        return False
    if isinstance(output, ContinuedWriter | ParsedStream) and output.is_broken:
        return False  # what was not written may be the choice's end
    if events.usage is None and record is None:
        return False
    held, events.last_events = b"".join(events.last_events), []
    if held:
        held = fast_path.written(held)
    if events.usage is None and record is not None:
        prompt, made = record.prompt_tokens, fast_path.tokens
        try:
            event = sse.data(LastEvent(fast_path.sent).usage_event(prompt, made))
        except NotACompletionError:
            return False
        events.usage = Usage(prompt, prompt + made, made)
        if events.keeps_usage:
            events.usage_event = event
            if events.wants_usage:
                held += event
    if events.wants_done:
        held += sse.DONE + sse.END
    if held:
        output.write(held)
    return True


def cause_of(error: EngineError) -> str:
    """Return the kind of failure that cut a stream: a label of
    `pdproxy_continuations_total{reason}`.
    """
    if isinstance(error, EngineTimeoutError):
        return "stalled" if error.wait is Wait.STALLED else "deadline"
    if isinstance(error, EngineUnreachableError):
        return "unreachable"
    if isinstance(error, GivenUpError):
        return "aborted"
    return "error_event" if isinstance(error, EngineRefusedError) else "eof"


def why_failed(error: PdproxyError) -> NotContinued:
    """Return why no engine went on, although one could have."""
    if isinstance(error, EngineTimeoutError):
        return NotContinued.DEADLINE
    if isinstance(error, EnginesLostError):
        return NotContinued.ENGINES_LOST
    return NotContinued.NO_ENGINE if isinstance(error, OverloadedError) else NotContinued.REFUSED
