"""The client of a request, by key, address and trusted proxies; and how it is noticed that a client
reads too slowly.
"""

from __future__ import annotations

import asyncio
import gc
from ipaddress import ip_network
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import UnauthorizedError
from pdproxy.observe.events import DeadlinePassed, Event, Evicted, Observers
from pdproxy.serving.access import clients
from pdproxy.serving.access.clients import Client, Clients, address_name
from pdproxy.serving.access.keys import Keys, ValidKey, digest
from pdproxy.web import slow_readers
from pdproxy.web.client_identifier import ClientIdentifier
from pdproxy.web.slow_readers import ReadWatch, SlowReaderPolicy
from tests.fakes.recorder import Recorder

TRUSTING = Clients([ip_network("10.0.0.0/8"), ip_network("fd00::/8")])


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::ffff:c000:201", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_address_names_a_client(address: str, name: str) -> None:
    """An IPv6 client may use any address of its network; an IPv4 one in an IPv6 address is the same
    client.
    """
    assert address_name(address) == name


@pytest.mark.parametrize(
    ("hops", "name"),
    [
        ([b"192.0.2.1"], "192.0.2.1"),
        ([b"6.6.6.6, 192.0.2.1"], "192.0.2.1"),
        ([b"6.6.6.6", b"192.0.2.1, 10.0.0.2"], "192.0.2.1"),
        ([b"192.0.2.1:4711"], "192.0.2.1"),
        ([b"[2001:db8::1]:4711"], "2001:db8::/64"),
        ([b'"192.0.2.1"'], "192.0.2.1"),
        ([b"6.6.6.6, unknown"], "proxy"),
        ([b"6.6.6.6, "], "proxy"),
        ([b"10.0.0.1, 10.0.0.2"], "proxy"),
        ([], "proxy"),
        ([b"192.0.2.1, ::ffff:10.0.0.2"], "192.0.2.1"),
        ([b"::ffff:192.0.2.1, [::ffff:a00:2]:80"], "192.0.2.1"),
        ([b"6.6.6.6, [::1].evil"], "proxy"),
        ([b"1.1.1.1," * 10_000 + b" 192.0.2.1"], "192.0.2.1"),
        ([b"\xff\xfe"], "proxy"),
    ],
)
def test_the_last_address_that_no_trusted_proxy_has(hops: list[bytes], name: str) -> None:
    """Whatever stands before it, or cannot be read, is nobody's: then the proxy itself is the
    client.
    """
    assert TRUSTING.name_behind("proxy", hops) == name


@given(st.lists(st.binary(max_size=2000), max_size=4))
def test_any_bytes_name_somebody(hops: list[bytes]) -> None:
    """No header makes it fail, and no name is longer than an address."""
    assert len(TRUSTING.name_behind("proxy", hops)) <= 64


def test_who_is_trusted() -> None:
    """Addresses in the networks, of either family; nobody, where none are named."""
    assert TRUSTING.trusts("10.1.2.3")
    assert TRUSTING.trusts("fd00::1")
    assert TRUSTING.trusts("::ffff:10.1.2.3"), "so a socket that listens on :: shows it"
    assert not TRUSTING.trusts("::ffff:192.0.2.1")
    assert not TRUSTING.trusts("192.0.2.1")
    assert not TRUSTING.trusts("")
    assert not Clients().trusts("10.1.2.3")


def test_a_client_without_a_key_is_freed_by_reference_counts() -> None:
    """Why it is refused holds no frames: anybody may send such requests."""
    keys = Keys(lambda: {digest(b"key"): ValidKey(name="file:1", digest=digest(b"key"))})
    identify, peer = ClientIdentifier(Clients(), keys), Client("peer")
    gc.collect()
    gc.disable()
    try:
        for headers in ([], [(b"authorization", b"Bearer another")]):
            error = identify(peer, headers, "/v1/completions", peer_is_trusted=False).error
            assert isinstance(error, UnauthorizedError)
            del error
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_clients_are_known_while_they_are_used() -> None:
    """The same name is the same client until its last use has ended."""
    known = Clients()
    one, again, other = known.enter("a"), known.enter("a"), known.enter(b"a")
    assert one is again
    assert one is not other, "a key is no address"
    known.leave(one)
    assert known.enter("a") is one
    for client in (one, one, other):
        known.leave(client)
    assert len(known) == 0
    assert str(clients.Client("x").name) not in repr(one), "a name may be of a key"


class Socket:
    """A transport whose client reads as the test sets it."""

    def __init__(self) -> None:
        self.left, self.aborted = 1, False

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.aborted = True


async def looked(
    monkeypatch: pytest.MonkeyPatch,
    taken: list[int | None],
    left: list[int],
    *,
    rate: int = 100,
    crowd: bool = False,
) -> tuple[Socket, list[Event], Clients, bool]:
    """Look at a client once for each number that the system gives; `left`: what waits to be sent at
    each look.
    """
    heard = Recorder()
    numbers, sock, known = iter(taken), Socket(), Clients()
    monkeypatch.setattr(slow_readers, "bytes_taken", lambda _: next(numbers))
    caught_up = asyncio.Event()
    policy = SlowReaderPolicy(rate, 1.2, Clock(), known, Observers([heard]), lambda _: crowd)
    client: Client = known.enter("a")
    one = ReadWatch(policy, client, sock, caught_up.set)  # type: ignore[arg-type]
    for waiting in left:
        sock.left = waiting
        one._timer.cancel()
        one._measure()
        if sock.aborted or caught_up.is_set():
            break
    over = not known.with_slow
    one.stop()
    return sock, heard.events, known, over or caught_up.is_set()


async def test_a_client_that_reads_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 bytes per second are 10 in each look: it is never called slow."""
    sock, events, _, over = await looked(monkeypatch, [0, 10, 20, 30], [5, 5, 5])
    assert (sock.aborted, events, over) == (False, [], True)


async def test_a_client_that_reads_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noted from the first look on, and no more once it reads again."""
    sock, events, _, over = await looked(monkeypatch, [0, 9, 18], [5, 5])
    assert (sock.aborted, events, over) == (False, [], False)
    *_, over = await looked(monkeypatch, [0, 9, 19], [5, 5])
    assert over


async def test_it_goes_where_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look that finds it slow."""
    sock, events, known, _ = await looked(monkeypatch, [0, 9], [5], crowd=True)
    assert (sock.aborted, events, known.with_slow) == (True, [Evicted("reader")], {})


@pytest.mark.parametrize(
    ("steps", "dropped"),
    [
        ([0] * 12, True),
        ([0] * 11, False),
        ([0] * 6 + [119] + [0] * 5, True),
        ([0] * 6 + [120] + [0] * 5, False),
        ([0, 120] + [0] * 11, False),
        ([0, 120] + [0] * 12, True),
        ([9] * 12, True),
        ([10] * 30, False),
    ],
)
async def test_it_goes_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, steps: list[int], dropped: bool
) -> None:
    """Where nobody else waits: by what it has read in the last twelve looks together.

    Its system takes bytes in steps: one of them makes no fast reader.
    """
    sock, events, known, _ = await looked(
        monkeypatch, list(accumulate(steps, initial=0)), [5] * len(steps)
    )
    assert sock.aborted is dropped
    assert events == ([DeadlinePassed("client_write")] if dropped else [])
    assert not (dropped and known.with_slow)


@pytest.mark.parametrize(("left", "dropped"), [([5] * 12, True), ([5] * 5 + [4] * 7, False)])
async def test_where_the_system_does_not_say_any_progress_will_do(
    monkeypatch: pytest.MonkeyPatch, left: list[int], dropped: bool
) -> None:
    """Of the admin API's socket, for one."""
    sock, *_ = await looked(monkeypatch, [None] * 13, left)
    assert sock.aborted is dropped


async def test_who_has_caught_up_is_looked_at_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to be sent: how much it has read does not matter."""
    sock, events, _, over = await looked(monkeypatch, [0, 0], [0])
    assert (sock.aborted, events, over) == (False, [], True)


@pytest.mark.parametrize(("left", "slow"), [([5], True), ([5, 5], True), ([5, 4], False)])
async def test_where_the_system_does_not_say(
    monkeypatch: pytest.MonkeyPatch, left: list[int], slow: bool
) -> None:
    """Any progress counts: less is left than before."""
    *_, over = await looked(monkeypatch, [None, None, None], left)
    assert over is not slow
