"""A request that kills the engines that begin it takes two of them at most, not the last one;
others are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.deciding import engines_lost
from pdproxy.deciding.engines_lost import EnginesLost
from pdproxy.deciding.suspects import MOST_KEPT, Suspect
from pdproxy.observe.events import EngineLost
from pdproxy.serving.dispatch.resources import LegHeaders
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Answer, request
from tests.fakes.clock import ManualClock
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.passed import MESSAGES, RESPONSES, message, responses
from tests.fakes.pool import pool
from tests.fakes.world import CHAT, COMPLETIONS, TEXT, World, chat, completion, until, world
from tests.proxy.test_both_legs import known

MARK = "kills whoever begins it"
STREAMS = "never ends"
AT_ONCE = f"kill@queued:rate=1,holds={MARK}"
IN_THE_STREAM = f"kill@mid_stream:rate=1,holds={MARK},events=2"
UNBROKEN = {"breaker_failures": 100, "attempts": 5}


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without data are suspects, however long the test takes."""
    monkeypatch.setattr(engines_lost, "SOON", 60.0)


def killer(number: int = 0, **fields: Any) -> dict[str, Any]:
    """A completion that kills engines. Those of different numbers have different bodies."""
    return completion(prompt=f"{MARK}, {number}. " + "It has some blocks of text. " * 9, **fields)


def armed(engines: Iterable[SimServer], fault: str = AT_ONCE) -> list[SimServer]:
    """Let engines die of killers."""
    found = list(engines)
    for engine in found:
        for path in ("", f",path={RESPONSES}", f",path={MESSAGES}"):
            engine.faults.add(fault + path)
    return found


@asynccontextmanager
async def streams(w: World, count: int) -> AsyncIterator[None]:
    """Have a stream of another client flow at each of the engines; it never ends."""
    for engine in sims(w.aggregated):
        engine.faults.add(f"stall@mid_stream:rate=1,holds={STREAMS},events=2")
    clients = []
    for number in range(count):
        client = await w.client(address=f"127.0.0.{10 + number}")
        client.send(
            request(
                "POST",
                COMPLETIONS,
                completion(prompt=f"{STREAMS} {number}", stream=True, max_tokens=30),
            )
        )
        assert (await client.head()).status == 200, "it has data"
        clients.append(client)
    assert {ledger_engine.requests for ledger_engine in w.proxy.ledger.engines} == {
        1 if count else 0
    }
    yield
    for client in clients:
        client.close()


def sims(engines: Iterable[FakeEngine]) -> list[SimServer]:
    return [engine.sim for engine in engines]


def dead(engines: Iterable[SimServer]) -> int:
    return sum(engine.life == "down" for engine in engines)


def lost_of(w: World) -> EnginesLost:
    """What the proxy remembers."""
    lost = w.proxy.pools[0].resources.lost
    assert isinstance(lost, EnginesLost)
    return lost


async def ask(
    w: World, body: object, path: str = COMPLETIONS, address: str = "127.0.0.1"
) -> Answer:
    """One request of a client with this address."""
    return await w.exchange(request("POST", path, body), address=address)


def refused(answer: Answer) -> bool:
    """Whether the client is told that engines disappeared under its request."""
    error = answer.json["error"]
    named = error.get("reason") == "engines_lost" or "disappeared" in error["message"]
    return answer.status == 503 and named and answer.header("retry-after") is not None


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": (COMPLETIONS, killer()),
    "stream": (COMPLETIONS, killer(stream=True)),
    "chat": (CHAT, chat(messages=[{"role": "user", "content": MARK}])),
    "n": (COMPLETIONS, killer(n=2, temperature=0.5)),
    "responses": (RESPONSES, responses(input=MARK)),
    "messages": (MESSAGES, message(messages=[{"role": "user", "content": MARK}])),
}


@pytest.mark.parametrize("name", BODIES)
async def test_one_request_takes_two_engines(name: str) -> None:
    """Of five that serve it whole, with as many attempts as there are engines."""
    path, body = BODIES[name]
    async with world(0, 0, aggregated=5, limits={"attempts": 5}, leaves=True) as w:
        engines = armed(sims(w.aggregated))
        assert refused(await ask(w, body, path))
        assert dead(engines) == 2
        assert (await ask(w, completion())).text == TEXT
        assert [event.losses for event in w.events(EngineLost)] == [1, 2]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize("of", ["P", "D", "PD"])
async def test_one_request_takes_two_engines_of_all_roles(
    of: str, dispatch: Any, stream: bool
) -> None:
    """Prefill and decode engines count together, one after the other or both at once."""
    async with pool(
        "nixl-push", prefills=4, decodes=4, dispatch=dispatch, limits={"attempts": 5}
    ) as pair:
        await known(pair)
        prefills, decodes = [pair.p, *pair.more[:3]], [pair.d, *pair.more[3:]]
        armed([*(prefills if "P" in of else []), *(decodes if "D" in of else [])])
        answer = await pair.ask(COMPLETIONS, killer(stream=stream))
        assert refused(answer)
        assert dead([*prefills, *decodes]) == 2


@pytest.mark.parametrize("attempts", [3, 5])
async def test_a_list_of_prompts_is_one_request(attempts: int) -> None:
    """The first of its prompts that has lost two engines ends all of them."""
    async with world(0, 0, aggregated=6, limits={"attempts": attempts}, leaves=True) as w:
        engines = armed(sims(w.aggregated))
        assert refused(await ask(w, completion(prompt=["one text", MARK])))
        assert dead(engines) == 2


async def test_a_stream_that_others_go_on_with_counts_its_engines() -> None:
    """They die behind its first data: two do, whatever `limits.continuations` is."""
    limits = {"continuations": 5, **UNBROKEN}
    async with world(0, 0, aggregated=5, limits=limits, leaves=True) as w:
        engines = armed(sims(w.aggregated), IN_THE_STREAM)
        for number in range(3):
            answer = await ask(w, killer(stream=True, max_tokens=30, user=MARK))
            assert b"error" in answer.body
            assert dead(engines) == min(2 + number, 3), (
                "its client gets one engine the second time, and none the third"
            )
        assert refused(answer)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_the_last_engine_of_a_role_is_not_risked(path: str, beside: bool) -> None:
    """It goes on with the requests of others; also where streams were under way beside it, which
    are not the cause.
    """
    body = killer() if path == COMPLETIONS else responses(input=MARK)
    async with (
        world(0, 0, aggregated=2, limits=UNBROKEN, leaves=True) as w,
        streams(w, 2 if beside else 0),
    ):
        engines = armed(sims(w.aggregated))
        for _ in range(2):
            assert refused(await ask(w, body, path)), "nor when its client sends it again"
            assert dead(engines) == 1
        assert (await ask(w, completion(), address="127.0.0.2")).text == TEXT
        for engine in engines:
            engine.faults.clear()
            if engine.life == "down":
                await engine.restart()
        await w.probe()
        assert (await ask(w, body, path)).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_the_last_engine_gets_what_was_long_at_a_lost_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that disappears long behind the beginning of a request does so by itself: its
    client sees only a delay.
    """
    monkeypatch.setattr(engines_lost, "SOON", -1.0)
    body = killer() if path == COMPLETIONS else responses(input=MARK)
    async with world(0, 0, aggregated=2, limits=UNBROKEN, leaves=True) as w:
        engines = sims(w.aggregated)
        armed(engines[:1])
        for _ in range(2):  # they take turns
            assert (await ask(w, body, path)).status == 200
        assert dead(engines) == 1


async def test_the_only_engine_of_a_role_gets_it_again() -> None:
    """It was started again, although it did not answer for a moment: nobody else can serve the
    request.
    """

    async def gone(_: str) -> bool:
        return False

    async with world(0, 0, aggregated=1, limits=UNBROKEN, leaves=True) as w:
        (engine,) = sims(w.aggregated)
        lost_of(w)._detector._is_alive = gone
        engine.faults.add(f"restart@queued:holds={MARK}")
        assert (await ask(w, killer())).status == 200


async def test_the_last_prefill_engine_is_not_risked() -> None:
    """One engine serves the prompt whole, as always where no prefill engine is left for it."""
    async with world(2, 2, limits=UNBROKEN, leaves=True) as w:
        prefills, decodes = armed(sims(w.prefill)), sims(w.decode)
        assert (await ask(w, killer())).status == 200
        assert (dead(prefills), dead(decodes)) == (1, 0)


async def test_it_comes_again() -> None:
    """Behind two lost engines it gets one, behind three none: it is named. Another client's request
    is served, and so is another request of its client, which is cleared by that.
    """
    async with world(0, 0, aggregated=6, limits=UNBROKEN, leaves=True) as w:
        engines = armed(sims(w.aggregated))
        for address, killed in (
            ("127.0.0.1", 2),
            ("127.0.0.2", 3),
            ("127.0.0.3", 3),
            ("127.0.0.1", 3),
        ):
            again = killer(stream=killed == 3, user=address)
            assert refused(await ask(w, again, address=address))
            assert dead(engines) == killed
        assert (await ask(w, completion())).text == TEXT
        assert w.metric("pdproxy_suspected", what="refused") == 1
        assert w.metric("pdproxy_engines_lost_total", requests="one") == 3
        assert w.metric("pdproxy_refusals_total", reason="engines_lost", status="503") == 4
        (name,) = {event.fingerprint for event in w.events(EngineLost)}
        assert [
            name in detail for detail in w.proxy.readiness().details if "fingerprint" in detail
        ] == [True]


async def test_many_bodies_of_one_client() -> None:
    """It has half of the engines, whatever it sends; others are served, and so is this client once
    it sends something else.
    """
    async with world(0, 0, aggregated=6, limits=UNBROKEN, leaves=True) as w:
        engines = armed(sims(w.aggregated))
        for number in range(12):
            assert refused(await ask(w, killer(number)))
        assert dead(engines) == 3
        assert w.metric("pdproxy_suspected", what="client") == 1
        assert (await ask(w, completion(), address="127.0.0.2")).text == TEXT
        for engine in engines:
            engine.faults.clear()
            if engine.life == "down":
                await engine.restart()
        await w.probe()
        assert (await ask(w, completion())).text == TEXT
        await until(lambda: w.metric("pdproxy_suspected", what="client") == 0)


async def test_a_limited_client_is_served_one_request_at_a_time() -> None:
    """Until one of them is answered: then all of them go on. Two may wait for that; more would hold
    the places of others.
    """
    async with world(0, 0, aggregated=8, limits=UNBROKEN, leaves=True) as w:
        armed(sims(w.aggregated))
        for number in range(2):
            await ask(w, killer(number))
        under_way: list[Reply] = []
        opened = asyncio.Event()

        async def held(reply: Reply) -> None:
            under_way.append(reply)
            await opened.wait()
            await reply.serve()

        for engine in w.aggregated:
            engine.default = held
        asked = [asyncio.ensure_future(ask(w, completion(seed=number))) for number in range(6)]
        await until(lambda: w.inflight == 3 and under_way and sum(one.done() for one in asked) == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(under_way) == 1
        opened.set()
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers].count(200) == 3
        assert all(
            answer.text == TEXT if answer.status == 200 else refused(answer) for answer in answers
        )


class Crowd:
    """Requests that are under way at the first engines; these die when the test says so, and others
    are there from then on.
    """

    def __init__(self, w: World, first: int = 1) -> None:
        self._w = w
        self._under_way = 0
        self._first, self._others = w.aggregated[:first], w.aggregated[first:]
        for engine in self._others:
            w.mark_down(engine, "later")
        for engine in self._first:
            engine.default = self._hold

    async def _hold(self, _: Reply) -> None:
        self._under_way += 1
        await asyncio.Event().wait()

    async def die(self, *bodies: dict[str, Any], addresses: int = 1) -> list[Answer]:
        """Send them, have the engines die, and return their answers."""
        asked = [
            asyncio.ensure_future(ask(self._w, body, address=f"127.0.0.{1 + number % addresses}"))
            for number, body in enumerate(bodies)
        ]
        await until(lambda: self._under_way == len(bodies))
        for engine in self._others:
            await self._w.proxy.prober.probe(self._w.proxy.engines[engine.url], scrape=True)
        for engine in self._first:
            await engine.sim.kill()
        return await asyncio.gather(*asked)


@pytest.mark.parametrize("place", [0, 3, 6])
async def test_honest_requests_beside_a_killer_are_served(place: int) -> None:
    """All were under way at one engine. The killer takes one more, alone; wherever it is among
    them.
    """
    async with world(0, 0, aggregated=3, limits={**UNBROKEN, "min_retries": 100}, leaves=True) as w:
        armed(sims(w.aggregated[1:]))
        bodies: list[dict[str, Any]] = [completion(seed=number) for number in range(6)]
        bodies.insert(place, killer())
        answers = await Crowd(w).die(*bodies, addresses=3)
        assert refused(answers.pop(place))
        assert [answer.text for answer in answers] == [TEXT] * 6
        assert dead(sims(w.aggregated)) == 2
        await until(lambda: w.metric("pdproxy_suspected", what="client") == 0)


async def test_killers_that_come_at_once_take_one_more_together() -> None:
    """Each ends the engine at which it is alone. The first that is tried again shows what they are:
    the others get none.
    """
    async with world(0, 0, aggregated=8, limits={**UNBROKEN, "min_retries": 100}, leaves=True) as w:
        armed(sims(w.aggregated[4:]))
        answers = await Crowd(w, 4).die(*[killer(number) for number in range(4)], addresses=4)
        assert all(refused(answer) for answer in answers)
        assert dead(sims(w.aggregated)) == 5
        assert (await ask(w, completion(), address="127.0.0.9")).text == TEXT


async def test_a_killer_that_is_known_comes_many_times_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its refusal is over. One copy after the other is served, so that the second one does not get
    an engine any more.
    """
    async with world(0, 0, aggregated=8, limits=UNBROKEN, leaves=True) as w:
        engines = armed(sims(w.aggregated))
        await ask(w, killer())
        await ask(w, killer(), address="127.0.0.2")
        assert dead(engines) == 3
        monkeypatch.setattr(
            Suspect, "refused_for", lambda self, now: 0.0 if self.losses == 3 else 60.0
        )
        answers = await asyncio.gather(
            *[ask(w, killer(), address=f"127.0.0.{number}") for number in range(3, 12)]
        )
        assert dead(engines) == 4
        assert all(refused(answer) for answer in answers)


async def test_it_comes_again_and_again_where_each_engine_is_busy() -> None:
    """Each engine has another client's request, so that no loss is of one request only: it takes as
    few as on an idle fleet.
    """
    async with world(0, 0, aggregated=8, limits={**UNBROKEN, "min_retries": 100}, leaves=True) as w:
        engines = armed(sims(w.aggregated))
        honest = "never ends"
        for engine in engines:
            engine.faults.add(f"stall@queued:rate=1,holds={honest}")
        others = []
        for number in range(8):
            body = completion(prompt=f"{honest} {number}")
            others.append(asyncio.ensure_future(ask(w, body, address=f"127.0.0.{10 + number}")))
            await until(
                lambda: (
                    sum(ledger_engine.requests for ledger_engine in w.proxy.ledger.engines)
                    == len(others)
                )
            )
        assert [ledger_engine.requests for ledger_engine in w.proxy.ledger.engines] == [1] * 8
        for killed in (2, 3, 3, 3):
            assert refused(await ask(w, killer()))
            assert dead(engines) == killed
        assert not any(other.done() for other in others), (
            "those that were there are tried again, or wait for that"
        )
        for other in others:
            other.cancel()


async def test_an_engine_that_dies_by_itself_is_nobodys_fault() -> None:
    """Those that were there are served by the only one that is left, and nothing is remembered of
    them.
    """
    async with world(0, 0, aggregated=2, limits={**UNBROKEN, "min_retries": 100}, leaves=True) as w:
        answers = await Crowd(w).die(
            *[completion(seed=number) for number in range(20)], addresses=4
        )
        assert [answer.text for answer in answers] == [TEXT] * 20
        await until(lambda: not lost_of(w).known.remembers)
        assert {event.several for event in w.events(EngineLost)} == {True}


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_who_lost_two_engines_by_chance_is_served_the_next_time(path: str) -> None:
    """It gets an error, comes again, gets an engine, and is cleared by its answer."""
    body = killer() if path == COMPLETIONS else responses(input=MARK)
    async with world(0, 0, aggregated=5, limits=UNBROKEN, leaves=True) as w:
        engines = armed(sims(w.aggregated))
        for again in (body, {**body, "stream": True}):
            assert refused(await ask(w, body, path))
            for engine in engines:
                engine.faults.clear()
            assert w.metric("pdproxy_suspected", what="one_engine") == 1
            assert (await ask(w, again, path)).status == 200
            await until(lambda: w.metric("pdproxy_suspected", what="one_engine") == 0)
            for engine in engines:
                if engine.life == "down":
                    await engine.restart()
            await w.probe()
            armed(engines)


async def test_an_answer_that_needs_no_core_clears_nobody() -> None:
    """The API server counts the tokens of a killer as of any other text."""
    async with world(0, 0, aggregated=8, limits=UNBROKEN, leaves=True) as w:
        engines = armed(sims(w.aggregated))
        for killed in (2, 3, 3):
            assert refused(await ask(w, killer()))
            assert dead(engines) == killed
            assert (await ask(w, killer(), "/tokenize")).status == 200


async def left_by(w: World, body: dict[str, Any], path: str, address: str) -> SimServer:
    """Have a client send a request that stalls, and leave. Return the engine that has the
    request.
    """
    before = {ledger_engine.url: ledger_engine.requests for ledger_engine in w.proxy.ledger.engines}
    at_engines = sum(before.values())
    client = await w.client(address=address)
    client.send(request("POST", path, body))
    await until(
        lambda: sum(ledger_engine.requests for ledger_engine in w.proxy.ledger.engines) > at_engines
    )
    (url,) = {
        ledger_engine.url
        for ledger_engine in w.proxy.ledger.engines
        if ledger_engine.requests > before[ledger_engine.url]
    }
    client.close()
    await until(
        lambda: (
            sum(ledger_engine.requests for ledger_engine in w.proxy.ledger.engines) == at_engines
        )
    )
    return next(engine for engine in sims(w.aggregated) if engine.url == url)


def stalling(w: World) -> None:
    for engine in sims(w.aggregated):
        engine.faults.add(f"stall@queued:rate=1,holds={MARK}")
        engine.faults.add(f"stall@queued:rate=1,holds={MARK},path={RESPONSES}")


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_who_leaves_before_the_engine_dies_is_counted(path: str, beside: bool) -> None:
    """Nobody waits for the request's answer then: probes find the engine down, or streams that were
    beside it.
    """
    body = killer() if path == COMPLETIONS else responses(input=MARK)
    limits = {**UNBROKEN, "continuations": 0}
    async with (
        world(0, 0, aggregated=6, limits=limits, leaves=True) as w,
        streams(w, 6 if beside else 0),
    ):
        stalling(w)
        for losses in (1, 2, 3):
            await (await left_by(w, body, path, "127.0.0.1")).kill()
            await w.probe()
            expected = [*range(1, losses + 1)]
            await until(
                lambda: [event.losses for event in w.events(EngineLost) if event.losses] == expected  # noqa: B023
            )
            await until(
                lambda: (
                    sum(engine.requests for engine in w.proxy.ledger.engines)
                    == (beside and 6 - losses)  # noqa: B023
                )
            )
        assert refused(await ask(w, body, path, "127.0.0.2"))
        assert dead(sims(w.aggregated)) == 3


async def test_who_is_beside_one_that_has_left_is_not_blamed() -> None:
    """The loss is of both: it counts for neither."""
    async with world(0, 0, aggregated=1, limits=UNBROKEN, leaves=True) as w:
        stalling(w)
        asked = asyncio.ensure_future(ask(w, killer(), address="127.0.0.2"))
        await until(lambda: sum(engine.requests for engine in w.proxy.ledger.engines) == 1)
        await (await left_by(w, killer(1), COMPLETIONS, "127.0.0.1")).kill()
        await until(lambda: len(w.events(EngineLost)) == 2)
        assert {event.several for event in w.events(EngineLost)} == {True}
        await until(lambda: not lost_of(w).known.remembers)
        asked.cancel()


async def test_an_engine_that_answers_late_is_not_lost() -> None:
    """Also where probes have less time than the question whether it is there."""
    async with world(0, 0, aggregated=1, deadlines={"probe": 0.05}, leaves=True) as w:
        (engine,) = sims(w.aggregated)
        engine.faults.add("stall@queued:path=/health")
        assert await lost_of(w)._detector._is_alive(engine.url)
        await engine.kill()
        assert not await lost_of(w)._detector._is_alive(engine.url)


async def test_what_is_no_loss() -> None:
    """Broken connections of engines that are there, errors, and engines that are drained: the third
    engine is tried.
    """
    async with world(0, 0, aggregated=3, limits=UNBROKEN, leaves=True) as w:
        for faults in (["reset@queued", "eof@queued"], ["status@queued", "reset@queued"]):
            for engine, fault in zip(sims(w.aggregated), faults, strict=False):
                engine.faults.add(fault)
            assert (await ask(w, completion())).text == TEXT
            assert (await ask(w, completion())).text == TEXT
            for engine in sims(w.aggregated):
                engine.faults.clear()
        gone: list[FakeEngine] = []

        async def script(reply: Reply) -> None:
            if len(gone) == 2:
                await reply.serve()
            else:
                gone.append(reply.engine)
                for one in w.workers:
                    one.ledger.mark_draining(reply.engine.url, "rolling restart")
                reply.engine.stop()

        for one in w.aggregated:
            one.default = script
        assert (await ask(w, completion())).text == TEXT
        assert len(gone) == 2
        assert not w.events(EngineLost)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
async def test_an_engine_whose_core_has_died_is_lost(version: str) -> None:
    """Its API server says so, and stays for a while."""
    async with world(
        0, 0, aggregated=5, limits=UNBROKEN, facts={"version": version}, leaves=True
    ) as w:
        engines = armed(sims(w.aggregated), f"dead_core@queued:rate=1,holds={MARK}")
        assert refused(await ask(w, killer()))
        assert sum(engine.engine.dead for engine in engines) == 2
        assert (await ask(w, completion())).text == TEXT


async def test_what_is_remembered_is_bounded() -> None:
    """Of fingerprints, clients and engines."""
    async with world(0, 0, aggregated=1, leaves=True, clock=ManualClock()) as w:
        lost = lost_of(w)
        (engine,) = w.proxy.ledger.engines

        async def gone(_: str) -> bool:
            return False

        lost._detector._is_alive = gone
        for number in range(MOST_KEPT + 5):
            headers = LegHeaders(str(number), COMPLETIONS, (), (), client=str(number))
            engine.run_number = 10**6 + number
            lost.broke(headers, engine, lost._now(), streamed=False)
            await lost.judge(headers, b"%d" % number)
        assert (len(lost._fingerprints), len(lost._clients), len(lost._detector._losses)) == (
            MOST_KEPT,
        ) * 3
