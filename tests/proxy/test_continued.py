"""A stream whose engine fails after its first data goes on: the client gets the same as without the
failure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from pdproxy.observe.events import StreamContinued
from pdproxy.scheduling.ledger_engine import EngineSpec, Role
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Answer
from tests.fakes.clock import STEP, ManualClock
from tests.fakes.pool import pool
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, World, chat, completion, world
from tests.proxy.test_connectors import CONNECTORS
from tests.proxy.test_registered import KINDS, run

TOKENS = 64
ALL = os.environ.get("PDPROXY_TEST_MOMENTS") == "all"
PLACES = range(1, TOKENS) if ALL else (1, 2, 4, 7, 17, 40, 62, 63)
"""Behind how many events a stream is cut; `.ci/full` takes all. The 64 tokens have letters of two,
three and four of them.
"""
UNBROKEN = {"breaker_failures": 1_000_000}
"""One engine fails again and again here."""
SILENT = ("stall", "freeze", "no_fin")
USAGE = {"include_usage": True}
RUNNING = {"include_usage": True, "continuous_usage_stats": True}


def whole(answer: Answer) -> tuple[str, Any, list[Any], set[Any], bool]:
    """What a client has in the end: text, finish reason, usages, what all events show, whether the
    end mark came.
    """
    text, finish = "", None
    usages: list[Any] = []
    shown: set[Any] = set()
    for event in answer.events:
        payload = event.removeprefix(b"data: ").strip()
        if payload == b"[DONE]":
            return text, finish, usages, shown, True
        body = json.loads(payload)
        assert "error" not in body, body
        shown.add((body["id"], body["object"], body["created"], body["model"]))
        if "usage" in body and (not usages or usages[-1] != body["usage"]):
            usages.append(body["usage"])
        for choice in body["choices"]:
            part = choice.get("delta", choice)
            text += part.get("content") or part.get("text") or ""
            finish = choice["finish_reason"] or finish
            assert choice.get("token_ids") is None
    return text, finish, usages, shown, False


async def asked(w: World, path: str, body: dict[str, Any]) -> tuple[str, Any, list[Any]]:
    """Ask, and check that one whole stream came."""
    answer = await w.ask(path, body)
    assert answer.status == 200, answer.body
    text, finish, usages, shown, done = whole(answer)
    assert (done, answer.ended) == (True, True)
    assert len(shown) == 1, "one id, one time"
    assert answer.body.count(b'"role"') == (path == CHAT)
    assert answer.body.count(b'"system_fingerprint"') == 1
    return text, finish, usages


def places(path: str, split: bool) -> Sequence[int]:
    """Where a fault cuts. The four ways to be asked share the places; `.ci/full` has each of them
    at all.
    """
    return PLACES if ALL else PLACES[2 * (path == CHAT) + split :: 4]


def results(w: World) -> list[tuple[str, str]]:
    """What became of streams whose engine failed."""
    return [(event.result, event.reason) for event in w.events(StreamContinued)]


async def cut(
    w: World, fault: str, path: str, body: dict[str, Any], *, clock: ManualClock | None = None
) -> Any:
    """Ask until the fault has happened to the first engine of an answer, which the others of that
    answer are spared.
    """
    engine = (w.decode or w.aggregated or w.anything)[0]
    before = len(results(w))
    engine.sim.faults.add(fault)
    for _ in range(4):  # until it is this engine's turn
        asking = asked(w, path, body)
        found = await (asking if clock is None else clock.through(asking, STEP))
        if len(results(w)) > before:
            return found
    raise AssertionError("the fault has not happened")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("split", [True, False], ids=["split", "alone"])
@pytest.mark.parametrize(
    "fault",
    [
        "reset",
        "eof",
        "half_chunk",
        "error_event",
        "text_after_error",
        "abort_finish",
        "no_done",
        "garbage",
    ],
)
async def test_any_cut(path: str, split: bool, fault: str) -> None:
    """Cut behind each event in turn: the same text, finish reason and usage."""
    make = completion if path == COMPLETIONS else chat
    body = make(stream=True, max_tokens=TOKENS, stream_options=USAGE)
    roles = {"prefill": 1, "decode": 2} if split else {"prefill": 0, "decode": 0, "aggregated": 2}
    async with world(**roles, limits=UNBROKEN) as w:  # type: ignore[arg-type]
        expected = await asked(w, path, body)
        cuts = places(path, split)
        for events in cuts:
            assert await cut(w, f"{fault}@mid_stream:events={events}", path, body) == expected, (
                events
            )
        cause = {"abort_finish": "aborted"}.get(fault, "error_event" if "error" in fault else "eof")
        assert set(results(w)) == {("continued", cause)}
        assert w.metric("pdproxy_continuations_total", result="continued", reason=cause) == len(
            cuts
        )
        assert w.metric("pdproxy_continuation_seconds_count") == len(cuts)
        await w.quiet()
        assert w.proxy.service.resources.records is not None
        assert w.proxy.service.resources.records.held == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fault", ["stall", "freeze", "no_fin", "kill", "dead_core", "restart"])
async def test_engines_that_are_gone_or_silent(path: str, fault: str) -> None:
    """Their streams go on elsewhere: at once, or once nothing has come for
    `deadlines.between_tokens`.
    """
    make = completion if path == COMPLETIONS else chat
    body = make(stream=True, max_tokens=TOKENS, stream_options=USAGE)
    clock = ManualClock()
    async with world(decode=2, clock=clock, leaves=True) as w:
        expected = await asked(w, path, body)
        await asked(w, path, body)
        for events in (1, 17):
            found = await cut(w, f"{fault}@mid_stream:events={events}", path, body, clock=clock)
            assert found == expected
            engine = w.decode[0].sim
            engine.faults.clear()
            if engine.life == "frozen":
                await engine.thaw()
            if engine.life != "up" or engine.engine.dead:
                await engine.restart()
            await w.probe()
            await clock.through(w.quiet(), STEP)
            for one in w.prefill:
                one.sim.engine.expire_leases()
        assert {result for result, _ in results(w)} == {"continued"}
        assert (
            {reason for _, reason in results(w)} <= {"deadline"}
            if fault in SILENT
            else {"eof", "error_event"}
        )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("moment", ["last_chunk", "before_done"])
@pytest.mark.parametrize("options", [None, USAGE, RUNNING, {"include_usage": False}])
@pytest.mark.parametrize("forced", [False, True])
async def test_the_end_alone_is_missing(path: str, moment: str, options: Any, forced: bool) -> None:
    """If the choice has ended, the proxy ends the stream itself. Else the last token is made
    again.
    """
    make = completion if path == COMPLETIONS else chat
    body = make(stream=True, max_tokens=5) | (
        {} if options is None else {"stream_options": options}
    )
    async with world(decode=2, limits=UNBROKEN, facts={"enable_force_include_usage": forced}) as w:
        expected = await asked(w, path, body)
        for fault in (
            ("reset", "error_event", "abort_finish")
            if moment == "last_chunk"
            else ("reset", "no_done")
        ):
            assert await cut(w, f"{fault}@{moment}", path, body) == expected
        wanted = "continued" if moment == "last_chunk" else "finished"
        assert {result for result, _ in results(w)} == {wanted}


def counted(found: tuple[str, Any, list[Any]]) -> tuple[str, Any, list[Any]]:
    """The same without the counts of cached tokens, which may be any up to the prompt's."""
    text, finish, usages = found
    for usage in usages:
        details = usage.pop("prompt_tokens_details", None)
        assert 0 <= (details or {}).get("cached_tokens", 0) <= usage["prompt_tokens"]
    return text, finish, [usage for at, usage in enumerate(usages) if usage not in usages[:at]]


@pytest.mark.parametrize("options", [None, USAGE, RUNNING])
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("details", [False, True])
async def test_usages(options: Any, forced: bool, details: bool) -> None:
    """All of the answer counts as answer. Cached tokens are those that the second engines found, at
    most all of the prompt.
    """
    facts = {"enable_force_include_usage": forced, "enable_prompt_tokens_details": details}
    async with world(decode=2, limits=UNBROKEN, facts=facts) as w:
        for path, make in ((COMPLETIONS, completion), (CHAT, chat)):
            body = make(stream=True, max_tokens=9) | (
                {} if options is None else {"stream_options": options}
            )
            expected = counted(await asked(w, path, body))
            for events in (1, 4, 8):
                assert (
                    counted(await cut(w, f"reset@mid_stream:events={events}", path, body))
                    == expected
                )
        report = w.events(StreamContinued)
        assert {one.result for one in report} == {"continued"}


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 5},
        {"stop": ["zzzz"]},
        {"stop": ["qq", "zz 78"]},
        {"stop": ["zzzz"], "include_stop_str_in_output": True},
        {"max_tokens": None, "max_completion_tokens": 20},
        {"truncate_prompt_tokens": 16},
        {"cache_salt": "x", "user": "u", "priority": 1},
        {"temperature": 0.0, "seed": 4},
        {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {"300": 1.0}},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_fields_that_may_be_there(path: str, fields: dict[str, Any]) -> None:
    """As without a cut; a text that was held back comes once."""
    if path == COMPLETIONS and "max_completion_tokens" in fields:
        fields = {}
    make = completion if path == COMPLETIONS else chat
    body = make(stream=True, stream_options=USAGE, **({"max_tokens": 20} | fields))
    async with world(decode=2, limits=UNBROKEN) as w:
        expected = await asked(w, path, body)
        for events in (3, 4, 9, 18):
            assert await cut(w, f"reset@mid_stream:events={events}", path, body) == expected, events
        assert {result for result, _ in results(w)} == {"continued"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_ids_that_the_client_asks_for(path: str) -> None:
    """Each of them comes once, the prompt's before them. In the middle of a letter a stream ends:
    the client has some of it.
    """

    def ids(answer: Answer) -> tuple[list[Any], list[Any]]:
        prompts: list[Any] = []
        made: list[Any] = []
        for event in answer.events[:-1]:
            body = json.loads(event[6:])
            prompts += [body[name] for name in ("prompt_token_ids",) if body.get(name)]
            for choice in body.get("choices", ()):
                prompts += [choice[name] for name in ("prompt_token_ids",) if choice.get(name)]
                made += choice.get("token_ids") or []
        return prompts, made

    make = completion if path == COMPLETIONS else chat
    body = make(stream=True, max_tokens=TOKENS, return_token_ids=True, stream_options=USAGE)
    async with world(decode=2, limits=UNBROKEN) as w:
        plain = await w.ask(path, body)
        prompts, made = ids(plain)
        assert (len(prompts), len(made)) == (1, TOKENS)
        for events in PLACES:
            w.decode[0].sim.faults.add(f"reset@mid_stream:events={events}")
            before = len(results(w))
            while len(results(w)) == before:
                answer = await w.ask(path, body)
            if results(w)[-1] == ("continued", "eof"):
                assert (ids(answer), answer.text) == ((prompts, made), plain.text)
            else:
                assert results(w)[-1] == ("refused", "half_letter")
        assert results(w).count(("continued", "eof")) >= 0.7 * len(PLACES)


async def test_a_chat_may_fill_the_context() -> None:
    """Without a limit it has as many tokens as an engine's context leaves: also behind a cut, and
    beside an engine that was not probed yet.
    """
    async with world(
        decode=2, limits=UNBROKEN, facts={"max_model_len": 100, "num_gpu_blocks": 100}
    ) as w:
        for one in w.workers:
            one.ledger.add(EngineSpec("http://127.0.0.1:1", Role.DECODE))
        body = chat(stream=True, stream_options=USAGE)
        del body["max_tokens"], body["model"]
        expected = await asked(w, CHAT, body)
        assert expected[2][0]["total_tokens"] == 100
        for events in (1, 20):
            assert await cut(w, f"reset@mid_stream:events={events}", CHAT, body) == expected
        assert set(results(w)) == {("continued", "eof")}


async def test_an_end_that_the_model_chooses() -> None:
    """The model's own end comes at the same token."""
    async with world(decode=2, limits=UNBROKEN, facts={"eos_every": 40}) as w:
        body = completion(stream=True, max_tokens=500, stream_options=USAGE)
        expected = await asked(w, COMPLETIONS, body)
        assert expected[1] == "stop"
        made = expected[2][0]["completion_tokens"]
        for events in {1, made // 2, max(made - 2, 1)}:
            assert await cut(w, f"reset@mid_stream:events={events}", COMPLETIONS, body) == expected


async def test_stop_strings_behind_a_cut() -> None:
    """A stop string is found in what another engine makes; if a cut may be inside of one, the
    stream ends with an error.
    """
    async with world(decode=2, limits=UNBROKEN) as w:
        plain, _, _ = await asked(w, COMPLETIONS, completion(stream=True, max_tokens=40))
        stop = plain[60:66]
        body = completion(stream=True, max_tokens=40, stop=[stop], stream_options=USAGE)
        expected = await asked(w, COMPLETIONS, body)
        assert expected[:2] == (plain[: plain.index(stop)], "stop")
        for events in range(1, expected[2][0]["completion_tokens"] - 1):
            engine = w.decode[0]
            engine.sim.faults.add(f"reset@mid_stream:events={events}")
            before = len(results(w))
            while len(results(w)) == before:
                answer = await w.ask(COMPLETIONS, body)
            if results(w)[-1][0] == "continued":
                assert whole(answer)[:3] == expected
            else:
                assert results(w)[-1] == ("refused", "stop_pending")
                assert expected[0].startswith(
                    Answer(200, [], b"".join(answer.events[:-1]), [], True).text
                )
                assert json.loads(answer.events[-1][6:])["error"]["code"] == 502
        assert ("continued", "eof") in results(w)
        assert ("refused", "stop_pending") in results(w)


async def test_sampled_answers() -> None:
    """Another rest, but as many tokens; with `continuations.sampled` off, an error."""
    body = completion(stream=True, max_tokens=12, temperature=1.0, stream_options=USAGE)
    async with world(decode=2, limits=UNBROKEN) as w:
        _, finish, usage = await asked(w, COMPLETIONS, body)
        found = await cut(w, "reset@mid_stream:events=5", COMPLETIONS, body)
        assert found[1:] == (finish, usage)


@pytest.mark.parametrize("options", [None, USAGE])
async def test_a_prompt_of_a_list(options: Any) -> None:
    """Only the stream that was cut goes on elsewhere. All have one id and one time, and the usage
    is the sum.
    """
    prompts = [PROMPT + "1", PROMPT + "22", PROMPT + "333"]
    body = completion(stream=True, max_tokens=12, prompt=prompts) | (
        {} if options is None else {"stream_options": options}
    )

    def texts(answer: Answer) -> list[Any]:
        _, finish, usages, shown, done = whole(answer)
        assert (len(shown), done) == (1, True)
        return [[answer.text_of(index) for index in range(3)], finish, usages]

    async with world(decode=2, limits=UNBROKEN) as w:
        expected = texts(await w.ask(COMPLETIONS, body))
        for fault in ("reset@mid_stream:events=4", "error_event@last_chunk", "reset@before_done"):
            before = len(results(w))
            w.decode[0].sim.faults.add(fault)
            while len(results(w)) == before:
                assert texts(await w.ask(COMPLETIONS, body)) == expected
        assert [result for result, _ in results(w)] == ["continued", "continued", "finished"]


async def ever_again(
    w: World, d: SimServer, asked_plain: Callable[[str, dict[str, Any]], Awaitable[Answer]]
) -> None:
    """Cut streams of one decode engine, and compare with an engine that serves alone."""
    for path, make in ((COMPLETIONS, completion), (CHAT, chat)):
        body = make(stream=True, max_tokens=12, stream_options=USAGE)
        theirs = whole(await asked_plain(path, body))[:3]
        for events in (1, 2, 7):
            d.faults.add(f"reset@mid_stream:events={events}")
            before = len(results(w))
            while len(results(w)) == before:
                assert await asked(w, path, body) == theirs
    assert set(results(w)) == {("continued", "eof")}


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_every_connector(connector: str) -> None:
    """Split anew by each of them, with its own ways to begin an answer."""
    async with pool(
        connector, decodes=1 if connector in ("lmcache-pd", "cpu") else 2, limits=UNBROKEN
    ) as pair:
        await ever_again(pair.world, pair.d, pair.asked_plain)


@pytest.mark.parametrize("kind", KINDS)
async def test_connectors_whose_engines_register(kind: str) -> None:
    """Their decode engine goes on itself: there is only one."""
    async with run(kind) as fleet:
        await ever_again(fleet.world, fleet.d[0], fleet.asked_plain)
