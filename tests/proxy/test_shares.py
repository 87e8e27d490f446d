"""Shares of what all clients use (places, memory for bodies, connections) apply only while others
wait.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from pdproxy.observe.events import RequestEnded
from pdproxy.settings.schema import Settings
from pdproxy.web.connections import MAX_LEAVING, MAX_SEARCHED
from tests.fakes import answers, scripts
from tests.fakes.client import Client, request
from tests.fakes.clock import ManualClock, later_turns
from tests.fakes.engine import prefill
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world

pytestmark = pytest.mark.timeout(120, method="thread")  # uvloop's own loop does not end by a signal

GREEDY, OTHER, THIRD = (
    [("authorization", f"Bearer {name}")] for name in ("greedy", "other", "third")
)
KEYS = {"api_keys": ("greedy", "other", "third")}
EVENT = b'data: {"id":"x","choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n' % (
    b"a" * 1500
)


async def begun(
    w: World, ident: str, headers: Sequence[tuple[str, str]], path: str = COMPLETIONS, **fields: Any
) -> Client:
    """A request that has entered: it has a place, or waits for one."""
    await w.told()  # of requests that have just ended
    before = w.inflight + w.waiting
    client = await w.client()
    client.post(path, completion(**fields), [*headers, ("x-request-id", ident)])
    await until(lambda: w.inflight + w.waiting == before + 1)
    return client


# -- places


async def test_a_free_place_goes_to_the_client_with_the_fewest() -> None:
    """Of three clients that wait, none is served twice before the others are served once; each
    one's own are in order.
    """
    async with world(auth=KEYS, limits={"max_inflight": 1}) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        clients = [await begun(w, f"greedy{number}", GREEDY) for number in range(4)]
        clients += [await begun(w, f"other{number}", OTHER) for number in range(2)]
        clients += [await begun(w, "third0", THIRD)]
        go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 7
        served = [one.ident for one in w.prefill[0].requests]
        assert served == ["greedy0", "greedy1", "other0", "third0", "greedy2", "other1", "greedy3"]


async def test_a_full_queue_has_room_for_a_client_with_less_in_it() -> None:
    """The newest request of the client with the most in the queue gives way, until both have as
    many.
    """
    async with world(auth=KEYS, limits={"max_inflight": 1, "max_queue": 3}) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        greedy = [await begun(w, f"greedy{number}", GREEDY) for number in range(4)]
        first = await w.client()
        first.post(COMPLETIONS, completion(), OTHER)
        answer = await greedy[3].answer()
        assert (answer.status, answer.header("retry-after")) == (429, "1")
        assert answer.json["error"]["reason"] == "share"
        assert (await w.ask(COMPLETIONS, completion(), GREEDY)).status == 503, (
            "its own request may not take another's place"
        )
        second = await w.ask(COMPLETIONS, completion(), OTHER)
        assert second.status == 503, "two of three are more than a share"
        assert w.metric("pdproxy_evicted_total", what="queue") == 1
        go.set()
        for client in (*greedy[:3], first):
            assert (await client.answer()).status == 200


async def test_one_client_alone_has_all_places() -> None:
    """While nobody else waits, nothing is kept back: clients behind one balancer look like one."""
    async with world(auth=KEYS, limits={"max_inflight": 4, "max_queue": 2}) as w:
        go = asyncio.Event()
        w.prefill[0].script(*[scripts.gate(go, prefill)] * 4)
        clients = [await begun(w, f"r{number}", GREEDY) for number in range(6)]
        assert (w.inflight, w.waiting) == (4, 2)
        go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 6
        assert w.metric("pdproxy_evicted_total") == 0


# -- clients that read slowly


async def slow(w: World, clock: ManualClock, count: int) -> None:
    """Let time pass until so many clients are known to read slowly: they have taken all that the
    system holds for them.
    """
    await full(w)
    for _ in range(4):
        await clock.advance(0.5)
    assert len(w.proxy.known_clients.with_slow) == count


async def full(w: World) -> None:
    """Wait until the system takes nothing more of what is to be sent to clients: nothing changes in
    many turns of the loop.
    """
    before = -1
    async with asyncio.timeout(30):
        while not buffered(w) or buffered(w) != before:
            before = buffered(w)
            await later_turns()


def buffered(w: World) -> int:
    """Bytes that wait to be sent to clients."""
    return sum(one.transport.get_write_buffer_size() for one in w.connections)


async def unread(w: World, headers: list[tuple[str, str]], address: str = "127.0.0.1") -> Client:
    """A stream that its client does not read."""
    client = await w.client(receive_buffer=4096, address=address)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(request("POST", COMPLETIONS, completion(stream=True), headers))
    return client


def run_unread(keep: Any, **settings: Any) -> None:
    """Run a test on the loop that serves, before an engine whose streams never end."""

    async def scenario() -> None:
        clock = ManualClock()
        # A look at readers every half second; nobody is dropped for slowness alone.
        async with world(
            auth=KEYS, deadlines={"client_write": 6.0}, leaves=True, clock=clock, **settings
        ) as w:
            w.decode[0].script(*[scripts.streams(*[EVENT * 40] * 200, then="stall")] * 2)
            await keep(w, clock)

    uvloop.run(scenario())


def test_a_reader_that_is_too_slow_gives_way_to_a_client_that_waits() -> None:
    """Its places are more than its share, and it takes nothing of what was made for it: one of its
    streams ends for another's.
    """

    async def keep(w: World, clock: ManualClock) -> None:
        await unread(w, GREEDY)
        await unread(w, GREEDY)
        await slow(w, clock, 1)
        w.decode[0].scripts.clear()
        asked = asyncio.create_task(w.ask(COMPLETIONS, completion(), OTHER))
        await until(lambda: w.waiting == 1 or asked.done())
        await clock.advance(0.5)
        answer = await asked
        assert (answer.status, answer.text) == (200, TEXT)
        assert w.metric("pdproxy_evicted_total", what="reader") == 1
        assert w.metric("pdproxy_deadline_total", wait="client_write") == 0
        assert w.inflight == 1, "one is enough"

    run_unread(keep, limits={"max_inflight": 2})


def test_a_reader_that_becomes_too_slow_while_others_wait() -> None:
    """The first one that waits is served as well, as soon as the slowness is noticed."""

    async def keep(w: World, clock: ManualClock) -> None:
        await unread(w, GREEDY)
        await unread(w, GREEDY)
        await until(lambda: w.inflight == 2)
        client = await w.client()
        client.post(COMPLETIONS, completion(), OTHER)
        await until(lambda: w.waiting == 1)
        assert not w.proxy.known_clients.with_slow
        await until(lambda: not w.decode[0].scripts)  # both streams have begun
        await slow(w, clock, 1)
        assert (await client.answer()).status == 200

    run_unread(keep, limits={"max_inflight": 2})


def test_a_slow_reader_within_its_share_stays() -> None:
    """One place of two for each of two clients: the one that waits, waits on, although the other
    one reads nothing.
    """

    async def keep(w: World, clock: ManualClock) -> None:
        await unread(w, GREEDY)
        await unread(w, OTHER)
        await slow(w, clock, 2)
        client = await w.client()
        client.post(COMPLETIONS, completion(), OTHER)
        await until(lambda: w.waiting == 1)
        await clock.advance(1.2)  # two looks
        assert w.waiting == 1
        assert w.metric("pdproxy_evicted_total") == 0

    run_unread(keep, limits={"max_inflight": 2})


@pytest.mark.parametrize(("rate", "dropped"), [(1_000_000, 1), (0, 0)])
def test_a_trickle_is_not_reading(rate: int, dropped: int) -> None:
    """A client that takes some bytes now and then is dropped after the deadline where that is under
    the floor; else it stays.
    """

    async def run() -> None:
        async with world(
            deadlines={"client_write": 1.2, "between_tokens": 20},
            limits={"min_read_rate": rate},
            leaves=True,
        ) as w:
            w.decode[0].script(scripts.streams(*[EVENT * 40] * 200, then="stall"))
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", w.port))
                sock.setblocking(False)
                sock.send(request("POST", COMPLETIONS, completion(stream=True)))
                for _ in range(60):
                    await asyncio.sleep(0.05)
                    with suppress(BlockingIOError, ConnectionResetError):
                        sock.recv(4000)
                assert w.metric("pdproxy_deadline_total", wait="client_write") == dropped
            await w.quiet()

    uvloop.run(run())


# -- memory for bodies


def stalled(size: int, headers: list[tuple[str, str]], path: str = COMPLETIONS) -> bytes:
    """A request whose body lacks its last byte."""
    whole = request("POST", path, b" " * (size + 1), headers)
    return whole[:-1]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_a_stalled_body_gives_way_to_a_client_with_less(path: str) -> None:
    """Where there is no space, the body that has waited longest of the client that holds the most
    is refused with 503.
    """
    async with world(auth=KEYS, limits={"max_buffered_bytes": 8000, "max_body_bytes": 4000}) as w:
        first, second = await w.client(), await w.client()
        first.send(stalled(3000, GREEDY, path))
        await until(lambda: w.body_bytes == 3000)
        second.send(stalled(3000, GREEDY, path))
        await until(lambda: w.body_bytes == 6000)
        answer = await w.ask(COMPLETIONS, completion(user="x" * 2500), OTHER)
        assert (answer.status, answer.text) == (200, TEXT)
        refused = await first.answer()
        assert (refused.status, refused.header("retry-after")) == (503, "1")
        await until(lambda: w.body_bytes == 3000)
        assert w.metric("pdproxy_evicted_total", what="body") == 1
        second.send(b" ")
        assert (await second.answer()).status in (400, 404, 501), "it was not touched"


async def test_a_body_that_goes_on_is_not_the_one_that_gives_way() -> None:
    """The one whose last part is the longest ago is."""
    async with world(auth=KEYS, limits={"max_buffered_bytes": 8000, "max_body_bytes": 4000}) as w:
        first, second = await w.client(), await w.client()
        whole = request("POST", COMPLETIONS, b" " * 4000, GREEDY)
        first.send(whole[:-1000])
        await until(lambda: w.body_bytes == 3000)
        second.send(whole[:-1000])
        await until(lambda: w.body_bytes == 6000)
        first.send(whole[-1000:-900])
        await until(lambda: w.body_bytes == 6100)
        assert (await w.ask(COMPLETIONS, completion(user="x" * 2500), OTHER)).status == 200
        assert (await second.answer()).status == 503
        first.send(whole[-900:])
        assert (await first.answer()).status == 400


async def test_bodies_that_engines_work_on_give_way_to_nobody() -> None:
    """Whoever comes is refused, although another client holds more than its share."""
    async with world(auth=KEYS, limits={"max_buffered_bytes": 8000, "max_body_bytes": 4000}) as w:
        go = asyncio.Event()
        w.prefill[0].script(*[scripts.gate(go, prefill)] * 2)
        clients = [await w.client() for _ in range(2)]
        for client in clients:
            client.post(COMPLETIONS, completion(user="x" * 3000), GREEDY)
        await w.prefill[0].asked(2)
        refused = await w.ask(COMPLETIONS, completion(user="x" * 2000), OTHER)
        assert (refused.status, refused.header("retry-after")) == (503, "1")
        assert w.metric("pdproxy_evicted_total") == 0
        go.set()
        assert [(await client.answer()).status for client in clients] == [200, 200]


async def test_a_client_with_its_share_gets_no_more_of_others() -> None:
    """A client that would hold more than its share is refused, and nobody loses anything."""
    async with world(auth=KEYS, limits={"max_buffered_bytes": 8000, "max_body_bytes": 4000}) as w:
        first, second = await w.client(), await w.client()
        first.send(stalled(3900, GREEDY))
        second.send(stalled(3000, OTHER))
        await until(lambda: w.body_bytes == 6900)
        assert (await w.ask(COMPLETIONS, completion(user="x" * 2000), OTHER)).status == 503
        assert w.body_bytes == 6900
        assert w.metric("pdproxy_evicted_total") == 0


async def test_bodies_in_service_leave_room_for_others() -> None:
    """A body in service is never dropped: an eighth of the memory is reserved for clients that hold
    less than their share.
    """
    go = asyncio.Event()
    async with world(
        auth=KEYS, limits={"max_buffered_bytes": 16_000, "max_body_bytes": 16_000}
    ) as w:
        w.prefill[0].script(scripts.gate(go, prefill))
        large = json.dumps(completion(user="x" * 13_500)).encode()
        greedy = await w.client()
        greedy.post(COMPLETIONS, large, GREEDY)
        await w.prefill[0].asked()
        more = await w.ask(COMPLETIONS, completion(user="x" * 1000), GREEDY)
        assert more.status == 503
        other = await w.client()
        other.post(COMPLETIONS, completion(user="x" * 1000), OTHER)
        await until(lambda: w.inflight == 2)
        go.set()
        assert [(await client.answer()).status for client in (greedy, other)] == [200, 200]
        await until(lambda: w.body_bytes == 0)


# -- connections


async def test_an_idle_connection_gives_way_to_a_new_one() -> None:
    """Of the client with the most connections the oldest idle one is closed; one that is being
    served is not.
    """
    go = asyncio.Event()
    async with world(limits={"max_connections": 4}) as w:
        w.prefill[0].script(scripts.gate(go, prefill))
        served = await w.client()
        served.post(COMPLETIONS, completion())
        await w.prefill[0].asked()
        idle = [await w.client() for _ in range(3)]
        await until(lambda: w.open_connections == 4)
        other = await w.client(address="127.0.0.2")
        other.send(request("GET", "/health", b""))
        assert (await other.answer()).status == 200
        assert await idle[0].closed()
        assert w.metric("pdproxy_evicted_total", what="connection") == 1
        idle[1].send(request("GET", "/health", b""))
        assert (await idle[1].answer()).status == 200
        go.set()
        assert (await served.answer()).status == 200
        assert w.open_connections == 4


async def test_half_a_request_is_idle() -> None:
    """A connection on which a body stands still is refused for a new one: no engine is at work for
    it.
    """
    async with world(limits={"max_connections": 2}) as w:
        halves = [await w.client() for _ in range(2)]
        for client in halves:
            client.send(stalled(100, []))
        await until(lambda: w.body_bytes == 200)
        other = await w.client(address="127.0.0.2")
        other.post(COMPLETIONS, completion())
        assert (await other.answer()).status == 200
        assert (await halves[0].answer()).status == 503


async def test_a_connection_too_many_is_told_so() -> None:
    """Where none is idle the new one gets 503 with Retry-After, and the others are served."""
    go = asyncio.Event()
    async with world(limits={"max_connections": 2}) as w:
        w.prefill[0].script(*[scripts.gate(go, prefill)] * 2)
        busy = [await begun(w, f"r{number}", []) for number in range(2)]
        refused = await w.client()
        answer = await refused.answer()
        assert (answer.status, answer.header("retry-after")) == (503, "1")
        assert answer.json["error"]["type"] == "ServiceUnavailableError"
        assert await refused.closed()
        go.set()
        assert [(await client.answer()).status for client in busy] == [200, 200]
        await until(lambda: w.open_connections <= 2)


async def test_a_client_with_fewer_connections_loses_none() -> None:
    """A client that has the most already does not take another's: it gets its own oldest idle one's
    place.
    """
    async with world(limits={"max_connections": 4}) as w:
        other = await w.client(address="127.0.0.2")
        await until(lambda: w.open_connections == 1)
        many = [await w.client() for _ in range(3)]
        await until(lambda: w.open_connections == 4)
        await w.client()
        assert await many[0].closed()
        other.send(request("GET", "/health", b""))
        assert (await other.answer()).status == 200


# -- who is who


async def test_clients_behind_a_trusted_proxy_are_told_apart() -> None:
    """By the last address in X-Forwarded-For that is no trusted proxy's; from any other peer the
    header is ignored.
    """

    def trusting(settings: Settings) -> Settings:
        import msgspec

        listen = msgspec.structs.replace(
            settings.listen, trusted_proxies=("127.0.0.1", "10.0.0.0/8")
        )
        return msgspec.structs.replace(settings, listen=listen)

    async with world(limits={"max_inflight": 1}, adjust=trusting) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        hops = ["1.1.1.1", "1.1.1.1", "::ffff:1.1.1.1", "6.6.6.6, 2.2.2.2, ::ffff:10.1.2.3"]
        clients = [
            await begun(w, f"r{n}", [("x-forwarded-for", hop)]) for n, hop in enumerate(hops)
        ]
        names = {client.name for client in w.proxy.known_clients}
        assert {"1.1.1.1", "2.2.2.2"} <= names
        assert "6.6.6.6" not in names, "the client made that one up"
        untrusted = await w.client(address="127.0.0.2")
        untrusted.post(COMPLETIONS, completion(), [("x-forwarded-for", "3.3.3.3")])
        await until(lambda: w.waiting == 4)
        assert "3.3.3.3" not in {client.name for client in w.proxy.known_clients}
        go.set()
        for client in (*clients, untrusted):
            assert (await client.answer()).status == 200
        assert [one.ident for one in w.prefill[0].requests][:3] == ["r0", "r1", "r3"]


async def test_nobody_is_remembered() -> None:
    """Clients are known as long as they have a connection or a request, whatever became of both."""
    async with world(auth=KEYS) as w:
        for headers in (GREEDY, OTHER, [("authorization", "Bearer wrong")], []):
            await w.ask(COMPLETIONS, completion(), headers)
            await w.ask("/v1/embeddings", completion(), headers)
            client = await w.client()
            client.send(stalled(100, headers))
            await until(lambda: w.open_connections)
            client.close()
        two = await w.client()
        two.send(request("POST", COMPLETIONS, completion(), GREEDY) * 3)
        await two.head()
        two.close()
        await until(lambda: not len(w.proxy.known_clients))
        assert w.body_bytes == 0
        assert w.open_connections == 0


# -- answers


async def unread_answer(
    w: World, headers: list[tuple[str, str]], path: str = COMPLETIONS
) -> Client:
    """A whole answer that its client does not read."""
    before = len(w.events(RequestEnded))
    client = await w.client(receive_buffer=4096)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(request("POST", path, completion(), headers))
    await w.ended(before + 1)
    await asyncio.sleep(0.02)
    return client


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
def test_answers_that_nobody_reads_have_a_bound(path: str) -> None:
    """Beyond it, the client with the most unread loses its oldest; others get theirs, and streams
    go on.
    """

    async def run() -> None:
        size = 16 << 20  # far more than the kernel takes of it
        limits = {"max_answer_bytes": size + 4096, "max_buffered_answer_bytes": 2 * size + 8192}
        async with world(0, 1, auth=KEYS, deadlines={"client_write": 6.0}, limits=limits) as w:
            large = scripts.whole(answers.whole(False, [1, 2, 3], "x" * size, 4))
            w.decode[0].script(*[large] * 4)
            w.decode[0].admin["/v1/embeddings"] = large
            held = []
            clients = []
            for headers in (GREEDY, GREEDY, OTHER):
                clients.append(await unread_answer(w, headers, path))
                held.append(w.proxy.unread_answers.held)
            assert 0 < held[0] < size, "the kernel has taken some of it"
            assert held[0] < held[1] <= 2 * size + 8192
            assert w.metric("pdproxy_held_bytes", what="unread") == held[2]
            assert w.metric("pdproxy_connections") == 2
            assert w.metric("pdproxy_evicted_total", what="answer") == 1
            greedy, other = (
                sum(own.values()) for own in w.proxy.unread_answers._by_client.values()
            )
            assert greedy == held[1] - held[0], (
                "its second answer, whole: as much of it as when it came"
            )
            assert size // 2 < other < size, "nothing of the other's answer was dropped"
            assert held[2] == greedy + other
            assert w.proxy.answer_budget.held == 0, "engines' legs have all of their memory"
            for client in clients:
                client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert not (await clients[0].answer()).ended, "the greedy client's oldest"
            for client in clients[1:]:
                assert len((await client.answer()).text) == size
            await until(lambda: w.proxy.unread_answers.held == 0)

    uvloop.run(run())


# -- what a review has found


async def test_a_flood_of_evicted_connections_has_a_bound() -> None:
    """Evicted ones count until they are closed, and only some get an answer: open files are never
    beyond the bound for long.
    """
    async with world(limits={"max_connections": 8}) as w:
        for _ in range(80):
            client = await w.client()
            client.send(stalled(100, []))
        await until(lambda: w.open_connections <= 8 + MAX_LEAVING)
        await until(lambda: len(w.connections) <= 8 + MAX_LEAVING)
        other = await w.client(address="127.0.0.2")
        other.send(request("GET", "/health", b""))
        assert (await other.answer()).status == 200


async def test_busy_connections_shield_no_idle_ones() -> None:
    """However many of a client's oldest connections are busy, its idle ones are found behind
    them.
    """
    go = asyncio.Event()
    async with world(limits={"max_connections": MAX_SEARCHED + 20}) as w:
        w.prefill[0].script(*[scripts.gate(go, prefill)] * (MAX_SEARCHED + 4))
        busy = [await w.client() for _ in range(MAX_SEARCHED + 4)]
        for client in busy:
            client.post(COMPLETIONS, completion())
        await until(lambda: w.inflight == len(busy))
        for _ in range(16):
            await w.client()
        await until(lambda: w.open_connections == MAX_SEARCHED + 20)
        statuses = []
        for _ in range(3):  # the first may look at none but busy ones
            other = await w.client(address="127.0.0.2")
            other.send(request("GET", "/health", b""))
            statuses.append((await other.answer()).status)
        assert statuses[1:] == [200, 200]
        go.set()
        for client in busy:
            assert (await client.answer()).status == 200


async def test_an_empty_body_makes_nobody_a_holder() -> None:
    """Clients that send nothing have no share of the memory, and are forgotten."""
    async with world(auth=KEYS) as w:
        for path in ("/tokenize", COMPLETIONS):
            await w.ask(path, b"", GREEDY)
        await until(lambda: not len(w.proxy.known_clients))
        assert not w.proxy.body_budget._holders


def test_a_passed_stream_is_its_own_clients() -> None:
    """A slow reader of a route that is passed to one engine is known by its key, and gives way as
    any other.
    """

    async def keep(w: World, clock: ManualClock) -> None:
        w.decode[0].scripts.clear()
        w.decode[0].admin["/v1/messages"] = scripts.streams(*[EVENT * 40] * 200, then="stall")
        for _ in range(2):
            client = await w.client(receive_buffer=4096)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            body = {
                "model": "tiny",
                "max_tokens": "4",  # only engines take a text for a number
                "stream": True,
                "messages": [{"role": "user", "content": "x"}],
            }
            client.send(request("POST", "/v1/messages", body, GREEDY))
        await until(lambda: w.inflight == 2)
        await slow(w, clock, 1)
        answer = await w.ask(COMPLETIONS, completion(), OTHER)
        assert (answer.status, answer.text) == (200, TEXT)
        assert w.metric("pdproxy_evicted_total", what="reader") == 1

    run_unread(keep, limits={"max_inflight": 2})
