"""Objects of files and of other programs that are read as mappings."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdproxy.settings.external_file import NotAMappingError, as_mapping


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
