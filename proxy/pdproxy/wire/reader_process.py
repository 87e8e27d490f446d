"""Reads bodies that take long in a reader process: the question, the reading, and the answer.

Owns what the two processes send to each other. The answer is small: it has the positions of the
fields in the body, which the asking process has. Only what had to be encoded again is sent back.
Run as a module, this is the reader process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from pdproxy.kit.errors import BadRequestError, UnparsableError, UnreadableError
from pdproxy.kit.pool_process import work
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import LARGE, Body, Bounds, check_values, count_items
from pdproxy.wire.fields import Fields, decode_fields, lenient_fields, strip_handles
from pdproxy.wire.media import check_media
from pdproxy.wire.passthrough_body import NO_PAIRS, Pairs, check_lists
from pdproxy.wire.prompt_lists import Span, conversations_in, part, prompts_in
from pdproxy.wire.request import Parsed, interpret, lenient_fields_of, unusual_request
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone, Medium, Prompt

_MEMBER = re.compile(rb"""[ \t\n\r,{]*+"(?:[^"\\]++|\\.)*+"[ \t\n\r]*+:[ \t\n\r]*+""", re.DOTALL)
"""The bytes before the value of a top-level field."""
Found = bytes | memoryview
"""A reader's answer."""
_NOTHING = msgspec.Raw(b"")
_HEAD = 4
"""Bytes of the size of the answer's head. Behind the head is what was encoded again."""


class BodyQuestion(msgspec.Struct, frozen=True, array_like=True):
    """How to read a body: as a generating request to `route`, or as one of a passed route if that
    is None.
    """

    bounds: Bounds
    route: Route | None
    dialect: Dialect = Dialect.OPENAI


class _Field(msgspec.Struct, frozen=True, array_like=True):
    """Where a top-level field is: in the body, or in what was encoded again."""

    name: str
    begin: int
    end: int
    encoded: bool


class _Medium(msgspec.Struct, frozen=True, array_like=True):
    """A medium, as in `Medium`. `field`, `place`: where its `value` is."""

    head: bytes
    field: str
    place: Span
    tail: bytes


class _Prompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt. `place`: its position in `prompt`, or in `messages` of a batch; None for a chat.
    The others as in `Prompt`.
    """

    place: Span | None
    tokens: int | None
    text_bytes: int
    messages: int
    non_text: bool
    media: tuple[_Medium, ...]


class _Summary(msgspec.Struct, frozen=True, array_like=True):
    """What a generating request asks for, as in `Parsed`."""

    route: Route
    model: str | None
    stream: bool
    wants_usage: bool
    is_list: bool
    prompts: tuple[_Prompt, ...]
    alone: Alone | None
    items: int
    unread: int


class _Refused(msgspec.Struct, frozen=True, array_like=True):
    error: str
    message: str
    param: str | None


class _Answer(msgspec.Struct, frozen=True):
    fields: tuple[_Field, ...] = ()
    summary: _Summary | None = None
    pairs: Pairs = NO_PAIRS
    refused: _Refused | None = None


_questions = msgspec.msgpack.Decoder(BodyQuestion)
_answers = msgspec.msgpack.Decoder(_Answer)


# -- in the reader process


def answer(encoded_question: bytes, body: bytes) -> bytes:
    """Read a body; return what `request_in` or `fields_in` reads."""
    question = _questions.decode(encoded_question)
    try:
        head, encoded = _answer(question, body)
    except BadRequestError as error:
        head, encoded = (
            _Answer(refused=_Refused(type(error).__name__, error.message, error.param)),
            [],
        )
    data = msgspec.msgpack.encode(head)
    return b"".join([len(data).to_bytes(_HEAD, "big"), data, *encoded])


def _answer(question: BodyQuestion, body: bytes) -> tuple[_Answer, list[bytes]]:
    items = count_items(body, question.bounds.items)
    fields = decode_fields(body)
    places: dict[str, Span] = {}
    came: Fields = {}
    if fields is not None:
        places, came = _places(body, fields), dict(fields)
        try:
            strip_handles(fields)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fields = None
    plain = fields is not None
    if fields is None:
        check_values(body, question.bounds.items)
        fields = (
            lenient_fields(body)
            if question.route is None
            else lenient_fields_of(question.route, body)
        )
    summary, pairs = None, NO_PAIRS
    if question.route is None:
        pairs = check_lists(question.dialect, fields, question.bounds)
        check_media(fields, question.bounds.media)
    else:
        parsed = (
            interpret(question.route, fields, len(body), question.bounds, LARGE)
            if plain
            else unusual_request(question.route, fields, len(body), question.bounds)
        )
        summary = _summary(parsed, question.bounds, items)
    listed: list[_Field] = []
    encoded: list[bytes] = []
    size = 0
    for name, raw in fields.items():
        if plain and name in places and came[name] is raw:
            listed.append(_Field(name, *places[name], False))
        else:
            encoded.append(bytes(raw))
            listed.append(_Field(name, size, size := size + len(encoded[-1]), True))
    return _Answer(tuple(listed), summary, pairs), encoded


def _places(body: bytes, fields: Fields) -> dict[str, Span]:
    """Return where the values of top-level fields are in a body. Fields that come twice, and those
    behind them, may be missing.

    Any place with the same bytes is as good as the value's own.
    """
    places: dict[str, Span] = {}
    at = 0
    for name, raw in fields.items():
        found = _MEMBER.match(body, at)
        if found is None or not body.startswith(memoryview(raw), found.end()):
            break
        at = found.end() + memoryview(raw).nbytes
        places[name] = (found.end(), at)
    return places


def _summary(parsed: Parsed, bounds: Bounds, items: int) -> _Summary:
    spans: list[Span | None] = [None]
    if parsed.is_list and parsed.route is Route.BATCH:
        spans = [
            span
            for span, _ in conversations_in(parsed.fields["messages"], bounds.prompts, "messages")
            or ()
        ]
    elif parsed.is_list:
        spans = list(prompts_in(parsed.fields["prompt"], bounds.prompts, "prompt") or ())
    elif "prompt" in parsed.fields and parsed.route is Route.COMPLETIONS:
        spans = [(0, memoryview(parsed.fields["prompt"]).nbytes)]
    places = _MediaPlaces(parsed)
    prompts = tuple(
        _Prompt(
            span,
            prompt.tokens,
            prompt.text_bytes,
            prompt.messages,
            prompt.non_text,
            tuple(places.of(prompt.media)),
        )
        for span, prompt in zip(spans, parsed.prompts, strict=False)
    )
    return _Summary(
        parsed.route,
        parsed.model,
        parsed.stream,
        parsed.wants_usage,
        parsed.is_list,
        prompts,
        parsed.alone,
        items,
        parsed.unread,
    )


class _MediaPlaces:
    """Finds where the media of a request's prompts are, in one pass over its fields: media come in
    the order in which a route reads them. Any place with the same bytes is as good as their own.
    """

    def __init__(self, parsed: Parsed) -> None:
        # conversations stand last in the prompt, and are read first
        names = reversed(parsed.route.form.prompt_fields)
        self._left = [(name, parsed.fields[name]) for name in names if name in parsed.fields]
        self._text: bytes | None = None
        """The first of these fields, None before it is needed."""
        self._end = 0
        """Of the last place in it."""

    def of(self, media: Sequence[Medium]) -> Iterator[_Medium]:
        """Return the places of a prompt's media."""
        for one in media:
            value = bytes(one.value)
            while self._left:
                name, raw = self._left[0]
                if self._text is None:
                    self._text = bytes(raw)
                if (begin := self._text.find(value, self._end)) >= 0:
                    self._end = begin + len(value)
                    yield _Medium(one.head, name, (begin, self._end), one.tail)
                    break
                del self._left[0]
                self._text, self._end = None, 0


# -- in the asking process


def request_in(found: Found, body: Body) -> Parsed:
    """Return the request that a reader's answer describes. Raises what the reader refused it
    with.
    """
    fields, head = _decoded(found, body)
    summary = head.summary
    assert summary is not None
    listed = fields.get("messages" if summary.route is Route.BATCH else "prompt", _NOTHING)
    prompts = tuple(
        Prompt(
            None if one.place is None else part(listed, one.place),
            one.tokens,
            one.text_bytes,
            one.messages,
            one.non_text,
            tuple(
                Medium(found.head, part(fields[found.field], found.place), found.tail)
                for found in one.media
            ),
        )
        for one in summary.prompts
    )
    return Parsed(
        summary.route,
        fields,
        summary.model,
        summary.stream,
        summary.wants_usage,
        summary.is_list,
        prompts,
        summary.alone,
        len(body),
        summary.items,
        unread=summary.unread,
    )


def fields_in(found: Found, body: Body) -> tuple[Fields, Pairs]:
    """Return the fields that a reader's answer describes, and their pairs. Raises what the reader
    refused them with.
    """
    fields, head = _decoded(found, body)
    return fields, head.pairs


def _decoded(found: Found, body: Body) -> tuple[Fields, _Answer]:
    whole, rest = memoryview(body), memoryview(found)
    start = _HEAD + int.from_bytes(found[:_HEAD], "big")
    head = _answers.decode(rest[_HEAD:start])
    rest = rest[start:]
    if head.refused is not None:
        raise _error(head.refused)
    fields = {
        field.name: msgspec.Raw((rest if field.encoded else whole)[field.begin : field.end])
        for field in head.fields
    }
    return fields, head


def _error(refused: _Refused) -> BadRequestError:
    if refused.error == UnparsableError.__name__:
        return UnparsableError()
    if refused.error == UnreadableError.__name__:
        return UnreadableError(refused.message, param=refused.param)
    return BadRequestError(refused.message, param=refused.param)


if __name__ == "__main__":
    work(answer)
