"""An engine's name with several addresses, and with others after a while: which of them connections
go to.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineUnreachableError, Wait
from pdproxy.upstream.addresses import LEFT_OUT, MAX_ADDRESSES, PAUSE, REFRESH, Addresses, by_system
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient, Pending
from tests.fakes.clock import ManualClock
from tests.fakes.ports import free_port

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
A, B, C = "127.0.0.1", "127.0.0.2", "127.0.0.3"


class Resolver:
    """Stands for the system's. `answers`: what it says next; None: it hangs."""

    def __init__(self, *addresses: str) -> None:
        self.answer: list[str] | OSError | None = list(addresses)
        self.asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        if self.answer is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(self.answer, OSError):
            raise self.answer
        assert self.answer is not None
        return self.answer


class Machines:
    """Servers at one port of several addresses."""

    def __init__(self) -> None:
        self.port = free_port()
        self.taken: Counter[str] = Counter()
        self.held: list[asyncio.StreamWriter] = []
        """Of requests to `/hold`, which get no answer yet."""
        self._servers: dict[str, asyncio.Server] = {}
        self._open: dict[asyncio.StreamWriter, None] = {}

    async def start(self, *addresses: str) -> None:
        for address in addresses:
            self._servers[address] = await asyncio.start_server(self._serve, address, self.port)

    def stop(self, address: str) -> None:
        self._servers.pop(address).close()

    def close(self) -> None:
        for address in list(self._servers):
            self.stop(address)
        for writer in self._open:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken[writer.get_extra_info("sockname")[0]] += 1
        self._open[writer] = None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(1)
                if b" /hold " in head:
                    self.held.append(writer)
                else:
                    writer.write(ANSWER)
        writer.close()


@pytest.fixture
async def machines() -> AsyncIterator[Machines]:
    found = Machines()
    yield found
    found.close()


@pytest.fixture
async def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a test adds to the loop's time."""
    added = [0.0]
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + sum(added))
    return added


def client_of(
    machines: Machines,
    resolve: Callable[..., Any],
    *,
    clock: Clock | None = None,
    keepalive: float = 1000.0,
) -> EngineClient:
    return EngineClient(
        f"http://engine.test:{machines.port}",
        connect_timeout=30,
        keepalive=keepalive,
        clock=clock or Clock(),
        budget=AnswerBudget(),
        resolve=resolve,
    )


async def begun(client: EngineClient, path: str, *, fresh: bool = True) -> Pending:
    """Send a request whose whole answer is awaited, on a connection of its own if `fresh`."""
    pending = Pending(AnswerBudget().share())
    pending.attach(await client.send(client.request(path, (), b"x"), pending, fresh=fresh))
    return pending


async def ask(client: EngineClient, *, fresh: bool = True) -> bytes:
    """Ask for a whole answer, on a connection of its own if `fresh`."""
    pending = await begun(client, "/v1/completions", fresh=fresh)
    async with asyncio.timeout(30):
        return (await pending.answered()).body


async def test_connections_go_to_the_addresses_in_turn(machines: Machines) -> None:
    """Each gets as many; the name is resolved once."""
    await machines.start(A, B, C)
    resolver = Resolver(A, B, C)
    client = client_of(machines, resolver)
    for _ in range(9):
        assert await ask(client) == b"ok"
    assert machines.taken == {A: 3, B: 3, C: 3}
    assert resolver.asked == 1
    client.close()


async def test_a_dead_one_of_two_costs_one_attempt_and_comes_back(
    machines: Machines, passed: list[float]
) -> None:
    """Every request is answered; the dead one is left out, until it is tried again."""
    await machines.start(A)
    client = client_of(machines, Resolver(A, B))
    for _ in range(4):
        assert await ask(client) == b"ok"
    assert machines.taken == {A: 4}
    await machines.start(B)
    for _ in range(4):
        await ask(client)
    assert machines.taken == {A: 8}, "it is left out"
    passed.append(LEFT_OUT)
    for _ in range(4):
        await ask(client)
    assert machines.taken == {A: 10, B: 2}
    client.close()


async def test_what_is_left_out_is_the_last_resort(machines: Machines) -> None:
    """The other one dies while one is left out, and that one is there again."""
    await machines.start(A)
    client = client_of(machines, Resolver(A, B))
    for _ in range(2):
        await ask(client)
    await machines.start(B)
    machines.stop(A)
    assert await ask(client) == b"ok"
    assert machines.taken == {A: 2, B: 1}
    machines.stop(B)
    with pytest.raises(EngineUnreachableError):
        await ask(client)
    client.close()


async def test_an_address_that_swallows_packets_gets_its_part_of_the_deadline(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it, as one of two; then the other one is asked. With no other, the deadline passes as
    a whole.
    """
    await machines.start(A)
    clock = ManualClock()
    client = client_of(machines, Resolver(B, A), clock=clock)
    loop = asyncio.get_running_loop()
    connect = loop.create_connection
    swallowed = {B}

    async def create_connection(factory: Any, host: str, port: int, **options: Any) -> Any:
        if host in swallowed:
            await loop.create_future()
        return await connect(factory, host, port, **options)

    monkeypatch.setattr(loop, "create_connection", create_connection)
    asked = asyncio.ensure_future(ask(client))
    await clock.reach(15)
    assert await asked == b"ok"
    swallowed.add(A)
    asked = asyncio.ensure_future(ask(client))
    await clock.reach(30)
    with pytest.raises(EngineUnreachableError) as caught:
        await asked
    assert caught.value.wait is Wait.CONNECT
    client.close()


async def test_other_addresses_are_noticed(machines: Machines, passed: list[float]) -> None:
    """A kept connection to a former address is not used any more; an answer that is under way there
    is whole.
    """
    await machines.start(A, B)
    resolver = Resolver(A)
    client = client_of(machines, resolver)
    held = await begun(client, "/hold")
    await ask(client)
    await ask(client, fresh=False)
    assert machines.taken == {A: 2}, "a kept connection is used again"
    resolver.answer = [B]
    passed.append(REFRESH)
    await ask(client, fresh=False)  # finds that it is time
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(3):
        assert await ask(client, fresh=False) == b"ok"
    assert machines.taken == {A: 2, B: 1}
    machines.held[0].write(ANSWER)
    assert (await held.answered()).body == b"ok"
    assert repr(client).endswith(" 1 idle>")
    assert resolver.asked == 2
    client.close()


async def test_a_connection_that_fails_has_the_name_resolved_anew(
    machines: Machines, passed: list[float]
) -> None:
    """An engine that has moved is found at once, but the resolver is asked once a second at
    most.
    """
    await machines.start(B)
    resolver = Resolver(A)
    client = client_of(machines, resolver)
    for _ in range(3):
        with pytest.raises(EngineUnreachableError):
            await ask(client)
    assert resolver.asked == 1
    resolver.answer = [B]
    passed.append(PAUSE)
    with pytest.raises(EngineUnreachableError):
        await ask(client)
    await asyncio.sleep(0)
    assert await ask(client) == b"ok"
    assert resolver.asked == 2
    client.close()


async def test_a_resolver_that_fails_later_changes_nothing(
    machines: Machines, passed: list[float]
) -> None:
    """The last addresses stay in use, and the resolver is asked again after a pause."""
    await machines.start(A)
    resolver = Resolver(A)
    client = client_of(machines, resolver)
    await ask(client)
    answers: list[list[str] | OSError] = [socket.gaierror(socket.EAI_AGAIN, "try again"), []]
    for answer in answers:
        resolver.answer = answer
        passed.append(REFRESH)
        for _ in range(3):
            assert await ask(client, fresh=False) == b"ok"
    assert resolver.asked == 3
    client.close()


async def test_a_name_without_addresses(machines: Machines) -> None:
    """The engine counts as not reachable."""
    resolver = Resolver()
    client = client_of(machines, resolver)
    with pytest.raises(EngineUnreachableError, match="no addresses"):
        await ask(client)
    resolver.answer = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(EngineUnreachableError, match="not known"):
        await ask(client)
    client.close()


async def test_a_resolver_that_hangs(machines: Machines) -> None:
    """All connections wait for one answer of it, each until its deadline."""
    clock, resolver = ManualClock(), Resolver()
    resolver.answer = None
    client = client_of(machines, resolver, clock=clock)
    asked = [asyncio.ensure_future(ask(client)) for _ in range(3)]
    await clock.reach(30)
    for one in asked:
        with pytest.raises(EngineUnreachableError, match="did not resolve in 30 s") as caught:
            await one
        assert caught.value.wait is Wait.CONNECT
    assert resolver.asked == 1
    client.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("resolve")]


async def test_an_address_is_not_resolved(machines: Machines) -> None:
    """A URL with one, of either kind."""
    resolver = Resolver(B)
    for host in ("127.0.0.1", "::1"):
        addresses = Addresses(host, 1, lambda: None, resolver)
        addresses.failed(host)
        assert await addresses.in_turn() == ([host], [])
    assert resolver.asked == 0


async def test_only_the_first_of_very_many_addresses_count() -> None:
    """Once each."""
    resolver = Resolver(
        *(f"10.0.{number // 200}.{number % 200}" for number in range(1000)), "10.0.0.0"
    )
    usable, others = await Addresses("engine", 1, lambda: None, resolver).in_turn()
    assert (len(usable), len(set(usable)), others) == (MAX_ADDRESSES, MAX_ADDRESSES, [])


async def test_the_system_resolves() -> None:
    assert A in await by_system("localhost", 80)
    for no_name in ("a..b", "x" * 64 + ".example"):
        with pytest.raises(OSError, match="no name"):
            await by_system(no_name, 80)
