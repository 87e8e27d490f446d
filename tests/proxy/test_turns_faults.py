"""Every fault at every moment of a conversation's second turn: the client sees what it may see, and
the conversation goes on.
"""

# The turn's prefill engine is given KV that a decode engine kept. At the end no block is held that
# the proxy does not know, but for those that only their own time frees.

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import pytest

from pdproxy.observe.events import TurnReused
from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Answer
from tests.fakes.clock import STEP, ManualClock
from tests.fakes.pool import Pair
from tests.fakes.several import WORKERS
from tests.fakes.world import until
from tests.proxy.faults import SILENT, cases, expected, left_to_the_lease, revive, seen
from tests.proxy.test_connectors import CHAT, TEXT
from tests.proxy.test_turns import drops, keeps, kept_ids, quiet, talking, turns_of, user

SHARE = 1 if os.environ.get("PDPROXY_TEST_MOMENTS") == "all" else 4
STARTED_AGAIN = ("restart", "kill", "dead_core", "no_fin")
ENDS = ("kill", "restart", "freeze", "dead_core", "lease_expiry")
A_WHILE = 2.0
"""Seconds of real time for workers to answer each other; an engine that takes no connections is
never asked.
"""


def mine() -> list[tuple[str, str, Moment, bool]]:
    """The cases of engines that don't register. A prefill leg is never streamed: its clients stream
    in every second case.
    """
    found = [
        (role, kind, moment, stream if role == "decode" else number % 2 == 0)
        for number, (role, kind, moment, stream) in enumerate(cases())
    ]
    return found[::SHARE]


class Talk:
    """One conversation with several engines of one role. Its clients all stream, or none does."""

    def __init__(self, pair: Pair, prefills: int, clock: ManualClock, *, stream: bool) -> None:
        self.pair, self.clock, self._stream = pair, clock, stream
        self.p = [pair.p, *pair.more[: prefills - 1]]
        self.d = [pair.d, *pair.more[prefills - 1 :]]
        self.messages: list[dict[str, Any]] = user(TEXT)
        for sim in self.engines:
            sim.requests.clear()

    @property
    def engines(self) -> list[SimServer]:
        """All of them."""
        return [*self.p, *self.d]

    async def turn(self, *, waits: bool = False) -> tuple[Answer, str]:
        """Ask the next turn. Return the answer, and what a plain engine says: with that the
        conversation goes on.

        `waits`: nothing but a deadline may end it.
        """
        body = {"model": "tiny", "temperature": 0, "messages": self.messages, "max_tokens": 12}
        alone = (await self.pair.asked_plain(CHAT, body)).json["choices"]
        plain = alone[0]["message"]["content"]
        for sim in self.p:
            core(sim).pool.forget_all()  # what one has of the turn before need not be pulled
        before = self._asked()
        asked = asyncio.ensure_future(self.pair.ask(CHAT, body | {"stream": self._stream}))
        if waits and WORKERS > 1:  # first the scheduler answers, in real time
            with contextlib.suppress(TimeoutError):
                await until(lambda: asked.done() or self._asked() > before, A_WHILE)
        answer = await (self.clock.through(asked, STEP) if waits else asked)
        if answer.status == 200 and not self._stream:
            assert answer.json["choices"] == alone, "no ids that nobody asked for"
        self.messages = [
            *self.messages,
            {"role": "assistant", "content": plain},
            *user("And then? " * 5),
        ]
        return answer, plain

    def _asked(self) -> int:
        return sum(len(sim.requests) for sim in self.p)

    async def first(self) -> SimServer:
        """Ask the first turn. Return the engine that keeps its KV."""
        answer, text = await self.turn()
        assert seen(answer, text) == "right"
        await keeps(self.pair, 1)
        assert not self.given
        (keeper,) = (sim for sim in self.d if sim.engine.handles)
        return keeper

    @property
    def given(self) -> int:
        """How many prompts prefill engines have read that had a handle of a decode engine."""
        params = [
            one.json.get("kv_transfer_params") or {} for sim in self.p for one in sim.requests
        ]
        return sum(bool(one.get("remote_block_ids")) for one in params)

    async def quiet(self) -> None:
        """Wait until nothing is under way at the proxy: no task, no lease, no release. Deadlines
        may pass.
        """
        await self.clock.through(quiet(self.pair), STEP)

    async def goes_on(self) -> None:
        """Bring every engine back to life. The next turn is right."""
        await revive(self.engines)
        await self.pair.world.probe()
        await self.quiet()
        answer, text = await self.turn()
        assert seen(answer, text) == "right"
        await self.quiet()

    async def nothing_is_left(self, *, lease: bool, ttl: bool) -> None:
        """See that engines hold nothing but kept turns, and nothing without those.

        `lease`: some of P's blocks may be freed by nothing but the end of their lease; `ttl`: the
        same for D's.
        """
        for sim in self.p if lease else ():
            sim.engine.expire_leases()
        await until(lambda: not any(sim.engine.handles for sim in self.p))
        if not ttl:
            await until(
                lambda: (
                    {name for sim in self.d for name in sim.engine.handles} <= kept_ids(self.pair)
                )
            )
        turns_of(self.pair).kept.drop_all("evicted")
        await self.quiet()
        for sim in self.d if ttl else ():
            sim.engine.expire_leases()
        await until(lambda: not any(sim.engine.handles for sim in self.d))
        await until(lambda: all(core(sim).pool.usage == 0 for sim in self.engines))
        assert not self.pair.world.busy()


def core(sim: SimServer) -> Core:
    """The core of an engine that is alive."""
    found = sim.engine._core
    assert found is not None
    return found


def arm(talk: Talk, role: str, kind: str, moment: Moment) -> list[SimServer]:
    """Have a fault hit the first engine of the role that gets to the moment. Return the engines
    that it may hit.
    """
    sims = talk.p if role == "prefill" else talk.d
    if moment == "accept":
        for connection in [one for sim in sims for one in sim._open()]:
            connection.drop()  # else none is accepted: the kept ones are used
    if kind == "refuse":
        sims = sims[1:]
    for sim in sims:
        sim.faults.armed = sims[0].faults.armed  # what has hit one engine hits no other
    sims[0].faults.add(PlannedFault(kind=kind, at=moment))
    return sims


def left_to_the_ttl(kind: str, dropped: list[str]) -> bool:
    """Whether D's blocks of a turn may be freed by nothing but the end of their time.

    P has left a prompt with a handle unanswered: it may still pull, so the handle is not released.
    Or D was started again while it was asked, and the proxy saw that only later: then the turn
    counts as one of the run before. Or either engine was started again, or the one P stalls, and
    the other one has not met D: P then reports a release only in a step after their handshake, and
    an idle P may make none.
    """
    return "unanswered" in dropped or kind in (*STARTED_AGAIN, "stall")


def outcome(role: str, kind: str, moment: Moment, stream: bool) -> str:
    """What the client sees. D waits for a frozen P's KV, and a whole answer has no deadline but the
    request's own.
    """
    if (role, kind, moment, stream) == ("prefill", "freeze", "after", False):
        return "error"
    return expected(role, kind, moment, stream)


@pytest.mark.parametrize(("role", "kind", "moment", "stream"), mine())
async def test_what_a_client_sees(role: str, kind: str, moment: Moment, stream: bool) -> None:
    # the last decode engine would not be risked
    prefills, decodes = (2, 1) if role == "prefill" else (1, 3)
    clock = ManualClock()
    async with talking(prefills=prefills, decodes=decodes, clock=clock) as pair:
        talk = Talk(pair, prefills, clock, stream=stream)
        await talk.first()
        sims = arm(talk, role, kind, moment)
        answer, text = await talk.turn(
            waits=kind in SILENT or (kind, moment) == ("garbage", "head")
        )
        assert seen(answer, text) == outcome(role, kind, moment, stream), (
            answer.status,
            answer.body,
        )
        assert kind == "refuse" or any(sim.faults.happened for sim in sims), (
            "the fault came to nothing"
        )
        if role == "decode":
            assert len(pair.world.events(TurnReused)) == talk.given == 1
        elif moment != "accept":
            assert talk.given >= 1
            # Only P's answer shows that it has pulled; else the turn was given and is gone,
            # `unused` if P has refused.
            assert pair.world.events(TurnReused) or {"failed", "unanswered", "unused"} & set(
                drops(pair)
            )
        dropped = drops(pair)
        await talk.goes_on()
        await talk.nothing_is_left(
            lease=left_to_the_lease(role, kind, moment), ttl=left_to_the_ttl(kind, dropped)
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", ENDS)
async def test_the_engine_that_keeps_the_turn_is_lost(what: str, stream: bool) -> None:
    """Before the next turn, and nobody has told the proxy: P can't pull what it is given."""
    clock = ManualClock()
    async with talking(prefills=1, decodes=3, clock=clock) as pair:
        talk = Talk(pair, 1, clock, stream=stream)
        keeper = await talk.first()
        match what:
            case "kill":
                await keeper.kill()
            case "restart":
                await keeper.restart()
            case "freeze":
                await keeper.freeze()
            case "dead_core":
                keeper.engine.kill_core()
            case "lease_expiry":
                assert keeper.engine.expire_leases() == 1
        answer, text = await talk.turn(waits=what == "freeze")
        assert seen(answer, text) == "right"
        assert pair.world.events(TurnReused) == []
        assert talk.given == (what != "lease_expiry"), "the notifier reports that"
        assert drops(pair) == [
            {"freeze": "unanswered", "lease_expiry": "expired"}.get(what, "failed")
        ]
        await talk.goes_on()
        await talk.nothing_is_left(lease=True, ttl=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_keeper_that_hangs_is_not_asked_to_decode(stream: bool) -> None:
    """P waits for its KV in vain. The next attempt has other engines in both roles, and the prompt
    is still split.
    """
    clock = ManualClock()
    async with talking(prefills=2, decodes=2, clock=clock) as pair:
        talk = Talk(pair, 2, clock, stream=stream)
        keeper = await talk.first()
        await keeper.freeze()
        answer, text = await talk.turn(waits=True)
        assert seen(answer, text) == "right"
        leg = (await pair.world.ended(2)).legs[0]
        assert leg.attempts == 2
        assert leg.prefill is not None
        assert leg.decode is not None
        assert leg.decode != keeper.url
        await talk.goes_on()
        await talk.nothing_is_left(lease=True, ttl=True)


async def test_the_only_decode_engine_is_asked_although_it_may_hang() -> None:
    """It keeps the turn, and it was P that hung: the prompt is split once more, not computed by the
    decode engine.
    """
    clock = ManualClock()
    async with talking(prefills=2, decodes=1, clock=clock) as pair:
        talk = Talk(pair, 2, clock, stream=True)
        keeper = await talk.first()
        arm(talk, "prefill", "freeze", "queued")
        answer, text = await talk.turn(waits=True)
        assert seen(answer, text) == "right"
        leg = (await pair.world.ended(2)).legs[0]
        assert (leg.attempts, leg.decode) == (2, keeper.url)
        assert leg.prefill is not None
        await talk.goes_on()
        await talk.nothing_is_left(lease=True, ttl=True)
