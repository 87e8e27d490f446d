"""The body of a leg: its bytes are the same whether its long fields are copied or not."""

from __future__ import annotations

import json

import msgspec
import pytest

from pdproxy.wire.fields import Fields
from pdproxy.wire.sent_body import LONG, SentBody, joined, params_with_ids, sent_body

TEXT = json.dumps("word \u00e9 " * LONG).encode()
IDS = b"[%b1]" % (b"7," * LONG)


def fields(*values: tuple[str, bytes]) -> Fields:
    return {name: msgspec.Raw(value) for name, value in values}


def parts_of(body: SentBody) -> tuple[memoryview, ...]:
    assert isinstance(body, tuple)
    return body


PARAMS = ("kv_transfer_params", b'{"remote_block_ids":[[1]],"remote_host":"h"}')
CASES = {
    "one long field": fields(("model", b'"m"'), ("prompt", TEXT), ("stream", b"true")),
    "it is the first": fields(("prompt", TEXT), ("model", b'"m"')),
    "two beside each other": fields(("messages", TEXT), ("tools", TEXT)),
    "none": fields(("model", b'"m"'), ("prompt", b'"short"')),
    "a name with every kind of letter": fields(('\u00ff"\\\n', TEXT)),
    "a handle in front": fields(PARAMS, ("messages", TEXT)),
    "a handle behind": fields(("messages", TEXT), PARAMS),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("size", [0, LONG], ids=["small", "large"])
def test_the_bytes_of_a_body(case: Fields, size: int) -> None:
    """They are those of the fields, one after the other; long ones are not copied."""
    body = sent_body(case, size)
    assert joined(body) == msgspec.json.encode(case)
    if size:
        parts = parts_of(body)
        copied = sum(len(part) for part in parts if isinstance(part.obj, bytes))
        assert copied < LONG, "a long field was copied"
    else:
        assert isinstance(body, bytes)


@pytest.mark.parametrize("ids", [IDS, b"[1,2]"], ids=["many", "few"])
@pytest.mark.parametrize("size", [0, LONG], ids=["small", "large"])
@pytest.mark.parametrize("name", ["a handle in front", "a handle behind"])
def test_ids_are_the_last_field_of_the_handle(name: str, size: int, ids: bytes) -> None:
    """In both forms, and without a copy in the large one."""
    case = CASES[name]
    given = params_with_ids(PARAMS[1], ids)
    body = sent_body(case, size, ids)
    expected = msgspec.json.encode(case | {"kv_transfer_params": msgspec.Raw(given)})
    assert joined(body) == expected
    assert json.loads(expected)["kv_transfer_params"]["prompt_token_ids"] == json.loads(ids)
    if size:
        assert any(part.obj is ids for part in parts_of(body))


@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
def test_an_engine_that_sends_no_utf_8(ids: bytes | None) -> None:
    """The byte in the place of a long field may be in a handle: then all is copied."""
    odd = fields(("messages", TEXT), ("kv_transfer_params", b'{"remote_host":"\xff"}'))
    body = sent_body(odd, LONG, ids)
    params = bytes(odd["kv_transfer_params"])
    given = params if ids is None else params_with_ids(params, ids)
    assert body == msgspec.json.encode(odd | {"kv_transfer_params": msgspec.Raw(given)})
