"""Params of both legs as vllm-omni's rules put them together: what is read, and what wins."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdproxy.transfer.mappings import NotAMappingError, as_mapping
from pdproxy.transfer.params import decode_params, prefill_params, until_length

TO_P = {"do_remote_decode": True, "do_remote_prefill": False}
TO_D = {"do_remote_decode": False, "do_remote_prefill": True}


@dataclass
class Params:
    transfer_id: str = "t"
    inner: dict[str, int] = field(default_factory=lambda: {"a": 1})


@dataclass(slots=True)
class SlotParams:
    transfer_id: str = "t"
    do_remote_decode: bool = True


class Struct(msgspec.Struct):
    transfer_id: str = "t"


class New:
    def model_dump(self) -> dict[str, str]:
        return {"transfer_id": "t"}


class Old:
    def dict(self) -> dict[str, str]:
        return {"transfer_id": "t"}


class Broken:
    def model_dump(self) -> None:
        raise ValueError


class Slots:
    __slots__ = ("transfer_id",)


class MappingLike:
    """Has items and keys, and is no Mapping."""

    def __iter__(self) -> Any:
        return iter(("transfer_id",))

    def keys(self) -> Any:
        return ("transfer_id",)

    def items(self) -> Any:
        return (("transfer_id", "t"),)

    def __getitem__(self, name: str) -> str:
        return "t"


# -- what can be read


@pytest.mark.parametrize(
    "value",
    [
        Struct(),
        New(),
        Old(),
        SimpleNamespace(transfer_id="t"),
        UserDict(transfer_id="t"),
        MappingLike(),
        [("transfer_id", "t")],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_describes_itself_is_read(value: object) -> None:
    assert as_mapping(value) == {"transfer_id": "t"}


def test_a_dataclass_is_read() -> None:
    """One level deep, as its fields stand."""
    given = Params()
    assert as_mapping(given) == {"transfer_id": "t", "inner": {"a": 1}}
    found = as_mapping(given)
    assert found is not None
    assert found["inner"] is given.inner


def test_a_dataclass_with_slots_is_read() -> None:
    """It has no attributes beside its fields."""
    assert as_mapping(SlotParams()) == {"transfer_id": "t", "do_remote_decode": True}


def test_a_dict_is_itself_and_none_is_none() -> None:
    given = {"a": 1}
    assert as_mapping(given) is given
    assert as_mapping(None) is None
    assert as_mapping({}) == {}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("text", "str"),
        (b"bytes", "bytes"),
        (7, "int"),
        (True, "bool"),
        ([], "list"),
        ([1, 2], "list"),
        (["ab", "cd"], "list"),
        ({1: 2}, "dict with names that are no text"),
        (Params, "type"),
        (Broken(), "Broken"),
        (Slots(), "Slots"),
        (object(), "object"),
    ],
)
def test_what_cant_be_read_is_an_error_that_says_its_type(value: object, kind: str) -> None:
    """Never an empty mapping in its place; texts of two letters are no pairs."""
    with pytest.raises(NotAMappingError) as caught:
        as_mapping(value)
    assert str(caught.value) == kind


# -- what P is told


def test_p_is_told_to_keep_the_kv() -> None:
    assert prefill_params("r") == {**TO_P, "transfer_id": "xfer-r"}


def test_the_one_token_ends_by_length() -> None:
    """No stop list of the client's ends P's token, whatever it is; the client's fields stay as they are."""
    fields = {"stop": msgspec.Raw(b'["x"]'), "stop_token_ids": msgspec.Raw(b"[5]"), "seed": msgspec.Raw(b"3")}
    before = dict(fields)
    found = {name: msgspec.json.decode(value) for name, value in until_length(fields).items()}
    assert found == {
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "min_tokens": 1,
        "seed": 3,
    }
    assert fields == before


# -- what D is told

KNOWN = ("r", "e", "http://p:8998")


def test_d_is_told_to_fetch_the_kv() -> None:
    named = {"transfer_id": "xfer-r", "remote_engine_id": "e", "remote_bootstrap_addr": "http://p:8998"}
    assert decode_params(*KNOWN) == {**TO_D, **named}


def test_p_s_answer_is_stronger_than_what_was_known() -> None:
    answered = {"remote_engine_id": "P", "remote_bootstrap_addr": "http://other:1", "more": 1, **TO_P}
    before = dict(answered)
    found = decode_params(*KNOWN, answered)
    named = {"transfer_id": "xfer-r", "remote_engine_id": "P", "remote_bootstrap_addr": "http://other:1", "more": 1}
    assert found == {**named, **TO_D}
    assert answered == before


@pytest.mark.parametrize("empty", [None, ""])
@pytest.mark.parametrize("name", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
def test_what_the_answer_leaves_empty_overrides_nothing(name: str, empty: object) -> None:
    """A decode engine without one of them waits for ever."""
    assert decode_params(*KNOWN, {name: empty}) == decode_params(*KNOWN)


def test_whose_transfer() -> None:
    assert decode_params(*KNOWN, {"transfer_id": "P"})["transfer_id"] == "P"
