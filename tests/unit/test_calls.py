"""Calls of methods as items of a link: the annotations of a method are the types on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pdproxy.workers.calls import CALLS, Answer, asked, decoder, encode_item, methods_of, told


class Target:
    """What is called, with the calls that came."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    @told
    def note(self, name: str, *, is_first: bool, at: float = 1.0) -> None:
        """Take a note."""
        self.calls.append((name, at, is_first))

    @told
    def names(self, number: int, names: Sequence[str]) -> None:
        """Take names."""
        self.calls.append((number, names))

    @asked
    def size(self, number: int, name: str) -> Answer[int]:
        """Return the size of a name."""
        return len(name)

    @asked
    def later(self, number: int) -> Answer[bool]:
        """Return something later."""
        return self._later()

    async def _later(self) -> bool:
        await asyncio.sleep(0)
        return True


def sent(*items: msgspec.Struct) -> list[Any]:
    """What comes of items."""
    listed = b"\xdd" + len(items).to_bytes(4, "big")
    return [*decoder()(listed + b"".join(map(encode_item, items)))]


def test_a_call_is_done_as_it_was_made() -> None:
    target = Target()
    runs = {method.types[0]: method.runs(target) for method in methods_of(Target)}
    calls = [
        CALLS[Target.note](0, "a", is_first=True),
        CALLS[Target.note](0, name="b", at=2.0, is_first=False),
        CALLS[Target.names](3, 7, ["c"]),
    ]
    found = sent(*calls)
    assert found == calls
    for item in found:
        runs[type(item)](item)
    assert target.calls == [("a", 1.0, True), ("b", 2.0, False), (7, ["c"])]


async def test_an_answer_has_the_type_that_the_method_says() -> None:
    target = Target()
    replies = {method.name: method.reply for method in methods_of(Target)}
    (size,) = sent(CALLS[Target.size](0, 5, "four"))
    (run,) = [one.runs(target) for one in methods_of(Target) if one.name == "size"]
    assert replies["size"] is not None
    (reply,) = sent(replies["size"](size.number, run(size)))
    assert (reply.number, reply.value) == (5, 4)
    assert replies["note"] is None
    assert replies["later"] is not None
    with pytest.raises(msgspec.ValidationError, match="Expected `bool`"):
        sent(replies["later"](1, 7))
    assert await target.later(1) is True  # type: ignore[misc]


@pytest.mark.parametrize(
    "item",
    [
        b"\x94\xabTarget.note\x00\x01\xc3",  # a number for a name
        b"\x92\xabTarget.note\x00",  # nothing else
        b"\x93\xacTarget.steal\x00\x01",  # no such method
        b"\x94\xabTarget.note\xa1x\xa1y\xc3",  # a text for the number of the object
    ],
)
def test_what_is_no_call_is_refused(item: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decoder()(b"\x91" + item)
