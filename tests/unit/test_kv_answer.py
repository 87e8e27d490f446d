"""No client sees a handle, and nothing else of an answer changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.wire.kv_answer import without_handle

HANDLE = b'{"do_remote_decode":true,"remote_block_ids":[[1,2]],"x":"}"}'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize("space", [b"", b" "])
def test_a_handle_becomes_null(space):
    body = b'{"choices":[{"text":"\\"kv_transfer_params\\":{}"}],"kv_transfer_params":%b%b,"metrics":null}'
    assert without_handle(body % (space, HANDLE)) == (body % (space, b"null"), HANDLE)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[],"kv_transfer_params":null}',
        b'{"choices":[],"kv_transfer_params": null}',
        b'{"choices":[]}',
        b'{"kv_transfer_params":{"a"',
        b'"kv_transfer_params":',
        b"",
        b"\xff",
        b'{"choices":{"kv_transfer_params":{"a":1}}}',
    ],
)
def test_anything_else_stays(body):
    assert without_handle(body) == (body, None)


@given(JSON, st.dictionaries(st.text(max_size=5), JSON, min_size=1, max_size=4), JSON)
def test_any_answer_keeps_its_other_bytes(before, params, after):
    make = {"before": before, "kv_transfer_params": params, "usage": after}
    text = json.dumps(make, separators=(",", ":")).encode()
    body, found = without_handle(text)
    assert json.loads(body) == make | {"kv_transfer_params": None}
    assert found is not None
    assert json.loads(found) == params
    assert len(body) == len(text) - len(found) + 4
