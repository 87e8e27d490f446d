"""A chat's long texts are not parsed once more, and what is known of it is the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.wire import long_strings
from pdproxy.wire.body_bounds import DEFAULT
from pdproxy.wire.fields import decode_fields
from pdproxy.wire.routes import chat
from pdproxy.wire.unusual import UnusualError

TEXTS = st.builds(
    lambda text, times: text * times,
    st.text(st.sampled_from('ab"\\\n[]{}:,é🦊') | st.characters(codec="utf-8"), max_size=8),
    st.sampled_from([1, 1, 300, 2000]),
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "refusal", "image_url"])},
    optional={
        "text": TEXTS,
        "image_url": st.builds(lambda text: {"url": "data:" + text}, TEXTS),
    },
) | st.dictionaries(TEXTS, TEXTS, max_size=2)
MESSAGES = st.dictionaries(
    st.sampled_from(["role", "content", "name", "reasoning"]) | TEXTS,
    TEXTS | st.none() | st.lists(PARTS, max_size=3),
    max_size=4,
)


def seen(read: Any, fields: dict[str, msgspec.Raw]) -> Any:
    """What is known of a chat, or that it is unusual."""
    try:
        found = read(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, UnusualError) as error:
        return type(error).__name__
    count, content = found
    media = [(one.head, bytes(one.value), one.tail) for one in content.media]
    return count, content.size, media, content.is_alone


@given(st.lists(MESSAGES, max_size=4), st.booleans())
def test_a_chat_is_what_a_parser_finds(messages: Any, ascii_only: bool) -> None:
    """Whatever is in its texts, and however they are escaped."""
    padded = [*messages, {"content": "x" * chat._LONG}]
    body = json.dumps({"messages": padded}, ensure_ascii=ascii_only).encode()
    fields = decode_fields(body)
    assert fields is not None
    expected = seen(chat._contents, fields)
    assert seen(lambda one: chat._texts(one) or chat._contents(one), fields) == expected
    if isinstance(expected, tuple):
        assert chat.read(fields, DEFAULT).prompts[0].text_bytes == expected[1]


def test_a_long_text_is_one_number() -> None:
    """Behind a byte that no text in UTF-8 has, so that none can be taken for it."""
    text = 'a \\"word\\" \\\\' * 100
    short = long_strings.shortened(b'[{"content":"%b"}]' % text.encode())
    assert short == b'[{"content":"\xff%d"}]' % len(text)
    assert long_strings.missing(short) == len(text) - len(b"\xff%d" % len(text))
    assert long_strings.missing('["\\u00ff99","ÿ99"]'.encode()) == 0


@pytest.mark.parametrize(
    "json",
    [
        b"[%b]" % b",".join([b'"a"'] * 200),
        b'["%b"]' % (b'\\"' * 600),
        b'["%b"]' % (b"\\\\" * 600),
        b'["a',
    ],
    ids=["strings", "quotes", "backslashes", "cut off"],
)
def test_what_takes_as_long_to_search_is_parsed(json: bytes) -> None:
    """There is a bound for what is looked at one by one."""
    assert long_strings.shortened(json) in (None, json)


def test_a_long_chat_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is left without its texts is parsed for its messages."""
    sizes: list[int] = []

    class Decoder:
        def decode(self, json: bytes) -> Any:
            sizes.append(memoryview(json).nbytes)
            return known.decode(json)

    known = chat._messages_decoder
    monkeypatch.setattr(chat, "_messages_decoder", Decoder())
    body = json.dumps({"messages": [{"role": "user", "content": "a\n" * 100_000}]}).encode()
    fields = decode_fields(body)
    assert fields is not None
    (prompt,) = chat.read(fields, DEFAULT).prompts
    assert (prompt.text_bytes, prompt.messages) == (300_002, 1)
    assert sizes == [len('[{"role": "user", "content": "?300000"}]')]
