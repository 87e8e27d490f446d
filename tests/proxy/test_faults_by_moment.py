"""Whatever the contract, the route, the fault, its moment and the shape: clients see a right answer
or an honest error, and all recovers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.server import SimServer
from tests.fakes import named
from tests.fakes import world as worlds
from tests.fakes.client import Answer, exchange, request
from tests.fakes.clock import STEP, ManualClock
from tests.fakes.passed import MESSAGES, RESPONSES
from tests.fakes.pictures import png
from tests.fakes.pool import Pair, pool
from tests.fakes.world import CHAT, COMPLETIONS, World, until, world
from tests.proxy import test_registered as registered
from tests.proxy.faults import (
    ALL,
    SILENT,
    Kept,
    cases,
    expected,
    few,
    half,
    left_to_the_lease,
    revive,
    seen,
    silent,
    usage,
    with_connections,
)
from tests.proxy.test_both_legs import known, text_of
from tests.proxy.test_connectors import completion
from tests.proxy.test_cpu import connector
from tests.proxy.test_encoders import CONNECTORS as ENCODERS
from tests.proxy.test_encoders import chat as with_pictures
from tests.proxy.test_encoders import seeing

NAMED = (RESPONSES, MESSAGES)
GONE = ("kill", "restart", "no_fin", "dead_core", "refuse")
"""Kinds after which a prefill engine's worker is gone: who has asked it waits for minutes, and only
its own end ends that.
"""


@dataclass
class Stage:
    """A proxy and its engines, of which one will fail."""

    clock: ManualClock
    world: World
    ask: Callable[[bool], Awaitable[Answer]]
    """Ask for an answer, streamed or whole."""
    text: str
    """The right answer."""
    engines: Sequence[SimServer]
    fails: SimServer
    tries: int
    """After so many requests the engine has had one: ties go round."""
    pair: Pair | None = None


class Contract:
    """Engines of one contract: what its faults differ in from those of others."""

    step = STEP
    path = COMPLETIONS
    no_trace: tuple[str, ...] = ("refuse",)
    """Kinds of which engines need not see anything."""
    at_once = True
    """Whether the next request is answered before any deadline, once all engines are well."""

    def cases(self) -> list[Kept]:
        """Which of them there are."""
        return half(second=False)

    def run(self, case: Kept, clock: ManualClock) -> Any:
        """Engines that are as the case wants them, as a context manager of a `Stage`."""
        raise NotImplementedError

    def waits(self, role: str, kind: str, moment: Moment, stream: bool, kept: bool) -> bool:
        """Whether time has to pass for an answer. Only what nobody else ends may wait for a
        deadline.
        """
        return silent(kind, moment)

    def wanted(self, role: str, kind: str, moment: Moment, stream: bool) -> set[str]:
        """What the client may see."""
        return {expected(role, kind, moment, stream, self.path)}

    async def recover(self, stage: Stage, case: Kept) -> None:
        """Bring every engine back to life, and have the proxy know."""
        await revive(stage.engines)
        await stage.world.probe()
        await stage.clock.through(stage.world.quiet(), self.step)

    async def ends(self, stage: Stage, case: Kept) -> None:
        """Nothing is left at the engines but what waits for the end of its lease, or is counted."""
        raise NotImplementedError


def sizes(role: str) -> tuple[int, int]:
    """How many prefill and decode engines there are. The last decode engine would not be risked."""
    return (2, 1) if role == "prefill" else (1, 3)


class Nixl(Contract):
    """P keeps KV until D has pulled it."""

    text = worlds.TEXT

    def body(self, streamed: bool) -> dict[str, Any]:
        """What is asked for."""
        return worlds.completion(stream=streamed)

    def cases(self) -> list[Kept]:
        return with_connections()

    @asynccontextmanager
    async def run(self, case: Kept, clock: ManualClock) -> AsyncIterator[Stage]:
        role, _, _, stream, kept = case
        async with world(*sizes(role), leaves=True, clock=clock) as w:
            engine, tries = (w.prefill if role == "prefill" else w.decode)[1].sim, max(sizes(role))

            def ask(streamed: bool) -> Awaitable[Answer]:
                return w.ask(self.path, self.body(streamed))

            for _ in range(tries if kept else 0):
                assert seen(await ask(stream), self.text, self.path) == "right"
                await w.quiet()
            assert all(one.requests for one in w.engines) == kept
            yield Stage(clock, w, ask, self.text, [one.sim for one in w.engines], engine, tries)

    async def ends(self, stage: Stage, case: Kept) -> None:
        if left_to_the_lease(*case[:3]):
            for one in stage.world.prefill:
                one.sim.engine.expire_leases()
        await stage.world.freed()
        await until(lambda: not any(usage(engine) for engine in stage.engines))


class NamedNixl(Nixl):
    """The same for a route whose events have names: no other engine goes on with its streams."""

    text = worlds.CHAT_TEXT

    def __init__(self, path: str) -> None:
        self.path = path

    def body(self, streamed: bool) -> dict[str, Any]:
        return named.body(self.path, stream=streamed)

    def cases(self) -> list[Kept]:
        return few(self.path, second=False)


class NamedShared(Contract):
    """A storage has the KV: no engine waits for another."""

    no_trace = ("refuse", "lease_expiry", "load_failure")

    def __init__(self, path: str) -> None:
        self.path = path

    def cases(self) -> list[Kept]:
        return few(self.path, second=True)

    @asynccontextmanager
    async def run(self, case: Kept, clock: ManualClock) -> AsyncIterator[Stage]:
        prefills, decodes = sizes(case[0])
        async with pool("shared", prefills=prefills, decodes=decodes, clock=clock) as pair:

            def ask(streamed: bool) -> Awaitable[Answer]:
                return pair.ask(self.path, named.body(self.path, stream=streamed))

            engines = (pair.p, pair.d, *pair.more)
            tries = max(prefills, decodes)
            stage = Stage(
                clock, pair.world, ask, worlds.CHAT_TEXT, engines, pair.more[0], tries, pair
            )
            for _ in range(tries if case[-1] else 0):
                assert seen(await ask(case[3]), stage.text, self.path) == "right"
                await pair.world.quiet()
            yield stage

    async def ends(self, stage: Stage, case: Kept) -> None:
        await until(lambda: not any(usage(engine) for engine in stage.engines))


class Cpu(Contract):
    """D serves alone what can't be split, and each P has it alone: a fault of D may be an error."""

    step, at_once = 0.5, False
    no_trace = ("refuse", "lease_expiry", "load_failure")

    @asynccontextmanager
    async def run(self, case: Kept, clock: ManualClock) -> AsyncIterator[Stage]:
        role, _, _, stream, kept = case
        deadlines = {"prefill": 5, "total": 60, "first_token": 5, "release": 1}
        async with pool("cpu", prefills=sizes(role)[0], deadlines=deadlines, clock=clock) as pair:
            stage = of_pair(
                pair, clock, pair.more[0] if role == "prefill" else pair.d, 2, await text_of(pair)
            )
            for _ in range(2 if kept else 0):
                other = completion(prompt="some other text " * 9, stream=stream)
                assert (await pair.ask(COMPLETIONS, other)).status == 200
                await pair.world.quiet()
            assert bool(stage.fails.requests) == kept
            yield stage

    def waits(self, role: str, kind: str, moment: Moment, stream: bool, kept: bool) -> bool:
        # The same engine is asked again, or goes on with its stream, once it is there again: it
        # waits for KV that does not come.
        return role == "prefill" or silent(kind, moment) or (kind == "restart" and (stream or kept))

    def wanted(self, role: str, kind: str, moment: Moment, stream: bool) -> set[str]:
        return {"right"} if role == "prefill" else {"right", "error", "error event"}

    async def recover(self, stage: Stage, case: Kept) -> None:
        role, _, moment, stream, _ = case
        # it shows at the next request, on the connection that is kept or at the engine's port
        if moment == "after":
            await stage.clock.through(stage.ask(stream))
        await revive(stage.engines)
        assert stage.pair is not None
        for engine in stage.engines if role == "decode" else ():
            if engine is not stage.pair.d:  # it writes to the D that was there before
                await engine.restart()
        await stage.world.probe()
        await stage.clock.through(stage.world.quiet())

    async def ends(self, stage: Stage, case: Kept) -> None:
        await until(lambda: not any(one.engine.stats.kv_cache_usage for one in stage.engines))
        assert stage.pair is not None
        assert not connector(stage.pair.d)._waiting


class NixlPush(Contract):
    """Both engines are asked at once. D's blocks that only a push could free are counted."""

    @asynccontextmanager
    async def run(self, case: Kept, clock: ManualClock) -> AsyncIterator[Stage]:
        prefills, decodes = sizes(case[0])
        facts = {"side_channel_port": 0, "handshake_timeout": 20.0}
        async with pool(
            "nixl-push", prefills=prefills, decodes=decodes, everybody=facts, clock=clock
        ) as pair:
            text = await text_of(pair)
            await known(pair)
            stage = of_pair(pair, clock, pair.more[0], max(prefills, decodes), text)
            close_connections(stage, kept=case[-1])
            yield stage

    def waits(self, role: str, kind: str, moment: Moment, stream: bool, kept: bool) -> bool:
        # without a push, D says nothing until its deadline
        return role == "prefill" or silent(kind, moment)

    async def ends(self, stage: Stage, case: Kept) -> None:
        stuck = stage.world.metric("pdproxy_kv_stuck")
        for one in stage.engines:
            one.engine.expire_leases()
        waiting = sum(
            len(one.engine.awaited) for one in stage.engines if one.engine.facts.role == "decode"
        )
        assert waiting <= stuck, "what nobody frees is counted"
        if not waiting:
            await until(lambda: not any(usage(one) for one in stage.engines))


class Mooncake(Contract):
    """Both engines are asked at once. Each keeps blocks for its own time: P for a D, and D for KV
    that will not come.
    """

    def cases(self) -> list[Kept]:
        return half(second=True)

    @asynccontextmanager
    async def run(self, case: Kept, clock: ManualClock) -> AsyncIterator[Stage]:
        prefills, decodes = sizes(case[0])
        async with pool("mooncake", prefills=prefills, decodes=decodes, clock=clock) as pair:
            stage = of_pair(pair, clock, pair.more[0], max(prefills, decodes), await text_of(pair))
            # decode engines learn addresses: a retry then takes few turns of the loop
            for _ in range(stage.tries):
                assert (
                    await pair.ask(COMPLETIONS, completion(prompt="some other text " * 9))
                ).status == 200
            close_connections(stage, kept=case[-1])
            yield stage

    def waits(self, role: str, kind: str, moment: Moment, stream: bool, kept: bool) -> bool:
        return silent(kind, moment) or kind in (*GONE, "lease_expiry")

    def wanted(self, role: str, kind: str, moment: Moment, stream: bool) -> set[str]:
        # A prefill engine that has answered and is gone leaves the decode engine without an end.
        # Unless it has sent the KV by then, nothing shows the decode engine that it won't come: the
        # client's own deadline does.
        gone = kind in (*GONE, *SILENT, "lease_expiry") and moment == "after"
        gone = gone or (kind == "no_fin" and moment in ("handed_over", "last_chunk"))
        return super().wanted(role, kind, moment, stream) | (
            {"error"} if role == "prefill" and gone else set()
        )

    async def recover(self, stage: Stage, case: Kept) -> None:
        await revive(stage.engines)
        await stage.world.probe()
        await until(
            lambda: all(engine.kv_not_ready is None for engine in stage.world.proxy.ledger.engines)
        )
        await stage.clock.through(stage.world.quiet(), STEP)

    async def ends(self, stage: Stage, case: Kept) -> None:
        for one in stage.engines:
            one.engine.expire_leases()
        left = {
            one.url for one in stage.engines if stage.world.metric("pdproxy_kv_stuck", node=one.url)
        }
        decodes = {
            engine.url for engine in stage.world.proxy.ledger.engines if engine.role is Role.DECODE
        }
        assert left <= decodes
        if case[0] == "prefill" and case[1] in GONE:
            left |= decodes  # until they give up a worker that is gone
        await until(lambda: not any(usage(one) for one in stage.engines if one.url not in left))


class Registered(Contract):
    """Engines that register, of one kind of `test_registered`; of the cases every fifth, another
    fifth for each kind.
    """

    step, at_once = 0.5, False
    no_trace = ("refuse", "load_failure", "lease_expiry")

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def cases(self) -> list[Kept]:
        # P2P NCCL has no moment at which KV is handed over: P's answer holds nothing, and D finds
        # it there or waits with all it has. With READ, the next process at P's address is taken for
        # P: see `transfer.moriio`.
        some = [case for case in cases() if self._kind != "p2p-nccl" or case[2] != "handed_over"]
        some = [
            case
            for case in some
            if self._kind != "read" or case[:3] != ("prefill", "restart", "after")
        ]
        share, offset = 1 if ALL else 5, list(registered.KINDS).index(self._kind)
        return [(*case, False) for case in some[offset % share :: share]]

    @asynccontextmanager
    async def run(self, case: Kept, clock: ManualClock) -> AsyncIterator[Stage]:
        role = case[0]
        more: dict[str, Any] = {"clock": clock, "registration": registered.FOREVER, "alone": True}
        async with registered.run(
            self._kind, *((2, 1) if role == "prefill" else (1, 2)), **more
        ) as f:
            text = (await f.asked_plain(COMPLETIONS, registered.completion())).text

            def ask(stream: bool) -> Awaitable[Answer]:
                return f.ask(COMPLETIONS, registered.completion(stream=stream))

            self._fleet = f
            yield Stage(
                clock, f.world, ask, text, f.engines, (f.p if role == "prefill" else f.d)[1], 2
            )

    def waits(self, role: str, kind: str, moment: Moment, stream: bool, kept: bool) -> bool:
        return True

    def wanted(self, role: str, kind: str, moment: Moment, stream: bool) -> set[str]:
        right = kind in ("split", "join") or role == "prefill"
        return {"right"} if right else {"right", "error", "error event"}

    async def recover(self, stage: Stage, case: Kept) -> None:
        await revive(stage.engines)
        for engine in stage.engines:  # what waits for ever is restarted, as an operator would do
            await engine.restart()
        await stage.clock.advance(stage.world.proxy.settings.limits.breaker_cooldown + 1)
        await stage.world.probe()
        await self._fleet.registered()

    async def ends(self, stage: Stage, case: Kept) -> None:
        """What they hold was lost with their restart."""


class Encoders(Contract):
    """Encoder engines of one connector: no client sees what becomes of them."""

    path = CHAT

    def __init__(self, connector: str) -> None:
        self._connector = connector

    def cases(self) -> list[Kept]:
        # All connectors have each kind, and one has each moment. An encoder's leg is as a prefill
        # engine's, but for KV.
        every = {
            "example": half(second=False),
            "cpu": few(RESPONSES, second=False),
            "mooncake": few(MESSAGES, second=False),
        }
        return [
            ("encode", *case[1:])
            for case in every[self._connector]
            if case[0] == "prefill"
            and case[1] not in ("lease_expiry", "load_failure")
            and case[2] != "handed_over"
        ]

    @asynccontextmanager
    async def run(self, case: Kept, clock: ManualClock) -> AsyncIterator[Stage]:
        with TemporaryDirectory() as folder:
            async with seeing(Path(folder), 2, connector=self._connector, clock=clock) as w:
                # bounded load has both engines encode some of them
                pictures = [png(at) for at in range(4)]

                def ask(streamed: bool) -> Awaitable[Answer]:
                    return w.ask(CHAT, with_pictures(*pictures, stream=streamed))

                alone = with_pictures(*pictures, cache_salt="alone")
                text = (await exchange(w.decode[0].port, request("POST", CHAT, alone))).text
                fails = w.encode[1].sim
                if case[-1]:
                    assert seen(await ask(case[3]), text, self.path) == "right"
                    await w.quiet()
                assert bool(fails.requests) == case[-1]
                yield Stage(clock, w, ask, text, [one.sim for one in w.engines], fails, 1)

    def waits(self, role: str, kind: str, moment: Moment, stream: bool, kept: bool) -> bool:
        # A prefill engine waits a minute for an output that it was told of, and that does not come.
        # The API of an engine whose core is dead still sends what it has.
        lost = self._connector != "example" and (moment == "after" or kind == "dead_core")
        return silent(kind, moment) or (lost and kind in GONE)

    def wanted(self, role: str, kind: str, moment: Moment, stream: bool) -> set[str]:
        return {"right"}

    async def ends(self, stage: Stage, case: Kept) -> None:
        await stage.world.freed()
        await until(lambda: not any(usage(engine) for engine in stage.engines))


def of_pair(pair: Pair, clock: ManualClock, fails: SimServer, tries: int, text: str) -> Stage:
    """The stage of a pool."""

    def ask(stream: bool) -> Awaitable[Answer]:
        return pair.ask(COMPLETIONS, completion(stream=stream))

    return Stage(clock, pair.world, ask, text, (pair.p, pair.d, *pair.more), fails, tries, pair)


def close_connections(stage: Stage, *, kept: bool) -> None:
    """Close all connections to engines, unless they are to be kept."""
    for one in () if kept else stage.engines:
        stage.world.proxy.engines[one.url].client.close()


CONTRACTS: dict[str, Contract] = {
    "nixl": Nixl(),
    **{f"nixl {path}": NamedNixl(path) for path in NAMED},
    **{f"shared {path}": NamedShared(path) for path in NAMED},
    "cpu": Cpu(),
    "nixl-push": NixlPush(),
    "mooncake": Mooncake(),
    **{kind: Registered(kind) for kind in registered.KINDS},
    **{f"encoders {connector}": Encoders(connector) for connector in ENCODERS},
}


@pytest.mark.parametrize("second", [True, False])
def test_a_half_has_every_kind_and_every_moment(second: bool) -> None:
    """Each contract sees each of them, on connections that are kept and on new ones."""
    found, every = half(second=second), with_connections()
    assert {case[:2] for case in found} == {case[:2] for case in every}
    for column in (2, 3, 4):
        assert {case[column] for case in found} == {case[column] for case in every}


def test_the_routes_of_named_events_have_every_kind_and_every_moment() -> None:
    """Each route sees each kind at each engine, with one contract or the other."""
    every = with_connections()
    for path in NAMED:
        found = [*few(path, second=False), *few(path, second=True)]
        lacking = {case[:2] for case in every} - {case[:2] for case in found}
        assert lacking <= {("prefill", "load_failure"), ("decode", "load_failure")}
        moments = {case[2] for case in every} - ({"before_done"} if path == RESPONSES else set())
        assert {case[2] for case in found} == moments
        for column in (3, 4):
            assert {case[column] for case in found} == {True, False}


@pytest.mark.parametrize(
    ("contract", "role", "kind", "moment", "stream", "kept"),
    [(name, *case) for name, contract in CONTRACTS.items() for case in contract.cases()],
)
async def test_what_a_client_sees(
    contract: str, role: str, kind: str, moment: Moment, stream: bool, kept: bool
) -> None:
    own, case = CONTRACTS[contract], (role, kind, moment, stream, kept)
    clock = ManualClock()
    async with own.run(case, clock) as stage:
        stage.fails.faults.add(PlannedFault(kind=kind, at=moment))
        for _ in range(stage.tries):
            asked = stage.ask(stream)
            answer = await (clock.through(asked, own.step) if own.waits(*case) else asked)
            if stage.fails.faults.happened or kind == "refuse":
                break
            assert seen(answer, stage.text, own.path) == "right"
        assert seen(answer, stage.text, own.path) in own.wanted(role, kind, moment, stream), (
            answer.status,
            answer.body,
        )
        assert stage.fails.faults.happened or kind in own.no_trace, "the fault came to nothing"
        await own.recover(stage, case)
        asked = stage.ask(stream)
        again = await (asked if own.at_once else clock.through(asked, own.step))
        assert seen(again, stage.text, own.path) == "right", (again.status, again.body)
        await clock.through(stage.world.quiet(), own.step)
        await own.ends(stage, case)
