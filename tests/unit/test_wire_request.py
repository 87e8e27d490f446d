"""Reading a client's body: fields survive byte for byte, nothing crashes, no handle gets
through.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdproxy.kit.errors import BadRequestError
from pdproxy.transfer.bodies import alone_body
from pdproxy.transfer.contract import NO_DISPATCH, encode
from pdproxy.transfer.nixl import prefill
from pdproxy.wire.fields import NEVER_FROM_CLIENTS, body_request_id
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone
from pdproxy.wire.sent_body import joined
from pdproxy.wire.unusual import MEDIUM

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["model", "prompt", "messages", "stream", "stream_options", "n", "echo", "max_tokens",
    "min_tokens", "logprobs",
     "prompt_logprobs", "prompt_embeds", "request_id", "vllm_xargs", "sampling_params",
     "kv_transfer_params",
     "ec_transfer_params", "top_logprobs", "use_beam_search", "max_completion_tokens",
     "return_token_ids"]
)  # fmt: skip
ROUTES = st.sampled_from(Route)


@given(ROUTES, st.dictionaries(st.text() | NAMES, JSON, max_size=8))
def test_any_object_is_read_and_comes_out_as_it_went_in(route: Route, body: dict[str, Any]) -> None:
    """Whatever the fields hold, parsing never fails, and all but the handles come out with the same
    values.
    """
    parsed = parse(route, json.dumps(body).encode())
    out = json.loads(encode(parsed.fields))
    assert not {"ec_transfer_params"} & set(out)
    assert set(out.get("kv_transfer_params", ())) <= {"prompt_token_ids"}
    for name, value in body.items():
        if name not in (*NEVER_FROM_CLIENTS, "vllm_xargs", "sampling_params"):
            assert out[name] == value
    for prompt in parsed.prompts:
        json.loads(prefill(parsed, prompt, NO_DISPATCH).body)
        json.loads(joined(alone_body(parsed, prompt)))
    body_request_id(parsed.fields)


@given(ROUTES, st.binary(max_size=60))
@example(Route.CHAT, b'{"a":' * 10_000)
@example(Route.COMPLETIONS, b'{"vllm_xargs":' + b'{"a":' * 900)
@example(Route.COMPLETIONS, b'{"prompt":"\xff"}')
@example(Route.CHAT, b'{"messages":[{"content":[{"type":"\xff"}]}]}')
def test_any_bytes_are_an_object_or_the_clients_error(route: Route, body: bytes) -> None:
    """Bytes that are no JSON object raise the one error that becomes a 400."""
    with contextlib.suppress(BadRequestError):
        assert isinstance(parse(route, body).fields, dict)


@pytest.mark.parametrize("depth", range(500, 1100, 7))
def test_nesting_at_the_limit_of_recursion_never_lets_a_handle_through(depth: int) -> None:
    """However deep a carrier is, its handle is removed or the request refused."""
    deep = b'{"vllm_xargs":{"kv_transfer_params":{},"d":' + b"[" * depth + b"]" * depth + b"}}"
    try:
        parsed = parse(Route.CHAT, deep)
    except BadRequestError:
        return
    assert b"kv_transfer_params" not in encode(parsed.fields)


@given(
    st.lists(st.sampled_from([" ", "\t", "\n", "\r"]), max_size=3).map("".join),
    st.text(),
    st.integers(1, 10**30),
)
def test_raw_values_keep_their_bytes(space: str, text: str, number: int) -> None:
    """Values keep their escapes, their digits and their inner white space; only the frame is
    written anew.
    """
    value = f'{{"x"{space}:{space}[ {json.dumps(text)} , {number}.50E+2 ]}}'
    body = f'{space}{{"v"{space}:{space}{value}{space}}}{space}'.encode()
    assert encode(parse(Route.CHAT, body).fields) == b'{"v":' + value.encode() + b"}"


@pytest.mark.parametrize(
    "name", [*NEVER_FROM_CLIENTS, "kv\\u005ftransfer_params", "\\u0065c_transfer_params"]
)
@pytest.mark.parametrize(
    "frame", ["{{{}}}", '{{"vllm_xargs":{{{}}}}}', '{{"sampling_params":{{"extra_args":{{{}}}}}}}']
)
def test_handles_of_clients_are_removed(name: str, frame: str) -> None:
    """At the top and in every carrier, escaped or repeated."""
    body = frame.format(f'"{name}":{{"a":1}},"keep":2,"{name}":null')
    out = encode(parse(Route.COMPLETIONS, body.encode()).fields).decode()
    assert "transfer_params" not in out
    assert '"keep":2' in out


@pytest.mark.parametrize("ids", ["[1,2]", "[]", '"x"', "[[1]]", "{}", "0", "[NaN]", "[1.0,-2]"])
def test_a_prompt_in_the_place_of_a_handle_stays_without_the_handle(ids: str) -> None:
    """Whatever the value is, for the engine that will read it; in a chat, not in a completion,
    where no engine reads it.
    """
    params = (
        f'"kv_transfer_params":{{"do_remote_prefill":true,"prompt_token_ids":{ids},"remote_host":'
        f'"x"}}'
    )
    chat = (
        f'{{"messages":[{{"role":"user","content":"x"}}],"ec_transfer_params":{{"a":1}},{params}}}'
    ).encode()
    found = parse(Route.CHAT, chat)
    assert bytes(found.fields["kv_transfer_params"]) == f'{{"prompt_token_ids":{ids}}}'.encode()
    assert "ec_transfer_params" not in found.fields
    assert found.alone is (Alone.UNUSUAL if ids == "[NaN]" else Alone.PROMPT_IDS)
    completion = parse(Route.COMPLETIONS, f'{{"prompt":"x",{params}}}'.encode())
    assert b"transfer_params" not in encode(completion.fields)


@pytest.mark.parametrize(
    "params",
    ["{}", "null", "[]", '"x"', '{"prompt_token_ids":null}', '{"prompt_token_ids" : null}'],
)
def test_a_handle_without_a_prompt_goes_altogether(params: str) -> None:
    """Nothing in it is the client's."""
    chat = (
        f'{{"messages":[{{"role":"user","content":"x"}}],"kv_transfer_params":{params}}}'.encode()
    )
    found = parse(Route.CHAT, chat)
    assert "kv_transfer_params" not in found.fields
    assert found.alone is None


@pytest.mark.parametrize(
    ("fields", "alone"),
    [
        ({"prompt": "x"}, None),
        ({"prompt": ["x", "y"]}, None),
        ({"prompt": [1, 2]}, None),
        ({"prompt": [[1, 2], [3]]}, None),
        ({"prompt": "x", "n": 1, "stream": False, "max_tokens": 1, "min_tokens": 1}, None),
        ({"prompt": "x", "n": 2}, Alone.N),
        ({"prompt": "x", "n": 0}, Alone.UNUSUAL),
        ({"prompt": "x", "n": 2, "temperature": 0}, Alone.UNUSUAL),
        ({"prompt": "x", "n": 2, "max_tokens": 0}, Alone.UNUSUAL),
        ({"prompt": "x", "n": "2"}, Alone.UNUSUAL),
        ({"prompt": "x", "max_tokens": 0}, Alone.UNUSUAL),
        ({"prompt": "x", "max_tokens": 1.5}, Alone.UNUSUAL),
        ({"prompt": "x", "min_tokens": -1}, Alone.UNUSUAL),
        ({"prompt": [-1]}, Alone.UNUSUAL),
        ({"prompt": []}, Alone.UNUSUAL),
        ({"prompt": [[]]}, Alone.UNUSUAL),
        ({"prompt": [["x"]]}, Alone.UNUSUAL),
        ({"prompt": None}, Alone.UNUSUAL),
        ({}, Alone.UNUSUAL),
        ({"prompt": "x", "stream_options": {"include_usage": True}, "stream": True}, None),
        (
            {"prompt": "x", "stream_options": {"include_usage": "yes"}, "stream": True},
            Alone.UNUSUAL,
        ),
        ({"prompt": "x", "stream_options": [], "stream": True}, Alone.UNUSUAL),
        ({"prompt": "x", "logprob_token_ids": [1]}, Alone.UNUSUAL),
        ({"prompt": "x", "logprob_token_ids": [1], "logprobs": 0}, None),
        ({"prompt": None, "prompt_embeds": "A"}, Alone.NON_TEXT),
    ],
)
def test_what_the_request_itself_says_about_splitting(
    fields: dict[str, Any], alone: Alone | None
) -> None:
    """The rules of a request, on completions."""
    assert parse(Route.COMPLETIONS, json.dumps(fields).encode()).alone is alone


TEXT: dict[str, Any] = {"type": "text", "text": "x"}


@pytest.mark.parametrize("beside", [None, "x", [], [{"type": "input_text", "text": "x"}]])
@pytest.mark.parametrize("place", ["content", "output"])
@pytest.mark.parametrize("kind", ["message", "function_call_output", "reasoning"])
def test_no_medium_of_an_input_item_is_overlooked(kind: str, place: str, beside: Any) -> None:
    """Whatever stands in the item's other field: engines choose which of the two they read."""
    other = "output" if place == "content" else "content"
    for called in ("input_image", "reasoning_text"):
        image = {"type": called, "image_url": "http://far/a.png"}
        item = {"type": kind, "role": "user", place: [image], other: beside}
        parsed = parse(Route.RESPONSES, json.dumps({"model": "m", "input": [item]}).encode())
        assert parsed.alone is Alone.NON_TEXT


@pytest.mark.parametrize(
    ("part", "alone"),
    [
        (TEXT, None),
        (
            TEXT
            | {
                "cache_control": {"type": "ephemeral"},
                "annotations": [],
                "index": 0,
                "id": "p",
                "uuid": "u",
            },
            None,
        ),
        (TEXT | {"image_url": None}, None),
        (TEXT | {"image_url": None, "uuid": "u"}, Alone.NON_TEXT),
        ({"type": "input_text", "text": "x"}, None),
        ({"type": "output_text", "text": "x"}, None),
        ({"type": "refusal", "refusal": "x"}, None),
        ({"type": "thinking", "thinking": "x"}, None),
        ({"type": "tool_reference", "name": "x"}, None),
        ({"text": "x"}, Alone.NON_TEXT),
        ({"type": "image_url", "image_url": {"url": "data:,"}}, None),
        ({"type": "input_image", "image_url": "data:,"}, None),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, None),
        ({"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "u"}, Alone.NON_TEXT),
        ({"type": "image_url", "image_url": {"url": "http://a/b.png"}}, Alone.NON_TEXT),
        ({"type": "image_url", "image_url": {"url": "DATA:,"}}, Alone.NON_TEXT),
        ({"type": "image_url", "image_url": {"url": None}}, Alone.NON_TEXT),
        ({"type": "image_url", "image_url": "data:,", "video_url": "data:,"}, Alone.NON_TEXT),
        ({"type": "video_url", "image_url": "data:,"}, Alone.NON_TEXT),
        ({"type": "input_audio", "input_audio": "data:,"}, Alone.UNUSUAL),
        ({"type": "input_audio", "input_audio": {"url": "data:,"}}, Alone.NON_TEXT),
        ({"type": "input_image", "file_id": "f"}, Alone.NON_TEXT),
        (TEXT | {"image_url": {"url": "data:,"}, "uuid": "u"}, Alone.NON_TEXT),
        ({"image_url": "data:,"}, Alone.NON_TEXT),
        ({"type": "unheard_of"}, Alone.NON_TEXT),
        ({"type": None, "text": "x"}, Alone.NON_TEXT),
        ({"type": "x" * 100, "text": "x"}, Alone.NON_TEXT),
    ],
)
def test_a_part_is_text_as_engines_see_it(part: dict[str, Any], alone: Alone | None) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [TEXT, part]}]}).encode()
    parsed = parse(Route.CHAT, body)
    assert parsed.alone is alone
    if parsed.has_media:
        assert MEDIUM < parsed.prompts[0].text_bytes < MEDIUM + len(body)


@pytest.mark.parametrize(
    ("fields", "alone", "written"),
    [
        (
            {"n": 1.0, "max_tokens": 4.0, "stream": 0},
            None,
            {"n": b"1", "max_tokens": b"4", "stream": b"false"},
        ),
        ({"min_tokens": 1.0, "stream": 1}, None, {"min_tokens": b"1", "stream": b"true"}),
        ({"n": 2.0}, Alone.N, {"n": b"2"}),
        ({"max_tokens": 0.0}, Alone.UNUSUAL, {"max_tokens": b"0"}),
        ({"max_tokens": 1.5}, Alone.UNUSUAL, {"max_tokens": b"1.5"}),
        ({"n": "1"}, Alone.UNUSUAL, {"n": b'"1"'}),
        ({"stream": 2}, Alone.UNUSUAL, {"stream": b"2"}),
        ({"n": 1e15}, Alone.UNUSUAL, {"n": b"1000000000000000.0"}),
    ],
)
def test_numbers_in_other_forms_are_what_engines_take_them_for(
    fields: dict[str, Any], alone: Alone | None, written: dict[str, bytes]
) -> None:
    found = parse(Route.COMPLETIONS, json.dumps({"prompt": "x", **fields}).encode())
    assert found.alone is alone
    assert {name: bytes(found.fields[name]) for name in written} == written
    if alone is None:
        assert found.stream is bool(fields["stream"])


@given(st.text(min_size=1))
def test_the_size_of_a_text_is_never_underestimated(text: str) -> None:
    """A prompt's `text_bytes` bounds its UTF-8 size, however it was escaped."""
    for ascii_only in (True, False):
        body = json.dumps({"prompt": text}, ensure_ascii=ascii_only)
        try:
            raw = body.encode()
            size = len(text.encode())
        except UnicodeEncodeError:
            continue
        assert parse(Route.COMPLETIONS, raw).prompts[0].text_bytes >= size


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=50))
def test_token_ids_are_counted_exactly(ids: list[int]) -> None:
    """The length of an array of ids is known without making it a list."""
    for body in (json.dumps({"prompt": ids}), json.dumps({"prompt": ids}, indent=1)):
        assert parse(Route.COMPLETIONS, body.encode()).prompts[0].tokens == len(ids)
