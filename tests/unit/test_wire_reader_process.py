"""A body that is read in another process comes out as if it had been read here."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.fields import read_fields_if_quick
from pdproxy.wire.reader_process import BodyQuestion, answer, fields_in, request_in
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route
from tests.fuzz.mutations import mutated
from tests.fuzz.test_bodies import BODIES, poisoned
from tests.unit.test_wire_request import JSON, NAMES

MIB = 1 << 20


def elsewhere(route: Route, body: bytes, bounds: Bounds = Bounds()) -> Parsed:  # noqa: B008
    return request_in(answer(msgspec.msgpack.encode(BodyQuestion(bounds, route)), body), body)


def shown(parsed: Parsed) -> Any:
    """A request as plain values."""
    fields = {name: bytes(raw) for name, raw in parsed.fields.items()}
    prompts = [
        (
            one.raw and bytes(one.raw),
            one.tokens,
            one.text_bytes,
            one.messages,
            one.non_text,
            [(medium.head, bytes(medium.value), medium.tail) for medium in one.media],
        )
        for one in parsed.prompts
    ]
    others = [
        getattr(parsed, name)
        for name in Parsed.__struct_fields__
        if name not in ("fields", "prompts", "items")
    ]
    return list(fields.items()), prompts, others


def outcome(read: Any, route: Route, body: bytes) -> Any:
    try:
        return shown(read(route, body))
    except BadRequestError as error:
        return error.status, error.type, error.message, error.param, error.logged


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        poisoned(),
        st.dictionaries(st.text() | NAMES, JSON, max_size=8).map(
            lambda value: json.dumps(value, indent=1).encode()
        ),
        st.sampled_from(sorted(BODIES)).map(BODIES.__getitem__).flatmap(mutated),
        st.binary(max_size=30),
    ),
    st.sampled_from(Route),
)
@example(b'{"a":1,"b":[2],"a":3,"prompt":"x"}', Route.COMPLETIONS)
@example(
    b'{"prompt" : [ "x" , "y" ] , "vllm_xargs" : { "kv_transfer_params" : 1 } , "z" : "\\""}',
    Route.COMPLETIONS,
)
@example('{"prompt":"x","y":NaN}'.encode("utf-16"), Route.COMPLETIONS)
@example(b"\0" * 5, Route.INVOCATIONS)
def test_as_if_it_had_been_read_here(body: bytes, route: Route) -> None:
    """The same fields, byte for byte, the same prompts, the same reasons, the same refusals."""
    assert outcome(elsewhere, route, body) == outcome(parse, route, body)


@settings(max_examples=100, deadline=None)
@given(poisoned())
def test_fields_of_passed_routes(body: bytes) -> None:
    """The same."""
    try:
        expected: Any = read_fields_if_quick(body)
    except BadRequestError as error:
        expected = error.message
    try:
        asked = msgspec.msgpack.encode(BodyQuestion(Bounds(), None, Dialect.RESPONSES))
        found: Any = fields_in(answer(asked, body), body)[0]
    except BadRequestError as error:
        found = error.message
    if isinstance(expected, dict):
        assert {name: bytes(raw) for name, raw in found.items()} == {
            n: bytes(raw) for n, raw in expected.items()
        }
    else:
        assert found == expected


def url(text: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def source(text: str) -> dict[str, Any]:
    base64 = {"type": "base64", "media_type": "image/png", "data": text}
    return {"type": "image", "source": base64}


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        (
            Route.CHAT,
            {"messages": [{"role": "user", "content": [url("A"), url("B"), url("A")]}]},
            "ABA",
        ),
        (
            Route.RESPONSES,
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "output": [{"type": "input_image", "image_url": "data:image/png;base64,A"}],
                        "content": [
                            {"type": "input_image", "image_url": "data:image/png;base64,B"}
                        ],
                    },
                    {"role": "user", "content": [url("C")]},
                ]
            },
            "ABC",
        ),
        (
            Route.MESSAGES,
            {
                "model": "m",
                "max_tokens": 1,
                "system": [source("C")],
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "content": [source("A")]},
                            source("B"),
                        ],
                    }
                ],
            },
            "ABC",
        ),
        (
            Route.BATCH,
            {"messages": [[{"role": "user", "content": [url(text)]}] for text in "ABA"]},
            "ABA",
        ),
    ],
)
def test_media_are_found_again(route: Route, body: dict[str, Any], expected: str) -> None:
    """All of them, in the order in which they are read: each as a part of a chat."""
    before = {"instructions": "A", "tools": []} if route is Route.RESPONSES else {}
    encoded = json.dumps(before | body, indent=1).encode()
    for parsed in (parse(route, encoded), elsewhere(route, encoded)):
        parts = [
            json.loads(medium.head + bytes(medium.value) + medium.tail)
            for prompt in parsed.prompts
            for medium in prompt.media
        ]
        assert parts == [url(text) for text in expected]


def test_an_answer_is_small() -> None:
    """It says where things are: an image of a MiB doesn't come back, nor do prompts."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * MIB}}
    chat = {"messages": [{"role": "user", "content": [image]}], "vllm_xargs": {"a": 1}}
    for route, value in (
        (Route.CHAT, chat),
        (Route.COMPLETIONS, {"prompt": ["x" * MIB, "y" * MIB]}),
    ):
        body = json.dumps(value).encode()
        assert len(answer(msgspec.msgpack.encode(BodyQuestion(Bounds(), route)), body)) < 1000
        assert shown(elsewhere(route, body)) == shown(parse(route, body))


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (b'{"prompt":"x","z":[' + b"[]," * 300 + b"[]]}", "300"),
        (b'{"messages":[' + b"{}," * 300 + b"{}]}", "300"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(301)) + b"}", "300"),
        (b'{"vllm_xargs":{' + b",".join(b'"%d":1' % n for n in range(301)) + b"}}", "300"),
        (b'{"y":NaN,"z":[' + b"1," * 300 + b"1]}", "300"),
        (('{"z":[' + "[]," * 300 + "[]]}").encode("utf-16"), "300"),
        (b'{"z":[' + b'"",' * 300, "300"),
        (b'{"prompt":[' + b'"a",' * 30 + b'"a"]}', "30"),
    ],
)
def test_more_than_may_be_is_refused(body: bytes, number: str) -> None:
    """By its number, whatever is many, and whether or not it is JSON to its end."""
    with pytest.raises(BadRequestError, match=f"more than {number} "):
        elsewhere(Route.COMPLETIONS, body, Bounds(prompts=30, items=300))
