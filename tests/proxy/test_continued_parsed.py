"""Chats whose events a parser makes go on behind any of their tokens, where engines derender: the
client sees one stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdproxy.observe.events import LegFailed, StreamContinued
from pdproxy.settings.health import Continuations
from pdproxy.settings.schema import Settings
from pdproxy.transfer.parsed_events import DERENDER, RENDER
from tests.fakes.client import Answer
from tests.fakes.clock import STEP, ManualClock
from tests.fakes.garbage import left_to_the_collector
from tests.fakes.world import CHAT, World, chat, until, world
from tests.proxy.test_continued import PLACES, RUNNING, TOKENS, UNBROKEN, USAGE

pytestmark = pytest.mark.timeout(120, method="thread")

KINDS = ["reasoning", "tools"]
CITIES = [
    "a city with a long name, so that its arguments have many tokens of their own",
    "Köln am Rhein 日本語 🦊 ﬁn",
]
SCALED = {"enable_scale_out": True, "eos_every": 0}
FACTS: dict[str, dict[str, Any]] = {
    "reasoning": SCALED | {"reasoning_parser": "deepseek_r1"},
    "tools": SCALED,
}


def tool(number: int) -> dict[str, Any]:
    """A tool. Whether the model calls it depends on the end of the prompt."""
    properties = {"city": {"enum": CITIES}, "days": {"type": "integer"}, "of": {"enum": CITIES}}
    return {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": properties, "title": f"t {number}"},
        },
    }


def body_of(kind: str, **fields: Any) -> dict[str, Any]:
    """A chat of a kind, whose answer has thoughts or a call."""
    made = chat(stream=True, max_tokens=TOKENS, stream_options=USAGE) | fields
    return made if kind == "reasoning" else made | {"tools": [tool(0)]}


def told(answer: Answer) -> dict[str, Any]:
    """What a client has in the end."""
    found: dict[str, Any] = {
        "reasoning": "",
        "content": "",
        "calls": {},
        "finish": None,
        "usage": None,
        "done": False,
    }
    shown: set[Any] = set()
    for event in answer.events:
        payload = event.removeprefix(b"data: ").strip()
        if payload == b"[DONE]":
            found["done"] = True
            continue
        body = json.loads(payload)
        assert "error" not in body, body
        shown.add((body["id"], body["object"], body["created"], body["model"]))
        found["usage"] = body.get("usage") or found["usage"]
        for choice in body["choices"]:
            delta = choice["delta"]
            found["reasoning"] += delta.get("reasoning") or ""
            found["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                one = found["calls"].setdefault(
                    call["index"], {"ids": [], "name": "", "arguments": ""}
                )
                one["ids"] += [call["id"]] if call.get("id") else []
                one["name"] += call["function"].get("name") or ""
                one["arguments"] += call["function"].get("arguments") or ""
            found["finish"] = choice["finish_reason"] or found["finish"]
            assert choice.get("token_ids") is None
    assert len(shown) == 1, "one id, one time"
    return found


def same(found: dict[str, Any]) -> dict[str, Any]:
    """What does not differ between two answers: the ids of calls are random, and details of a
    continued answer are missing.
    """
    usage = {name: value for name, value in found["usage"].items() if not name.endswith("details")}
    calls = {index: call | {"ids": len(call["ids"])} for index, call in found["calls"].items()}
    return found | {"usage": usage, "calls": calls}


async def asked(w: World, body: dict[str, Any]) -> dict[str, Any]:
    answer = await w.ask(CHAT, body)
    assert answer.status == 200, answer.body
    assert answer.body.count(b'"role"') == 1
    assert answer.body.count(b'"system_fingerprint"') == 1
    assert answer.ended
    found = told(answer)
    assert found["done"]
    return found


def broken(answer: Answer) -> dict[str, Any]:
    """The error with which a stream ends."""
    assert b"[DONE]" not in answer.body
    error: dict[str, Any] = json.loads(answer.events[-1].removeprefix(b"data: "))["error"]
    return error


def with_(wanted: Continuations) -> Callable[[Settings], Settings]:
    """Return what puts settings into those of a world."""
    return lambda found: msgspec.structs.replace(found, continuations=wanted)


def results(w: World) -> list[tuple[str, str]]:
    return [(event.result, event.reason) for event in w.events(StreamContinued)]


async def cut(w: World, fault: str, body: dict[str, Any]) -> Any:
    """Ask until the fault has happened to the first engine of an answer."""
    engine = (w.decode or w.aggregated)[0]
    before = len(results(w))
    engine.sim.faults.add(fault)
    for _ in range(4):
        found = await asked(w, body)
        if len(results(w)) > before:
            return found
    raise AssertionError("the fault has not happened")


async def calling(w: World, body: dict[str, Any]) -> dict[str, Any]:
    """A chat like `body` whose answer is a call."""
    for number in range(20):
        one = body | {"tools": [tool(number)]}
        if (await asked(w, one))["calls"]:
            return one
    raise AssertionError("no call")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "alone"])
@pytest.mark.parametrize("fault", ["reset", "eof", "half_chunk", "error_event", "abort_finish"])
async def test_any_cut(kind: str, split: bool, fault: str) -> None:
    """Cut behind each event in turn: the same reasoning, content and call, finish reason and
    usage.
    """
    roles = {"prefill": 1, "decode": 2} if split else {"prefill": 0, "decode": 0, "aggregated": 2}
    async with world(**roles, limits=UNBROKEN, facts=FACTS[kind]) as w:  # type: ignore[arg-type]
        body = body_of(kind)
        if kind == "tools":
            body = await calling(w, body)
        expected = await asked(w, body)
        places = [one for one in PLACES if one < expected["usage"]["completion_tokens"] - 1]
        for events in places:
            found = await cut(w, f"{fault}@mid_stream:events={events}", body)
            assert same(found) == same(expected), events
        assert {result for result, _ in results(w)} == {"continued"}
        assert len(places) > 3
        await w.quiet()
        assert w.proxy.service.resources.records is not None
        assert w.proxy.service.resources.records.held == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [None, RUNNING])
async def test_options_of_the_usage(kind: str, options: Any) -> None:
    """The client gets a usage if it asked for one, in each event if it asked for that."""
    async with world(decode=2, limits=UNBROKEN, facts=FACTS[kind]) as w:
        body = body_of(kind, stream_options=options)
        expected = await asked(w, body)
        found = await cut(w, "reset@mid_stream:events=3", body)
        assert (found["usage"] is None) is (options is None)
        assert found["finish"] == expected["finish"]
        assert (found["content"], found["reasoning"]) == (
            expected["content"],
            expected["reasoning"],
        )


async def test_the_id_of_a_call_stays() -> None:
    """A call that was cut behind its name goes on as the same call; one that had not begun gets an
    id once.
    """
    async with world(decode=2, limits=UNBROKEN, facts=FACTS["tools"]) as w:
        body = await calling(w, body_of("tools"))
        for events in (1, 8, 20):
            found = await cut(w, f"reset@mid_stream:events={events}", body)
            (call,) = found["calls"].values()
            assert len(call["ids"]) == 1
            assert call["ids"][0].startswith("chatcmpl-tool-")
            assert call["name"] == "weather"


async def test_a_slow_parser_gets_what_came_meanwhile_in_one_call() -> None:
    async with world(decode=2, limits=UNBROKEN, facts=FACTS["reasoning"]) as w:
        body = body_of("reasoning")
        expected = await asked(w, body)
        for engine in w.engines:
            engine.sim.faults.add(
                "slow@queued:path=/v1/chat/completions/derender,next=1000,delay=0.05"
            )
        found = await cut(w, "reset@mid_stream:events=3", body)
        assert same(found) == same(expected)
        calls = sum(
            n
            for engine in w.engines
            for what, n in engine.sim.faults.happened.items()
            if "slow" in what
        )
        assert 1 < calls < TOKENS / 2


@pytest.mark.parametrize("failing", [1, 9])
async def test_an_engine_that_does_not_parse(failing: int) -> None:
    """Another one is asked then; if that fails, too, the stream ends with an error."""
    async with world(decode=2, limits=UNBROKEN, facts=FACTS["reasoning"]) as w:
        body = body_of("reasoning")
        expected = await asked(w, body)
        for engine in w.engines[:failing]:
            engine.sim.faults.add(
                "status@queued:path=/v1/chat/completions/derender,next=1000,status=500"
            )
        w.decode[0].sim.faults.add("reset@mid_stream:events=5")
        for _ in range(3):
            answer = await w.ask(CHAT, body)
            if results(w):
                break
        if failing == 1:
            assert same(told(answer)) == same(expected)
            assert results(w) == [("continued", "eof")]
        else:
            assert "no engine has parsed the answer" in broken(answer)["message"]
            assert [reason for _, reason in results(w)] == ["eof", "derender"]
            assert {event.node for event in w.events(LegFailed)} == {w.decode[0].url}, (
                "the other one has not failed"
            )
        await w.quiet()


async def test_a_second_failure() -> None:
    """The third engine goes on with the second one's completion, and the same parser reads both."""
    async with world(
        decode=3, limits=UNBROKEN | {"continuations": 2}, facts=FACTS["reasoning"]
    ) as w:
        body = body_of("reasoning")
        expected = await asked(w, body)
        for engine in w.decode:
            engine.sim.faults.add("reset@mid_stream:events=7,next=1")
        w.decode[2].sim.faults.clear()
        for _ in range(3):
            found = await asked(w, body)
            if len(results(w)) == 2:
                break
            w.decode[0].sim.faults.add("reset@mid_stream:events=7,next=1")
            w.decode[1].sim.faults.add("reset@mid_stream:events=7,next=1")
        assert same(found) == same(expected)


@pytest.mark.parametrize(
    ("kind", "fields", "settings", "reason"),
    [
        ("tools", {}, {"parsed": "off"}, "tools"),
        ("reasoning", {}, {"parsed": "off"}, "reasoning_seen"),
        ("reasoning", {}, {"max_parsed_tokens": 20}, "too_long"),
        ("reasoning", {"stop": ["zz 78"]}, {}, "reasoning_seen"),
        ("reasoning", {"ignore_eos": True}, {}, "reasoning_seen"),
        ("tools", {"stop": ["zz 78"]}, {}, "tools"),
        ("tools", {"tool_choice": "required"}, {}, "tools"),
    ],
)
async def test_what_is_refused(
    kind: str, fields: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    made = Continuations(**settings)
    async with world(decode=2, limits=UNBROKEN, facts=FACTS[kind], adjust=with_(made)) as w:
        w.decode[0].sim.faults.add("reset@mid_stream:events=5")
        for _ in range(3):
            answer = await w.ask(CHAT, body_of(kind, **fields))
            if results(w):
                break
        assert broken(answer)
        assert results(w) == [("refused", reason)]
        assert w.metric("pdproxy_continuations_total", result="refused", reason=reason) == 1
        await w.quiet()


async def test_one_engine_that_does_not_derender() -> None:
    """It might be the only one left when a stream is cut: the ids of chats with tools are not asked
    for.
    """

    def refuses(w: World) -> None:
        w.decode[1].sim.faults.add(f"status@queued:path={DERENDER},next=9,status=403")

    async with world(decode=2, limits=UNBROKEN, facts=FACTS["tools"], before=refuses) as w:
        w.decode[0].sim.faults.add("reset@mid_stream:events=5")
        for _ in range(3):
            await w.ask(CHAT, body_of("tools"))
        assert results(w) == [("refused", "tools")]
        sent = [
            request.json
            for engine in w.decode
            for request in engine.requests
            if request.path == CHAT
        ]
        assert sent
        assert not any("return_token_ids" in one for one in sent)


async def test_an_answer_that_becomes_too_long() -> None:
    async with world(
        decode=2,
        limits=UNBROKEN,
        facts=FACTS["reasoning"],
        adjust=with_(Continuations(max_parsed_tokens=70)),
    ) as w:
        w.decode[0].sim.faults.add("reset@mid_stream:events=5")
        for _ in range(3):
            answer = await w.ask(CHAT, body_of("reasoning"))
            if results(w):
                break
        assert "more than 70 tokens" in broken(answer)["message"]
        assert results(w) == [("continued", "eof"), ("failed", "derender")]
        assert {event.node for event in w.events(LegFailed)} == {w.decode[0].url}, (
            "the other one has not failed"
        )
        await w.quiet()


async def test_engines_that_parse_too_late() -> None:
    """No longer than `deadlines.between_tokens` for one call, whichever engines are asked."""
    clock = ManualClock()
    facts = FACTS["reasoning"]
    async with world(
        decode=2, clock=clock, facts=facts, leaves=True, deadlines={"between_tokens": 7}
    ) as w:
        for engine in w.engines:
            engine.sim.faults.add(f"stall@queued:path={DERENDER},next=9")
        w.decode[0].sim.faults.add("reset@mid_stream:events=5")
        for _ in range(2):
            answer = await clock.through(w.ask(CHAT, body_of("reasoning")), STEP)
            if results(w):
                break
        assert "no engine has parsed the answer" in broken(answer)["message"]
        assert results(w) == [("continued", "eof"), ("failed", "derender")]
        assert w.metric("pdproxy_deadline_total", wait="between_tokens") == 2, (
            "one per engine, each with half of the time"
        )


@pytest.mark.parametrize("path", [RENDER, DERENDER])
async def test_a_client_that_leaves_while_an_engine_is_asked(path: str) -> None:
    async with world(
        decode=1, aggregated=1, limits=UNBROKEN, facts=FACTS["reasoning"], leaves=True
    ) as w:
        for engine in w.engines:
            engine.sim.faults.add(f"stall@queued:path={path},next=9")
        w.decode[0].sim.faults.add("reset@mid_stream:events=5")
        client = await w.client()
        client.post(CHAT, body_of("reasoning"))
        await until(
            lambda: any("stall@queued" in engine.sim.faults.happened for engine in w.engines)
        )
        client.close()
        assert (await w.ended(1)).outcome == "client_left"
        await w.quiet()
        assert w.metric("pdproxy_held_bytes", what="records") == 0


@pytest.mark.parametrize("failing", [False, True])
async def test_no_garbage(failing: bool) -> None:
    """What is left when a stream was parsed, or could not be, is freed at once."""
    async with world(decode=2, limits=UNBROKEN, facts=FACTS["reasoning"]) as w:
        body = body_of("reasoning")
        if failing:
            for engine in w.engines:
                engine.sim.faults.add(f"status@queued:path={DERENDER},next=1000,status=500")

        async def one() -> None:
            w.decode[0].sim.faults.add("reset@mid_stream:events=5")
            before = len(results(w))
            while len(results(w)) == before:
                await w.ask(CHAT, body)
            await w.quiet()

        await one()
        with left_to_the_collector() as found:
            await one()
        assert not found
