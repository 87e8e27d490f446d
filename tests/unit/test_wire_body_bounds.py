"""Counting what a body holds before it is parsed: exact where it refuses, never too little where it
decides.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire import body_bounds
from pdproxy.wire.body_bounds import (
    MAX_FIELDS,
    MAX_QUICK_ITEMS,
    SMALL,
    Bounds,
    check_values,
    count_items,
    depth,
    is_quick,
)
from pdproxy.wire.prompt_lists import count_in, part, prompts_in
from pdproxy.wire.request import parse, parse_if_quick
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone
from tests.fuzz.cost.measure import traced

TEXT = st.text(st.sampled_from('"\\[]{},:a\n\u0436\U0001f600'), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
ENCODINGS = st.sampled_from(["utf-8", "utf-16", "utf-16-le", "utf-32", "utf-8-sig"])


def items(value: Any) -> int:
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + sum(map(items, value))
    return 1 + sum(1 + items(one) for one in value.values()) if isinstance(value, dict) else 0


def levels(value: Any) -> int:
    inner = (
        value if isinstance(value, list) else value.values() if isinstance(value, dict) else None
    )
    return 0 if inner is None else 1 + max(map(levels, inner), default=0)


@given(JSON, st.booleans(), ENCODINGS)
@settings(deadline=None)
def test_items_and_depth_are_exact(value: Any, ascii_only: bool, encoding: str) -> None:
    """Whatever stands in the strings, and however they are escaped and encoded."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    count = items(value)
    assert count_items(text.encode(encoding), count) == count
    assert depth(text.encode()) == levels(value)
    if count:
        with pytest.raises(BadRequestError, match=f"more than {count - 1} strings"):
            count_items(text.encode(encoding), count - 1)


@given(JSON)
def test_no_body_of_many_items_is_quick(value: Any) -> None:
    """What is told from bytes alone may be too much, never too little."""
    body = json.dumps([value] * 600).encode()
    body += b" " * max(0, SMALL + 1 - len(body))
    assert not is_quick(body) or count_items(body, 10**9) <= MAX_QUICK_ITEMS


@pytest.mark.parametrize("digits", ["0123456789" * 30, "9" * 300])
def test_no_body_of_long_integers_is_quick(digits: str) -> None:
    """Wherever the integer stands. Many short ones are."""
    ids = f"{digits}," * 300
    assert is_quick(f'{{"prompt":[{ids}1]}}'.encode())
    for at in (0, len(ids)):
        assert not is_quick(f'{{"prompt":[{ids[:at]}1{digits},{ids[at:]}1]}}'.encode())


def test_values_are_counted_with_numbers() -> None:
    """Where each becomes an object."""
    check_values(b'[NaN,1,"a,b",{"a":2}]', 5)
    with pytest.raises(BadRequestError):
        check_values(b'[NaN,1,"a,b",{"a":2}]', 4)


def test_bounds_are_the_settings() -> None:
    """The defaults of both are equal, and no body that is read without counting can hold more than
    may be set.
    """
    from pdproxy.settings.limits import Limits

    limits = Limits()
    assert Bounds(limits.max_prompts, limits.max_body_items) == body_bounds.DEFAULT
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"max_body_items": max(SMALL // 2, MAX_QUICK_ITEMS)}, Limits)


TEXTS = st.lists(TEXT | st.sampled_from(["\\", '"', "]", "a" * 50]), min_size=1, max_size=8)
IDS = st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=5), min_size=1, max_size=8)


@given(TEXTS | IDS, st.booleans(), st.sampled_from([None, 1]))
def test_prompts_are_where_they_are(
    prompts: list[Any], ascii_only: bool, indent: int | None
) -> None:
    """As a JSON parser finds them, one too many included."""
    raw = msgspec.Raw(json.dumps(prompts, ensure_ascii=ascii_only, indent=indent).encode())
    spans = prompts_in(raw, len(prompts), "prompt")
    assert spans is not None
    assert [json.loads(bytes(part(raw, span))) for span in spans] == prompts
    with pytest.raises(BadRequestError, match=f"more than {len(prompts) - 1} prompts"):
        prompts_in(raw, len(prompts) - 1, "prompt")


@given(JSON)
def test_what_is_no_list_of_prompts(value: Any) -> None:
    """Has none, or just those of a JSON parser."""
    raw = msgspec.Raw(json.dumps(value).encode())
    spans = prompts_in(raw, 100, "prompt")
    if spans is not None:
        assert [json.loads(bytes(part(raw, span))) for span in spans] == value


@given(st.lists(JSON, max_size=6), st.sampled_from([None, 1]))
def test_the_values_of_a_list_are_counted(values: list[Any], indent: int | None) -> None:
    """As a JSON parser finds them, whatever they are; a list whose first value is no prompt is one
    prompt.
    """
    raw = msgspec.Raw(json.dumps(values, indent=indent).encode())
    expected = len(values) if not values or isinstance(values[0], str | list | dict) else 1
    assert count_in(raw, len(values), "prompt", b'"[{') == expected
    if expected > 1:
        with pytest.raises(BadRequestError, match=f"more than {expected - 1} prompts"):
            count_in(raw, expected - 1, "prompt", b'"[{')


def peak(of: Callable[[], object]) -> int:
    """Bytes that a call takes at most."""
    tracemalloc.start()
    try:
        of()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("prompts", b'{"model":"m","prompt":[' + b'"a",' * 2048 + b'"a"]}'),
        ("prompts of ids", b'{"model":"m","prompt":[' + b"[1]," * 2048 + b"[1]]}"),
        ("prompts for one engine", b'{"model":"m","n":2,"prompt":[' + b'"a",' * 2048 + b'"a"]}'),
        (
            "prompts of what only an engine judges",
            b'{"model":5,"prompt":[' + b'"a",' * 2048 + b'"a"]}',
        ),
        ("prompts of a body with NaN", b'{"x":NaN,"prompt":[' + b'"a",' * 2048 + b'"a"]}'),
        ("embeddings", b'{"model":"m","prompt_embeds":[' + b'"a",' * 2048 + b'"a"]}'),
        ("fields", b"{" + b",".join(b'"%d":1' % n for n in range(MAX_FIELDS + 1)) + b"}"),
    ],
)
def test_more_than_one_request_may_have(name: str, more: bytes) -> None:
    """Is refused in a body that is read at once; the message names the number."""
    with pytest.raises(BadRequestError, match=r"2048|1024"):
        parse_if_quick(Route.COMPLETIONS, more)


def test_a_list_is_not_made_to_be_counted() -> None:
    """A million prompts take no memory but their bytes."""
    body = b'{"prompt":[' + b'"a",' * 1_000_000 + b'"a"]}'

    def refused() -> None:
        with pytest.raises(BadRequestError):
            parse(Route.COMPLETIONS, body)

    assert peak(refused) < 1_000_000


def test_items_are_counted_before_they_are_made() -> None:
    """What is refused for its items takes no more than its bytes again."""
    body = b'{"messages":[' + b"{}," * 1_000_000 + b"{}]}"

    def refused() -> None:
        with pytest.raises(BadRequestError):
            count_items(body, 500_000)

    assert peak(refused) < 2.5 * len(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"' + b"x" * body_bounds.LARGE + b'"}',
        b'{"prompt":"x","z":[' + b"[]," * 30_000 + b"[]]}",
        b'{"prompt":"x","z":NaN,"y":"' + b"x" * SMALL + b'"}',
        b'{"prompt":"x","response_format":[1' + b",1" * SMALL + b"]}",
        '{"prompt":"x"}'.encode("utf-16") + " ".encode("utf-16-le") * SMALL,
    ],
)
def test_what_may_take_long_is_not_read_at_once(body: bytes) -> None:
    """It is left to a reader process."""
    assert parse_if_quick(Route.COMPLETIONS, body) is None


def test_a_schema_without_end_is_not_read_at_all() -> None:
    """What only a decode engine would see, and is longer than any schema: that engine alone judges
    it.
    """
    body = b'{"prompt":"x","response_format":"' + b"x" * body_bounds.LARGE + b'"}'
    assert parse(Route.COMPLETIONS, body).alone is Alone.UNUSUAL


@pytest.mark.parametrize("many", [b'"', b"[", b"{"])
def test_a_long_text_is_counted_without_a_copy_of_it(many: bytes) -> None:
    """Its few marks are searched. A body of many has a copy without them."""
    text = b'{"messages":[{"role":"user","content":"%b"}]}' % (b"a word " * 40_000)

    def reading(body: bytes) -> Coroutine[None, None, int | None]:
        async def read() -> int | None:
            assert is_quick(body)
            return None

        return read()

    assert traced(reading, text)[0] < len(text) / 4
    assert traced(reading, text.replace(b"word", many, 40))[0] > len(text) / 4
    assert not is_quick(text.replace(b"a word", many * 6))
