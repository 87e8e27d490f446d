"""Params of both legs as vllm-omni's rules put them together: what wins, what is read, what is held."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdproxy.transfer.mappings import NotAMappingError, as_mapping
from pdproxy.transfer.params import Held, decode_params, first, prefill_params, until_length

TO_P = {"do_remote_decode": True, "do_remote_prefill": False}
TO_D = {"do_remote_decode": False, "do_remote_prefill": True}


@dataclass
class Params:
    transfer_id: str = "t"
    inner: dict[str, int] = field(default_factory=lambda: {"a": 1})


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


@pytest.mark.parametrize(
    "given",
    [{"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "x", "more": 1}, SimpleNamespace(more=1)],
)
def test_nobody_overrides_what_p_is_for(given: object) -> None:
    """What was given stays, save for the flags and the transfer's name; and is not changed itself."""
    before = dict(given) if isinstance(given, dict) else None
    assert prefill_params("r", given) == {"more": 1, **TO_P, "transfer_id": "xfer-r"}
    if before is not None:
        assert given == before


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


def test_d_is_told_to_fetch_the_kv() -> None:
    assert decode_params("r") == {**TO_D, "transfer_id": "xfer-r"}


def test_p_s_answer_is_stronger_than_what_was_given() -> None:
    given, answered = {"a": "given", "b": "given", **TO_P}, {"b": "P", "remote_request_id": "i", **TO_P}
    found = decode_params("r", given, answered)
    assert found == {"a": "given", "b": "P", "remote_request_id": "i", "transfer_id": "xfer-r", **TO_D}
    assert (given["b"], answered["b"], answered["do_remote_prefill"]) == ("given", "P", False)


@pytest.mark.parametrize(
    ("given", "answered", "expected"),
    [
        (None, None, "settings"),
        ({"remote_bootstrap_addr": "given"}, None, "given"),
        (None, {"remote_bootstrap_addr": "P"}, "P"),
        ({"remote_bootstrap_addr": "given"}, {"remote_bootstrap_addr": "P"}, "P"),
    ],
)
def test_whose_bootstrap_address(given: object, answered: object, expected: str) -> None:
    """The settings fill in what nobody said."""
    assert decode_params("r", given, answered, "settings")["remote_bootstrap_addr"] == expected


def test_no_bootstrap_address_is_none_at_all() -> None:
    assert "remote_bootstrap_addr" not in decode_params("r", {}, {})


@pytest.mark.parametrize(
    ("given", "answered", "expected"),
    [
        ({"transfer_id": "given"}, None, "given"),
        ({"transfer_id": "given"}, Params(transfer_id="P"), "P"),
        ({"transfer_id": ""}, None, "xfer-r"),
        (None, {"transfer_id": None}, "xfer-r"),
    ],
)
def test_whose_transfer(given: object, answered: object, expected: str) -> None:
    """A name by nothing is no name."""
    assert decode_params("r", given, answered)["transfer_id"] == expected


@pytest.mark.parametrize("make", [prefill_params, decode_params])
def test_unreadable_params_are_not_left_out(make: Any) -> None:
    with pytest.raises(NotAMappingError, match="str"):
        make("r", "text")


def test_an_unreadable_answer_is_not_left_out() -> None:
    with pytest.raises(NotAMappingError, match="int"):
        decode_params("r", None, 5)


# -- what came back


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([], None),
        ([None, None], None),
        ([None, {"a": 1}, {"a": 2}], {"a": 1}),
        ([Struct()], {"transfer_id": "t"}),
        ([{}], {}),
    ],
)
def test_the_first_answer_that_says_anything(outputs: list[object], expected: object) -> None:
    assert first(outputs) == expected


def test_the_first_answer_must_be_readable() -> None:
    with pytest.raises(NotAMappingError):
        first([None, "text", {"a": 1}])


# -- what is held


def test_what_is_held_is_had_once() -> None:
    held = Held()
    held.hold("r", {"a": 1})
    assert "r" in held
    assert held.pop("r") == {"a": 1}
    assert held.pop("r") is None
    assert len(held) == 0


def test_a_fallback_is_newer_than_what_is_held() -> None:
    """It wins, and what is held is gone with it; where it says nothing, or there is nothing else, it falls back."""
    held = Held()
    held.hold("r", {"a": "held"})
    assert held.pop("r", {"a": "answer"}) == {"a": "answer"}
    assert "r" not in held
    held.hold("r", {"a": "held"})
    assert held.pop("r", None) == {"a": "held"}
    assert held.pop("r", Struct()) == {"transfer_id": "t"}


def test_an_unreadable_fallback_leaves_nothing_behind() -> None:
    held = Held()
    held.hold("r", {"a": 1})
    with pytest.raises(NotAMappingError):
        held.pop("r", "text")
    assert len(held) == 0


def test_what_is_dropped_is_gone() -> None:
    held = Held()
    held.hold("r", {"a": 1})
    held.drop("r")
    held.drop("r")
    held.drop("never")
    assert held.pop("r") is None


def test_nothing_is_held_for_no_answer() -> None:
    held = Held()
    held.hold("r", None)
    assert "r" not in held
    with pytest.raises(NotAMappingError):
        held.hold("r", 7)


def test_a_later_answer_takes_the_place_of_the_first() -> None:
    held = Held(max_requests=2)
    held.hold("r", {"a": 1})
    held.hold("s", {})
    held.hold("r", {"a": 2})
    held.hold("t", {})
    assert ("r" in held, "s" in held, "t" in held) == (True, False, True), (
        "the oldest answer is forgotten, not the oldest name"
    )
    assert held.pop("r") == {"a": 2}


def test_what_nobody_drops_is_forgotten() -> None:
    held = Held(max_requests=3)
    for n in range(10):
        held.hold(f"r{n}", {"n": n})
    assert len(held) == 3
    assert held.pop("r6") is None
    assert held.pop("r7") == {"n": 7}
