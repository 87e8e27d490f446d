"""Bodies that take long to read, read in a process of their own: the question, the reading, and the answer.

Owns what passes between the two processes. The answer is small: it says where in the body the fields stand, so that the body,
which the asking process has, never comes back; only what had to be written anew does. Run as a module, it is the reader process.
"""

from __future__ import annotations

import re

import msgspec

from pdproxy.kit.errors import BadRequestError, UnparsableError, UnreadableError
from pdproxy.kit.worker import work
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import LARGE, Body, Bounds, check_values, count_items
from pdproxy.wire.fields import Fields, decoded, strip_handles, unusual_fields
from pdproxy.wire.passthrough_body import check_lists
from pdproxy.wire.prompt_lists import Span, part, prompts_in
from pdproxy.wire.request import Alone, Parsed, Prompt, Route, understood, unusual

_MEMBER = re.compile(rb"""[ \t\n\r,{]*+"(?:[^"\\]++|\\.)*+"[ \t\n\r]*+:[ \t\n\r]*+""", re.DOTALL)
"""What stands before the value of a top-level field."""
Found = bytes | memoryview
"""A reader's answer."""
_HEAD = 4
"""Bytes that say how long an answer is without what was written anew, which follows it."""


class Question(msgspec.Struct, frozen=True, array_like=True):
    """How a body is to be read: as a generating request to `route`, or, if that is None, as one of a passed route."""

    bounds: Bounds
    route: Route | None
    dialect: Dialect = Dialect.OPENAI


class _Field(msgspec.Struct, frozen=True, array_like=True):
    """Where a top-level field stands: in the body, or in what was written anew."""

    name: str
    begin: int
    end: int
    anew: bool


class _Prompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt. `place` in the field `prompt`, None for messages; the others as in `Prompt`."""

    place: Span | None
    tokens: int | None
    text_bytes: int
    messages: int


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What a generating request asks for, as in `Parsed`."""

    model: str | None
    stream: bool
    wants_usage: bool
    is_list: bool
    prompts: tuple[_Prompt, ...]
    alone: Alone | None
    items: int


class _Refused(msgspec.Struct, frozen=True, array_like=True):
    error: str
    message: str
    param: str | None


class _Answer(msgspec.Struct, frozen=True):
    fields: tuple[_Field, ...] = ()
    said: _Said | None = None
    refused: _Refused | None = None


_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(_Answer)


# -- in the reader process


def answer(question: bytes, body: bytes) -> bytes:
    """Read a body; return what `request_in` or `fields_in` understands."""
    asked = _questions.decode(question)
    try:
        head, anew = _answer(asked, body)
    except BadRequestError as error:
        head, anew = _Answer(refused=_Refused(type(error).__name__, error.message, error.param)), []
    encoded = msgspec.msgpack.encode(head)
    return b"".join([len(encoded).to_bytes(_HEAD, "big"), encoded, *anew])


def _answer(asked: Question, body: bytes) -> tuple[_Answer, list[bytes]]:
    items = count_items(body, asked.bounds.items)
    fields = decoded(body)
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
        check_values(body, asked.bounds.items)
        fields = unusual_fields(body)
    said = None
    if asked.route is None:
        check_lists(asked.dialect, fields, asked.bounds)
    else:
        size = len(body)
        parsed = (
            understood(asked.route, fields, size, asked.bounds, LARGE)
            if plain
            else unusual(asked.route, fields, size, asked.bounds)
        )
        said = _said(parsed, asked.bounds, items)
    listed: list[_Field] = []
    anew: list[bytes] = []
    written = 0
    for name, raw in fields.items():
        if plain and name in places and came[name] is raw:
            listed.append(_Field(name, *places[name], False))
        else:
            anew.append(bytes(raw))
            listed.append(_Field(name, written, written := written + len(anew[-1]), True))
    return _Answer(tuple(listed), said), anew


def _places(body: bytes, fields: Fields) -> dict[str, Span]:
    """Return where the values of top-level fields stand in a body. Of fields that come twice, and those behind them, maybe not.

    Any place with the same bytes is as good as a value's own.
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


def _said(parsed: Parsed, bounds: Bounds, items: int) -> _Said:
    spans: list[Span | None] = [None]
    if parsed.is_list:
        spans = list(prompts_in(parsed.fields["prompt"], bounds.prompts, "prompt") or ())
    elif "prompt" in parsed.fields and parsed.route is Route.COMPLETIONS:
        spans = [(0, memoryview(parsed.fields["prompt"]).nbytes)]
    prompts = tuple(
        _Prompt(span, prompt.tokens, prompt.text_bytes, prompt.messages)
        for span, prompt in zip(spans, parsed.prompts, strict=False)
    )
    return _Said(parsed.model, parsed.stream, parsed.wants_usage, parsed.is_list, prompts, parsed.alone, items)


# -- in the asking process


def request_in(found: Found, route: Route, body: Body) -> Parsed:
    """Return the request that a reader's answer describes. Raises what the reader refused it with."""
    fields, said = _taken(found, body)
    assert said is not None
    prompts = tuple(
        Prompt(
            None if one.place is None else part(fields["prompt"], one.place), one.tokens, one.text_bytes, one.messages
        )
        for one in said.prompts
    )
    return Parsed(
        route,
        fields,
        said.model,
        said.stream,
        said.wants_usage,
        said.is_list,
        prompts,
        said.alone,
        len(body),
        said.items,
    )


def fields_in(found: Found, body: Body) -> Fields:
    """Return the fields that a reader's answer describes. Raises what the reader refused them with."""
    return _taken(found, body)[0]


def _taken(found: Found, body: Body) -> tuple[Fields, _Said | None]:
    whole, anew = memoryview(body), memoryview(found)
    start = _HEAD + int.from_bytes(found[:_HEAD], "big")
    head = _answers.decode(anew[_HEAD:start])
    anew = anew[start:]
    if head.refused is not None:
        raise _error(head.refused)
    fields = {
        field.name: msgspec.Raw((anew if field.anew else whole)[field.begin : field.end]) for field in head.fields
    }
    return fields, head.said


def _error(refused: _Refused) -> BadRequestError:
    if refused.error == UnparsableError.__name__:
        return UnparsableError()
    if refused.error == UnreadableError.__name__:
        return UnreadableError(refused.message, param=refused.param)
    return BadRequestError(refused.message, param=refused.param)


if __name__ == "__main__":
    work(answer)
