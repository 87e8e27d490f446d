"""The routes of `--enable-scale-out`: what they return for a chat's stream is what the chat's own
route sends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from pdproxy_lab.sim.server import SimServer
from tests.sim.moments import FAST
from tests.sim.raw import ask, post, until

CHAT = "/v1/chat/completions"
RENDER, DERENDER = f"{CHAT}/render", f"{CHAT}/derender"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "why is the sky blue"}],
    "temperature": 0,
}
SCALED = replace(FAST, enable_scale_out=True, reasoning_parser="deepseek_r1")


def with_tool(text: str) -> dict[str, Any]:
    """A chat whose answer is a call."""
    return BODY | {"messages": [{"role": "user", "content": text}], "tools": [TOOL]}


def events_of(body: bytes) -> list[Any]:
    found = [
        line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: {")
    ]
    return [json.loads(one) for one in found]


def told(deltas: Sequence[dict[str, Any]]) -> tuple[str, str, list[Any]]:
    """Reasoning, content and calls of some deltas."""
    reasoning = "".join(one.get("reasoning") or "" for one in deltas)
    content = "".join(one.get("content") or "" for one in deltas)
    calls = [call for one in deltas for call in one.get("tool_calls") or ()]
    names = [call["function"]["name"] for call in calls if call["function"].get("name")]
    return (
        reasoning,
        content,
        [names, "".join(call["function"].get("arguments") or "" for call in calls)],
    )


async def generated(sim: SimServer, limit: int = 4, **fields: Any) -> Any:
    """What the route of token ids answers; of a stream, its events."""
    params = {"max_tokens": limit, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": list(range(300, 350)), "sampling_params": params, **fields}
    answer = (await ask(sim.port, post("/inference/v1/generate", **body))).answer
    return events_of(b"".join(answer.chunks)) if fields.get("stream") else answer.json


async def derender(sim: SimServer, **fields: Any) -> tuple[int | None, Any]:
    answer = (await ask(sim.port, post(DERENDER, stream=True, **fields))).answer
    return answer.status, answer.json


@pytest.mark.parametrize(
    "path", [RENDER, DERENDER, "/v1/completions/render", "/inference/v1/generate"]
)
async def test_off_by_default(path: str) -> None:
    async with SimServer(FAST) as sim:
        answer = (await ask(sim.port, post(path, x=1))).answer
        assert (answer.status, answer.json["error"]["type"]) == (403, "PermissionDeniedError")
        assert answer.json["error"]["message"].endswith(
            "Restart vllm serve with --enable-scale-out to enable them."
        )


async def test_a_rendered_chat() -> None:
    async with SimServer(SCALED) as sim:
        whole = (
            await ask(sim.port, post(CHAT, **BODY, max_tokens=3, return_token_ids=True))
        ).answer.json
        found = (
            await ask(sim.port, post(RENDER, **BODY, max_tokens=3, presence_penalty=0.5))
        ).answer.json
        assert found["token_ids"] == whole["prompt_token_ids"]
        assert found["sampling_params"] == {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "temperature": 0,
            "max_tokens": 3,
            "stop": [],
            "stop_token_ids": [],
            "bad_words": [],
            "output_kind": 2,
            "skip_clone": True,
            "skip_reading_prefix_cache": False,
        }
        forced = (
            await ask(sim.port, post(RENDER, **with_tool("a") | {"tool_choice": "required"}))
        ).answer.json
        assert forced["sampling_params"]["structured_outputs"]
        status = (await ask(sim.port, post(RENDER, **BODY | {"model": "other"}))).answer.status
        assert status == 404


@pytest.mark.parametrize("joined", [1, 2, 5, 1000])
@pytest.mark.parametrize("kind", ["thoughts", "call", "content"])
async def test_derendered_events_are_those_of_the_chat(kind: str, joined: int) -> None:
    """Whatever ids come together; the end token is text here, and no chat shows it."""
    facts = SCALED if kind == "thoughts" else replace(SCALED, reasoning_parser="none")
    body = (with_tool("b") | {"tool_choice": "required"}) if kind == "call" else BODY
    async with SimServer(facts) as sim:
        stream = await ask(
            sim.port, post(CHAT, **body, stream=True, max_tokens=40, return_token_ids=True)
        )
        events = events_of(b"".join(stream.answer.chunks))
        deltas = [event["choices"][0]["delta"] for event in events]
        ids = [one for event in events for one in event["choices"][0].get("token_ids") or ()]
        finish = events[-1]["choices"][0]["finish_reason"]
        if finish != "length":
            ids = ids[:-1]
        state, found = None, []
        for start in range(0, len(ids), joined):
            part = ids[start : start + joined]
            last = start + joined >= len(ids)
            choice = {"index": 0, "token_ids": part, "finish_reason": "length" if last else None}
            status, answer = await derender(
                sim,
                generate_chunk={"choices": [choice]},
                stream_state=state,
                prompt_token_ids=events[0]["prompt_token_ids"],
                chat_request=body,
            )
            assert status == 200, answer
            state = answer["stream_state"]
            (one,) = answer["chunk"]["choices"]
            found.append(one["delta"])
        assert told(found) == told(deltas)
        assert [one["role"] for one in found] == ["assistant"] + [None] * (len(found) - 1)
        assert state is not None
        assert state["output_token_ids"] == ids
        assert sum(state["output_chunk_lens"]) == len(ids)
        assert one["finish_reason"] == ("tool_calls" if kind == "call" else "length"), (
            "a fault of vLLM"
        )
        assert len(state["last_tool_call_ids"]) == (kind == "call")


async def test_an_id_of_a_call_stays() -> None:
    """Parsing begins anew in each call, and with it new ids: those that were sent are kept."""
    body = with_tool("b") | {"tool_choice": "required"}
    async with SimServer(replace(SCALED, reasoning_parser="none")) as sim:
        whole = (await ask(sim.port, post(CHAT, **body, return_token_ids=True))).answer.json
        ids = whole["choices"][0]["token_ids"]
        state = {"last_tool_call_ids": ["mine"], "tools_streamed": True, "role_sent": True}
        _, answer = await derender(
            sim,
            generate_chunk={"choices": [{"index": 0, "token_ids": ids}]},
            stream_state=state,
            prompt_token_ids=whole["prompt_token_ids"],
            chat_request=body,
        )
        (call,) = answer["chunk"]["choices"][0]["delta"]["tool_calls"]
        assert (call["id"], call["type"], call["function"]["name"]) == (
            "mine",
            "function",
            "weather",
        )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"chat_request": None},
            "chat_request is required when a tool or reasoning parser is configured",
        ),
        (
            {"prompt_token_ids": None},
            "prompt_token_ids is required when a tool or reasoning parser is configured",
        ),
        (
            {"generate_chunk": {"choices": [{"index": 0}, {"index": 1}]}},
            "expects at most one choice per chunk (got 2)",
        ),
        (
            {"prompt_token_ids": [9] * 9000},
            "prompt_token_ids length (9000) plus output_token_ids length (0) plus delta (1)",
        ),
        (
            {"stream_state": {"output_token_ids": [9], "output_chunk_lens": []}},
            "must sum to len(output_token_ids)",
        ),
        ({"stream_state": {"output_token_ids": [9], "output_chunk_lens": [1, 0]}}, "greater_than"),
        (
            {"stream_state": {"prev_tokens": ["a"] * 1025}},
            "prev_tokens length (1025) exceeds maximum (1024)",
        ),
        (
            {"stream_state": {"output_token_ids": [99999], "output_chunk_lens": [1]}},
            "invalid stream_state",
        ),
        (
            {"generate_chunk": {"choices": [{"index": 0, "token_ids": [99999]}]}},
            "invalid stream_state: derender failed",
        ),
        ({"prompt_token_ids": [-1]}, "greater_than_equal"),
        ({"generate_chunk": None}, "generate_chunk"),
        ({"generate_chunk": {"choices": [], "output_mode": "text"}}, "output_mode"),
        ({"stream": False}, "literal_error"),
    ],
)
async def test_what_is_refused(fields: dict[str, Any], said: str) -> None:
    body: dict[str, Any] = {
        "generate_chunk": {"choices": [{"index": 0, "token_ids": [300]}]},
        "prompt_token_ids": [9],
        "chat_request": BODY,
        "stream": True,
    }
    async with SimServer(SCALED) as sim:
        answer = (await ask(sim.port, post(DERENDER, **body | fields))).answer
        assert answer.status == 400
        assert said in answer.json["error"]["message"]


async def test_a_call_that_a_prompt_has_begun_goes_on() -> None:
    """As with a real model, a completion behind some of a chat's answer makes the rest of it: calls
    and thoughts.
    """
    for facts, body in (
        (replace(SCALED, reasoning_parser="none"), with_tool("b") | {"tool_choice": "required"}),
        (SCALED, BODY),
    ):
        async with SimServer(facts) as sim:
            whole = (
                await ask(sim.port, post(CHAT, **body, max_tokens=40, return_token_ids=True))
            ).answer.json
            ids = whole["choices"][0]["token_ids"]
            for cut in range(1, len(ids)):
                prompt = whole["prompt_token_ids"] + ids[:cut]
                more: dict[str, Any] = {
                    "max_tokens": 40 - cut,
                    "temperature": 0,
                    "return_token_ids": True,
                }
                rest = (
                    await ask(sim.port, post("/v1/completions", prompt=prompt, **more))
                ).answer.json
                assert rest["choices"][0]["token_ids"] == ids[cut:], cut


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_of_token_ids_moves(stream: bool) -> None:
    """D computes nothing of the prompt; a handle that is used twice gives wrong ids and no
    error.
    """
    facts = replace(FAST, enable_scale_out=True, connector="nixl")
    async with (
        SimServer(replace(facts, role="prefill")) as p,
        SimServer(replace(facts, role="decode")) as d,
        SimServer(facts) as alone,
    ):
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        handle = (await generated(p, 1, kv_transfer_params=asked))["kv_transfer_params"]
        right = (await generated(alone))["choices"][0]["token_ids"]
        for salt in ("first", "second"):
            found = await generated(d, kv_transfer_params=handle, stream=stream, cache_salt=salt)
            parts = found if stream else [found]
            ids = [one for part in parts for one in part["choices"][0]["token_ids"]]
            assert (ids == right) is (salt == "first")
        assert d.engine.stats.prompt_tokens_by_source["external_kv_transfer"] == 100
        await until(lambda: not p.engine.handles)


async def test_a_dead_core_ends_a_stream_of_token_ids() -> None:
    async with SimServer(replace(FAST, enable_scale_out=True)) as sim:
        sim.faults.add("dead_core@mid_stream")
        *before, last = await generated(sim, stream=True)
        assert (len(before), last["error"]["code"]) == (2, 500)
