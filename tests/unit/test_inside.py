"""No client sees a handle, or a field that names engines; all else of an answer keeps its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.wire import inside
from pdproxy.wire.event_template import EventTemplates
from tests.fakes import answers

HANDLE = b'{"do_remote_decode":true,"remote_block_ids":[[1,2]],"x":"}"}'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.parametrize("space", [b"", b" "])
def test_a_handle_becomes_null(space: bytes) -> None:
    body = (
        b'{"choices":[{"text":"\\"kv_transfer_params\\":{}"}],"kv_transfer_params":%b%b,'
        b'"metrics":null}'
    )
    assert inside.without_inside(body % (space, HANDLE)) == (body % (space, b"null"), HANDLE)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[],"kv_transfer_params":null,"ec_transfer_params":null}',
        b'{"choices":[],"kv_transfer_params": null}',
        b'{"choices":[]}',
        b'{"kv_transfer_params":{"a"',
        b'"kv_transfer_params":',
        b"",
        b"[DONE]",
        b"\xff",
        b'{"choices":[{"text":"\\"remote_host\\":\\"10.0.0.1\\", http://10.0.0.1:8000"}]}',
        (
            b'{"choices":[],"timings":{"queue_s":0.1},"note":"the engine at http://10.0.0.1 is a '
            b'transfer of hosts"}'
        ),
    ],
)
def test_anything_else_stays(body: bytes) -> None:
    assert inside.without_inside(body) == (body, None)


@given(JSON, st.dictionaries(st.text(max_size=5), JSON, min_size=1, max_size=4), JSON)
def test_any_answer_keeps_its_other_bytes(choices: Any, params: Any, usage: Any) -> None:
    make = {"choices": choices, "kv_transfer_params": params, "usage": usage}
    text = json.dumps(make, separators=(",", ":")).encode()
    body, found = inside.without_inside(text)
    assert json.loads(body) == make | {"kv_transfer_params": None}
    assert found is not None
    assert json.loads(found) == params
    assert len(body) == len(text) - len(found) + 4


@pytest.mark.parametrize(
    "field",
    [
        b'"ec_transfer_params":{"a":1}',
        b'"mm_transfer_params":[1]',
        b'"kv_transfer_params_v2":"x"',
        b'"kv\\u005ftransfer\\u005fparams":{"a":1}',
        b'"engine_id":"e-1"',
        b'"remote_host":"p1"',
        b'"served_by":"http://10.0.0.1:8000"',
        b'"served_by":"10.0.0.1:8000"',
        b'"nixl":{"agent":{"Host":"p1"}}',
        b'"blocks":[{"block_ids":[1]}]',
        b'"data_parallel_rank":3',
    ],
)
def test_a_field_that_does_not_exist_yet_is_hidden_if_it_names_the_inside(field: bytes) -> None:
    body = b'{"id":"1","choices":[],%b,"usage":null}'
    found, _ = inside.without_inside(body % field)
    name = json.loads(b"{%b}" % field).popitem()[0]
    assert json.loads(found) == {"id": "1", "choices": [], name: None, "usage": None}


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":%b,"choices":[],"kv_transfer_params":null}',
        b'{"kv_transfer_params":%b,"choices":[],"kv_transfer_params":{"a":1}}',
        b'{"choices":[{"index":0,"text":"a","kv_transfer_params":%b}]}',
        b'{"choices":[{"index":0,"text":"a","kept":%b}],"kv_transfer_params":null}',
        b'{"choices":[{"index":0,"text":"a"}],"kv_transfer_params":%b}',
    ],
)
def test_a_handle_is_removed_wherever_it_is(body: bytes) -> None:
    found, _ = inside.without_inside(body % HANDLE)
    assert b"remote" not in found
    assert json.loads(found)["choices"] is not None


def test_a_handle_of_an_answer_with_many_fields_is_removed_without_making_objects_of_them() -> None:
    many = b",".join([b'"a":1'] * (inside._MAX_KEYS + 1))
    body = b'{"choices":[{%b}],"kv_transfer_params":%b}' % (many, HANDLE)
    assert inside.without_inside(body) == (body.replace(HANDLE, b"null"), HANDLE)


def test_events_keep_their_bytes_but_for_the_handle() -> None:
    plain, last = answers.piece(True, "a"), answers.piece(True, "b", finish="stop")
    with_handle = last.replace(b"]}\n\n", b'],"kv_transfer_params":%b}\n\n' % HANDLE)
    batch = b": a comment\n\n" + plain + with_handle + answers.DONE
    assert inside.may_hide(batch)
    assert inside.batch_without_inside(batch) == (batch.replace(HANDLE, b"null"), HANDLE)
    clean = batch.replace(HANDLE, b"null")
    assert not inside.may_hide(clean)
    assert inside.batch_without_inside(clean)[0] is clean


@pytest.mark.parametrize("behind", [b"", answers.DONE])
def test_whole_events_are_read_by_one_call_of_the_parser(
    behind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the end mark behind them. One with a field that names the inside is found among
    them.
    """
    events = [answers.piece(True, "a")] * 9
    seen: list[bytes] = []

    class Decoder:
        def decode(self, json: bytes) -> object:
            seen.append(json)
            return known.decode(json)

    known = inside._plain_list
    monkeypatch.setattr(inside, "_plain_list", Decoder())
    monkeypatch.setattr(inside, "_plain", None)  # nothing is read one by one
    batch = b"".join(events) + behind
    assert inside.batch_without_inside(batch) == (batch, None)
    assert len(seen) == 1
    monkeypatch.undo()
    events[4] = events[4].replace(b'"choices"', b'"engine_id":"a","choices"')
    batch = b"".join(events) + behind
    shown, _ = inside.batch_without_inside(batch)
    assert shown == batch.replace(b'"engine_id":"a"', b'"engine_id":null')


@pytest.mark.parametrize("takes_ids", [False, True])
@pytest.mark.parametrize(
    "field", [b'"kv_transfer_params":%b' % HANDLE, b'"engine_id":"a"', b'"at":"http://p1:8000"']
)
def test_an_event_with_such_a_field_is_never_plain(takes_ids: bool, field: bytes) -> None:
    event = answers.piece(False, "a").replace(
        b'"token_ids":null', b'"token_ids":[1]' if takes_ids else b'"token_ids":null'
    )
    assert EventTemplates().learn(event, takes_ids=takes_ids) is not None
    for changed in (
        event.replace(b"]}\n\n", b"],%b}\n\n" % field),
        event.replace(b'"choices"', b'%b,"choices"' % field),
    ):
        assert EventTemplates().learn(changed, takes_ids=takes_ids) is None


def test_of_a_passed_route_only_the_top_and_the_response_are_looked_at() -> None:
    """Inputs of tools are the model's own objects, and schemas of tools the client's."""
    tool = (
        b'{"type":"message","content":[{"type":"tool_use","input":{"remote_host":"a",'
        b'"kv_transfer_params":{"b":1}}}]%b}'
    )
    assert inside.passed_without_inside(tool % b"") == tool % b""
    with_handle = tool % (b',"kv_transfer_params":%b' % HANDLE)
    assert inside.passed_without_inside(with_handle) == tool % b',"kv_transfer_params":null'
    event = (
        b"event: response.completed\ndata: "
        b'{"response":{"id":"1","kv_transfer_params":%b},"sequence_number":3}\n\n'
    )
    assert inside.passed_events_without_inside(event % HANDLE) == event % b"null"
    assert inside.passed_events_without_inside(event % b"null") == event % b"null"


def test_a_failure_shows_no_address_and_a_refusal_only_the_clients() -> None:
    body = (
        b'{"error":{"message":"no KV from tcp://10.1.2.3:5600 (10.1.2.3:5600) for '
        b'http://p1:8000/x","code":500}}'
    )
    shown = inside.error_without_inside(body, 500)
    assert (
        shown
        == b'{"error":{"message":"no KV from an address (an address) for an address","code":500}}'
    )
    assert inside.error_without_inside(body, 400) == body
    hidden = inside.error_without_inside(body, 400, ["http://p1:8000", "http://p2:8000"])
    assert hidden == body.replace(b"http://p1:8000", b"an engine")
    handle = b'{"error":{"message":"a","kv_transfer_params":%b}}' % HANDLE
    assert json.loads(inside.error_without_inside(handle, 500))["error"] == {
        "message": "a",
        "kv_transfer_params": None,
    }
