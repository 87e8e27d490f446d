"""`kv_transfer_params` of a KV store: what is taken, how a mistake is told, and keys that any
process makes alike.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.wire.kvparams import (
    FIELDS,
    KVParamsError,
    KVTransferParams,
    read,
    read_batch,
    store_keys,
)

KEYS = ("kvcache_load_keys", "kvcache_store_keys")


def params(*values: Any) -> KVTransferParams:
    """Params by their fields in order: ids, keys to load, keys to store."""
    return KVTransferParams(**dict(zip(FIELDS, values, strict=True)))


@pytest.mark.parametrize(
    "values",
    [
        (None, None, None),
        ([None], [None], [None]),
        ([], [], []),
        ([[]], [[]], [[]]),
        ([7, 8, 9], None, ["a"]),
        ([7, 8, 9], ["a", "b"], None),
        ([None, [7, 8]], [None, None], [None, ["a"]]),
        ([None, [7, 8]], [None, ["a"]], [None, None]),
        ([[7, 8, 9], [7, 8]], [["a", "b", "c"], ["a", "b"]], [None, None]),
        ([[7, 8], [9]], [["a"], None], [None, ["b"]]),
        ([7], ["more", "keys", "than", "ids"], None),
    ],
)
def test_shapes_that_are_taken(values: tuple[Any, ...]) -> None:
    """None, flat, or one list a request, at P and at D; keys and ids may differ in number. Read
    back, they are the same.
    """
    made = params(*values)
    assert tuple(made.as_dict().values()) == values
    assert read_batch(made.as_dict()) == made
    assert read_batch(made.as_json()) == made
    assert read_batch(made.as_json().decode()) == made


@pytest.mark.parametrize(
    "value",
    [
        7,
        "text",
        (7,),
        {"a": 1},
        [7, "x"],
        [7, None],
        [7, [8]],
        [[7, None]],
        [[7, "x"], [8]],
        [[[7]]],
        [1.0],
        [True],
        [None, [False]],
    ],
)
def test_ids_that_are_no_ids(value: Any) -> None:
    """Anything that is not whole numbers, flat or one list a request, is refused by name."""
    with pytest.raises(KVParamsError, match=r"^prefix_prompt_ids: expected a list of token ids"):
        params(value, None, None)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize(
    "value",
    [
        7,
        "text",
        ("a",),
        [7],
        ["a", 7],
        ["a", None],
        ["a", ["b"]],
        [["a", 7], ["b"]],
        [["a", None]],
        [[["a"]]],
        [b"a"],
    ],
)
def test_keys_that_are_no_keys(name: str, value: Any) -> None:
    """The same for keys, which are texts."""
    with pytest.raises(KVParamsError, match=f"^{name}: expected a list of texts"):
        KVTransferParams(**{name: value})


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [[None], [[]], [["a"], None], [[7]]])
def test_a_request_brings_flat_lists(name: str, value: Any) -> None:
    """What is nested belongs to several requests: one request that brings it is refused by name, as
    text or object.
    """
    for given_as in ({name: value}, json.dumps({name: value})):
        with pytest.raises(KVParamsError, match=f"^{name}: "):
            read(given_as)


def test_flat_and_nested_are_told_apart() -> None:
    """Only a list that holds lists or nulls is several requests'."""
    assert params([7], ["a"], None).is_flat
    assert params([], [], []).is_flat
    assert not params(None, None, [["a"]]).is_flat
    assert not params([None], None, None).is_flat


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "kv_transfer_params: not JSON"),
        (b"\xff", "kv_transfer_params: not JSON"),
        ("[" * 5000, "kv_transfer_params: not JSON"),
        ("", "kv_transfer_params: not JSON"),
        ("[7]", "kv_transfer_params: expected a JSON object, got list"),
        ("null", "kv_transfer_params: expected a JSON object, got null"),
        (12345, "kv_transfer_params: expected an object or its JSON text, got int"),
        (
            [("kvcache_load_keys", [])],
            "kv_transfer_params: expected an object or its JSON text, got list",
        ),
        ({"kvcache_keys": []}, "kvcache_keys: unknown field"),
        ('{"kvcache_keys": []}', "kvcache_keys: unknown field"),
    ],
)
def test_what_is_no_object_of_ours(value: Any, words: str) -> None:
    """The error says what it was, or which field is unknown; nothing is dropped in silence."""
    with pytest.raises(KVParamsError) as caught:
        read(value)
    assert str(caught.value).startswith(words)
    assert isinstance(caught.value, ValueError)


def test_none_is_none() -> None:
    """No params are no params, and no empty ones."""
    assert read(None) is None
    assert read({}) == KVTransferParams()


def test_nulls_are_written() -> None:
    """On the wire each field stands, as the pull request's proxy writes it: null where nothing is
    to be done.
    """
    made = KVTransferParams(prefix_prompt_ids=[7], kvcache_store_keys=["a"])
    assert json.loads(made.as_json()) == {
        "prefix_prompt_ids": [7],
        "kvcache_load_keys": None,
        "kvcache_store_keys": ["a"],
    }


ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)
keys = st.lists(st.text(max_size=8), max_size=5)
flat = st.fixed_dictionaries(
    {},
    optional={
        "prefix_prompt_ids": st.none() | ids,
        KEYS[0]: st.none() | keys,
        KEYS[1]: st.none() | keys,
    },
)


@given(flat)
def test_objects_and_texts_read_alike(value: dict[str, Any]) -> None:
    """A request's params are the same whether they came as an object or as its text, and come back
    as they went.
    """
    made = read(value)
    assert made is not None
    assert made == read(json.dumps(value)) == read(made.as_json()) == read(made.as_dict())
    assert {name: item for name, item in made.as_dict().items() if item is not None} == {
        name: item for name, item in value.items() if item is not None
    }


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(st.sampled_from(FIELDS), anything)
def test_a_wrong_value_is_told_by_its_field(name: str, value: Any) -> None:
    """Whatever a field holds, it is taken as it stands or refused by the field's name; never
    anything else.
    """
    made: KVTransferParams | None = None
    told = f"{name}: "
    try:
        made = read_batch({name: value})
    except KVParamsError as error:
        told = str(error)
    assert told.startswith(f"{name}: ")
    assert made is None or getattr(made, name) == value


@given(ids, ids, st.sampled_from(["", "m", "other"]))
def test_keys_are_the_tokens(one: list[int], other: list[int], scope: str) -> None:
    """The same ids have the same key, others others; so has another model."""
    assert store_keys(one, scope) == store_keys(tuple(one), scope)
    assert len(store_keys(one, scope)) == 1
    assert (store_keys(one, scope) == store_keys(other, scope)) == (one == other)
    assert store_keys(one, scope) != store_keys(one, scope + "x")


def test_a_scope_is_no_prefix_of_ids() -> None:
    """What a model's name and the ids spell together says nothing: four letters are not a token."""
    assert store_keys([0x61616161, 5], "") != store_keys([5], "aaaa")


def test_keys_are_those_of_every_process() -> None:
    """A key is fixed for good: P and D are asked by different workers of ours, and a store outlives
    us all.
    """
    assert store_keys([1, 2, 3], "m") == ["1cbfe4afce55e8638ff7703eb4f646db"]
    code = "from pdproxy.wire.kvparams import store_keys; print(store_keys([1, 2, 3], 'm')[0])"
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == "1cbfe4afce55e8638ff7703eb4f646db"


@pytest.mark.parametrize("wrong", [[-1], [2**32], ["7"], [1.5], [None]])
def test_ids_that_no_tokenizer_has(wrong: list[Any]) -> None:
    """An id that doesn't fit is an error, and no other prompt's key."""
    with pytest.raises(KVParamsError, match="prefix_prompt_ids"):
        store_keys(wrong)
