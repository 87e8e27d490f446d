"""Messages between processes: whole, in order, bounded, whatever the other end sends."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.workers import links
from pdproxy.workers.links import Link, LinkError, Message, TooLongError, pair


def _ends() -> tuple[Link, Link]:
    one, other = pair()
    return Link(one), Link(other)


def _all(link: Link, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += link.read()
    return found


@given(st.lists(st.binary(max_size=3000), max_size=20))
def test_messages_come_whole_and_in_order(bodies: list[bytes]) -> None:
    one, other = _ends()
    sent = [Message("kind", number, -number, body) for number, body in enumerate(bodies)]
    for message in sent:
        one.send(message)
    assert _all(other, len(sent)) == sent
    assert other.read() == []
    one.close()
    other.close()


def test_a_large_message_comes_in_parts() -> None:
    one, other = _ends()
    body = os.urandom(3 << 20)
    one.send(Message("page", body=body))
    assert one.unsent
    found: list[Message] = []
    while not found:
        found += other.read()
        one.flush()
    assert found == [Message("page", body=body)]
    assert not one.unsent
    one.close()
    other.close()


def test_one_that_does_not_read_is_no_longer_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_UNSENT", 1 << 20)
    one, other = _ends()
    page = Message("page", body=bytes(100_000))
    one.send(page)
    while len(one._unsent) <= (1 << 20) - 100_100:
        one.send(page)
    with pytest.raises(LinkError, match="not read"):
        one.send(page)
    one.close()
    other.close()


def test_a_message_that_is_too_long_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of more engines than anybody thought of would otherwise end the worker that makes it,
    again and again.
    """
    monkeypatch.setattr(links, "MAX_MESSAGE", 1000)
    one, other = _ends()
    with pytest.raises(TooLongError, match="'page' of 1"):
        one.send(Message("page", body=bytes(1000)))
    one.send(Message("page", body=b"x"))
    assert _all(other, 1) == [Message("page", body=b"x")]
    one.close()
    other.close()


def test_the_end_of_the_other_process_is_seen() -> None:
    one, other = _ends()
    other.close()
    with pytest.raises(LinkError):
        one.read()
    with pytest.raises(LinkError):
        one.send(Message("late"))
    one.close()


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", b"\0\0\0\3abc", b"\0\0\0\1\x90", b"\0\0\0\0"]
)
def test_what_is_no_message_is_refused(garbage: bytes) -> None:
    one, other = pair()
    one.sendall(garbage)
    with pytest.raises(LinkError):
        Link(other).read()
    one.close()
    other.close()
