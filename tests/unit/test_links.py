"""Messages between processes: whole, in order, bounded, whatever the other end sends."""

from __future__ import annotations

import os
import socket

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


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300_000)), max_size=30), st.booleans())
def test_each_socket_comes_with_its_message(sent: list[tuple[bool, int]], waits: bool) -> None:
    """Also where many messages wait until the other process reads."""
    one, other = _ends()
    names, found = [], []

    def take() -> None:
        for message in other.read():
            name = None
            if message.has_socket:
                with other.taken() as got:
                    name = got.getsockname()
            found.append((len(message.body), name))

    for has_socket, size in sent:
        message, name = Message("kind", body=bytes(size)), None
        if has_socket:
            own = socket.socket(socket.AF_INET)
            own.bind(("127.0.0.1", 0))
            name = own.getsockname()
            one.give(message, own)
            assert not waits or own.fileno() == -1 or one.unsent
        else:
            one.send(message)
        names.append((size, name))
        if not waits:
            take()
    while len(found) < len(sent):
        take()
        one.flush()
    assert found == names
    with pytest.raises(LinkError):
        other.taken()
    one.close()
    other.close()


def test_a_socket_that_can_not_be_given_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_MESSAGE", 100)
    one, other = _ends()
    for body in (bytes(101), b""):
        own, rest = pair()
        if not body:
            other.close()
        with pytest.raises(LinkError if not body else TooLongError):
            one.give(Message("kind", body=body), own)
        assert own.fileno() == -1
        rest.close()
    one.close()


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
