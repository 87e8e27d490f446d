"""Silence is not death: an engine that works on a request and sends nothing is waited for, on every
route.
"""

# The engines compute in real time, the proxy's deadlines are a manual clock's: minutes of silence
# take seconds here.

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import LegFailed, SilenceAllowed
from pdproxy.serving.stream.comments import COMMENT
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.faults.moments import Moment
from tests.fakes.client import Answer
from tests.fakes.pool import Pair
from tests.fakes.world import until
from tests.proxy.test_both_legs import PUSH
from tests.proxy.test_connectors import CHAT, COMPLETIONS, TEXT, chat, completion
from tests.proxy.watched import LOOK, Watched, watched

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SLOW = {"hardware": Hardware(prefill_tokens_per_s=1e9, decode_step_s=0.02, transfer_latency_s=0.0)}
"""An engine that takes two seconds for a hundred tokens."""
SLOWER = {
    "hardware": Hardware(prefill_tokens_per_s=1e9, decode_step_s=0.04, transfer_latency_s=0.0)
}
"""An engine that still has two seconds of work in the middle of its stream: a busy machine needs
them to reach a deadline.
"""
DEADLINES = {
    "first_token": 4.0,
    "between_tokens": 3.0,
    "prefill": 4.0,
    "total": 600.0,
    "stream_comment": 0.0,
}
TOKENS = 100
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: completion(max_tokens=TOKENS, stream=True),
    CHAT: chat(max_tokens=TOKENS, stream=True),
    MESSAGES: {
        "model": "tiny",
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "messages": [{"role": "user", "content": TEXT}],
    },
    RESPONSES: {
        "model": "tiny",
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "input": TEXT,
    },
}


async def while_it_works(
    w: Watched, asked: asyncio.Future[Answer], pause: float = 0.02, most: int = 400
) -> Answer:
    """Let time pass much faster than engines work, until the answer is there. `pause`: real seconds
    for each of `LOOK`.
    """
    for _ in range(most):
        if asked.done():
            break
        await w.pass_(LOOK)
        await asyncio.sleep(pause)
    return await asked


def on_all(w: Watched, fault: PlannedFault) -> None:
    """Arm a fault of streams on both engines: either may serve a route alone."""
    for sim in w.sims:
        sim.faults.add(fault)


def data(answer: Answer) -> list[bytes]:
    """The events of a stream without comments, and without what differs from answer to answer."""
    return [event for event in answer.body.split(b"\n\n") if event and not event.startswith(b":")]


def said(answer: Answer) -> str:
    """The text of a stream of any route."""
    found = ""
    for event in data(answer):
        line = event.split(b"data: ", 1)[-1]
        if line == b"[DONE]":
            continue
        body = json.loads(line)
        for choice in body.get("choices", ()):
            found += choice.get("text") or choice.get("delta", {}).get("content") or ""
        delta = body.get("delta")
        found += delta if isinstance(delta, str) else (delta or {}).get("text") or ""
    return found


def failures(pair: Pair) -> list[LegFailed]:
    return pair.world.events(LegFailed)


@pytest.mark.parametrize(
    ("path", "moment"),
    [
        *(
            (path, moment)
            for path in (COMPLETIONS, CHAT)
            for moment in ("head", "before_first_token", "mid_stream")
        ),
        *((MESSAGES, moment) for moment in ("head", "mid_stream")),
        (RESPONSES, "head"),
    ],
)
async def test_an_engine_that_works_and_says_nothing(path: str, moment: Moment) -> None:
    """As a parser of tool calls does for a whole argument: the answer is whole and right, and no
    failure is counted.
    """
    async with watched(everybody=SLOW if moment == "head" else SLOWER, deadlines=DEADLINES) as w:
        plain = await w.pair.asked_plain(path, BODIES[path])
        on_all(w, PlannedFault(kind="join", at=moment, path=path, stream=True, args={"count": 0}))
        answer = await while_it_works(w, asyncio.ensure_future(w.pair.ask(path, BODIES[path])))
        assert answer.status == 200
        assert said(answer) == said(plain)
        assert w.world.events(SilenceAllowed)
        assert not failures(w.pair)
        assert [engine.in_ledger.failures for engine in w.world.proxy.engines.values()] == [0, 0]
        assert w.stalled == []


@pytest.mark.parametrize(
    ("path", "moment", "wait"),
    [
        (COMPLETIONS, "mid_stream", "between_tokens"),
        (CHAT, "head", "first_token"),
        (RESPONSES, "head", "first_token"),
    ],
)
async def test_an_answer_that_was_lost_in_an_engine_that_works(
    path: str, moment: Moment, wait: str
) -> None:
    """The engine reports that it has nothing to do: the deadline stands."""
    async with watched(
        everybody=SLOW, deadlines=DEADLINES, limits={"continuations": 0, "attempts": 1}
    ) as w:
        on_all(w, PlannedFault(kind="stall", at=moment, path=path, stream=True))
        answer = await while_it_works(w, asyncio.ensure_future(w.pair.ask(path, BODIES[path])))
        assert b"error" in answer.body
        assert w.world.metric("pdproxy_deadline_total", wait=wait) == 1
        assert len(failures(w.pair)) == 1


async def test_an_engine_that_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last engine of its role is not taken out of use; its silent streams have their
    deadlines.
    """
    async with watched(
        everybody=SLOW, deadlines=DEADLINES, limits={"continuations": 0, "attempts": 1}
    ) as w:
        frozen, asked = await w.frozen_by("decode", "mid_stream", BODIES[COMPLETIONS])
        answer = await while_it_works(w, asked)
        assert b"error" in answer.body
        assert w.stalled == []
        await frozen.thaw_core()


BOTH_ORDERS = [
    ("nixl", None),
    (PUSH, "sequential"),
    (PUSH, "concurrent"),
    ("mooncake", "concurrent"),
    ("cpu", None),
]


@pytest.mark.parametrize(("connector", "dispatch"), BOTH_ORDERS)
async def test_a_prefill_that_takes_longer_than_its_deadline(connector: str, dispatch: Any) -> None:
    """A long prompt, in steps: the prefill engine works on. A decode engine that waits for its push
    does, too.
    """
    slow = {
        "hardware": Hardware(prefill_tokens_per_s=60.0, decode_step_s=0.0, transfer_latency_s=0.0),
        "max_num_batched_tokens": 8,
    }
    async with watched(connector, p=slow, deadlines=DEADLINES, dispatch=dispatch) as w:
        plain = await w.pair.asked_plain(COMPLETIONS, completion(stream=True))
        asked = asyncio.ensure_future(w.pair.ask(COMPLETIONS, completion(stream=True)))
        answer = await while_it_works(w, asked, pause=0.2)  # a step takes as long
        assert answer.text == plain.text
        assert "prefill" in {event.wait for event in w.world.events(SilenceAllowed)}
        assert not failures(w.pair)


@pytest.mark.parametrize(("connector", "dispatch"), BOTH_ORDERS)
async def test_a_queue_at_the_decode_engine(connector: str, dispatch: Any) -> None:
    """The request waits for a place behind another one, for longer than the deadline of its first
    data.
    """
    one_place = SLOW | {"max_num_seqs": 1}
    async with watched(connector, d=one_place, deadlines=DEADLINES, dispatch=dispatch) as w:
        before = asyncio.ensure_future(w.pair.ask(COMPLETIONS, BODIES[COMPLETIONS]))
        await until(lambda: w.pair.d.engine.stats.running == 1)
        body = completion(prompt="other words " * 40, stream=True)
        plain = await w.pair.asked_plain(COMPLETIONS, body)
        asked = asyncio.ensure_future(w.pair.ask(COMPLETIONS, body))
        await until(lambda: w.pair.d.engine.stats.waiting == 1)
        answer = await while_it_works(w, asked)
        assert answer.text == plain.text
        assert (await before).status == 200
        assert "first_token" in {event.wait for event in w.world.events(SilenceAllowed)}
        assert not failures(w.pair)


@pytest.mark.parametrize(
    ("connector", "dispatch"),
    [(PUSH, "sequential"), (PUSH, "concurrent"), ("mooncake", "concurrent")],
)
async def test_a_push_behind_a_long_step(connector: str, dispatch: Any) -> None:
    """The prefill engine has answered, and computes for others before it pushes: it is seen to be
    in use. The leg waits.
    """
    async with watched(
        connector, 0.5, deadlines=DEADLINES, dispatch=dispatch, limits={"attempts": 1}
    ) as w:
        wanted = (await w.pair.asked_plain(COMPLETIONS, completion())).text
        frozen, asked = await w.frozen_by("prefill", "after", completion(stream=True))
        for _ in range(4):
            await w.pass_(LOOK)
            await asyncio.sleep(0.3)
        if not asked.done():
            assert w.stalled == []
        await frozen.thaw_core()
        answer = await while_it_works(w, asked)
        assert (answer.status, answer.text) == (200, wanted)
        assert not failures(w.pair)


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
async def test_a_push_that_is_lost_by_an_engine_that_works(dispatch: Any) -> None:
    """Nothing else would end the wait: the deadline does, and the request is served again."""
    async with watched(PUSH, deadlines=DEADLINES, dispatch=dispatch) as w:
        wanted = (await w.pair.asked_plain(COMPLETIONS, completion())).text
        w.pair.p.faults.add("load_failure@handed_over")
        answer = await while_it_works(
            w, asyncio.ensure_future(w.pair.ask(COMPLETIONS, completion(stream=True)))
        )
        assert (answer.status, answer.text) == (200, wanted)
        assert [failure.phase for failure in failures(w.pair)] == ["decode"]
        assert w.world.metric("pdproxy_deadline_total", wait="first_token") == 1


async def test_reasoning_that_the_client_does_not_want() -> None:
    """The engine sends nothing while it thinks."""
    thinks = SLOW | {"reasoning_parser": "deepseek_r1"}
    async with watched(everybody=thinks, deadlines=DEADLINES) as w:
        body = chat(stream=True, include_reasoning=False, max_tokens=TOKENS)
        plain = await w.pair.asked_plain(CHAT, body)
        answer = await while_it_works(w, asyncio.ensure_future(w.pair.ask(CHAT, body)))
        assert answer.status == 200
        assert said(answer) == said(plain)
        assert not failures(w.pair)


POISON: dict[str, tuple[str, str, dict[str, Any]]] = {
    "decode leg": ("decode", COMPLETIONS, completion(stream=True)),
    "prefill leg": ("prefill", COMPLETIONS, completion(stream=True)),
    "alone": ("decode", COMPLETIONS, completion(echo=True)),
    "passed": ("decode", RESPONSES, BODIES[RESPONSES]),
}


@pytest.mark.parametrize(("role", "path", "body"), POISON.values(), ids=POISON)
async def test_a_request_under_which_two_engines_stand_still_gets_no_third(
    role: str, path: str, body: dict[str, Any]
) -> None:
    """The request may be the cause. Others are served meanwhile."""
    three: dict[str, Any] = {"prefills": 3} if role == "prefill" else {"decodes": 3}
    deadlines = DEADLINES | {"first_token": 60.0, "prefill": 30.0}
    async with watched(deadlines=deadlines, limits={"attempts": 5}, **three) as w:
        mine = [sim for sim in w.sims if sim.facts.role == role]
        for sim in mine:
            sim.faults.add(f"core_freeze@queued:path={path}")
        asked = asyncio.ensure_future(w.pair.ask(path, body))
        answer = await while_it_works(w, asked)
        assert answer.status == 504
        frozen = [sim for sim in mine if sim.engine.stops.any]
        assert len(frozen) == 2
        assert len(w.stalled) == 2
        for sim in mine:
            sim.faults.clear()
        plain = await w.pair.asked_plain(COMPLETIONS, completion())
        assert (await w.pair.ask(COMPLETIONS, completion())).text == plain.text
        for sim in frozen:
            await sim.thaw_core()


@pytest.mark.parametrize("path", BODIES)
async def test_comments_while_nothing_else_comes(path: str) -> None:
    """Before the first data and between events, at most twice the setting apart; the events are as
    without.
    """
    async with watched(everybody=SLOW, deadlines=DEADLINES | {"stream_comment": 2.0}) as w:
        plain = await w.pair.asked_plain(path, BODIES[path])
        on_all(w, PlannedFault(kind="join", at="head", path=path, stream=True, args={"count": 0}))
        answer = await while_it_works(w, asyncio.ensure_future(w.pair.ask(path, BODIES[path])))
        assert answer.status == 200
        assert (answer.header("content-type") or "").startswith("text/event-stream")
        assert answer.body.count(COMMENT) >= 2
        assert said(answer) == said(plain)
        assert data(answer)[-1] == data(plain)[-1] or path in (MESSAGES, RESPONSES)


REFUSED: dict[str, Callable[[Answer], bytes]] = {
    COMPLETIONS: lambda answer: data(answer)[-1],
    CHAT: lambda answer: data(answer)[-1],
}


@pytest.mark.parametrize("path", REFUSED)
async def test_an_error_behind_a_comment_is_an_event(path: str) -> None:
    """The status was sent with the comment."""
    async with watched(
        everybody=SLOW, deadlines=DEADLINES | {"stream_comment": 1.0}, limits={"attempts": 1}
    ) as w:
        gate = asyncio.Event()

        async def refuses(reply: Any) -> None:
            await gate.wait()
            await reply.whole(
                b'{"error":{"message":"no","type":"BadRequestError","param":"top_p","code":400}}',
                400,
            )

        w.pair.d.faults.script(refuses)
        before = len(w.pair.d.requests)
        asked = asyncio.ensure_future(w.pair.ask(path, BODIES[path]))
        await until(lambda: len(w.pair.d.requests) > before)
        for _ in range(3):
            await w.pass_(LOOK)
        gate.set()
        answer = await asked
        assert answer.status == 200
        assert answer.body.startswith(COMMENT)
        assert json.loads(data(answer)[0].removeprefix(b"data: "))["error"]["message"] == "no"
        assert b"[DONE]" not in answer.body


async def test_a_whole_answer_gets_no_comment() -> None:
    async with watched(everybody=SLOW, deadlines=DEADLINES | {"stream_comment": 1.0}) as w:
        body = completion(max_tokens=TOKENS)
        answer = await while_it_works(w, asyncio.ensure_future(w.pair.ask(COMPLETIONS, body)))
        assert answer.status == 200
        assert answer.body[:1] != b":"
        assert answer.json["usage"]["completion_tokens"] == TOKENS
