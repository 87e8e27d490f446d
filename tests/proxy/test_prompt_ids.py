"""Prompts as token ids in `kv_transfer_params`: no handle, but what vLLM reads in place of a chat's
messages.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy_lab.sim.tokenizer import BuiltInTokenizer
from tests.differential.alike import difference
from tests.differential.stage import stage
from tests.fakes.client import exchange, request
from tests.fakes.passed import HANDLE, MESSAGES, RESPONSES, message, responses
from tests.fakes.world import CHAT, COMPLETIONS, chat, completion, world

IDS = BuiltInTokenizer().encode(
    "another prompt than the messages, long enough for some blocks of KV"
)
BATCH, INVOCATIONS = "/v1/chat/completions/batch", "/invocations"
PICTURE = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
    }
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(stream=True)),
        (CHAT, chat(stream=True, stream_options={"include_usage": True})),
        (CHAT, chat(return_token_ids=True)),
        (CHAT, chat(n=2, temperature=0.9, seed=3)),
        (CHAT, chat(echo=True, return_token_ids=True)),
        (CHAT, chat(max_tokens=0)),
        (COMPLETIONS, completion(return_token_ids=True)),
        (BATCH, {**chat(), "messages": [chat()["messages"]] * 2}),
        (INVOCATIONS, chat(stream=True)),
        (INVOCATIONS, completion(return_token_ids=True)),
    ],
    ids=[
        "chat",
        "stream",
        "usage",
        "ids",
        "n",
        "echo",
        "refused",
        "completion",
        "batch",
        "invoked",
        "invoked-text",
    ],
)
@pytest.mark.parametrize(
    "ids",
    [IDS, [], [-1], [1.0], [True], "x", {"a": 1}, [10**9], [7] * 600, None],
    ids=[
        "valid",
        "none",
        "negative",
        "float",
        "bool",
        "text",
        "object",
        "unknown",
        "too long",
        "null",
    ],
)
async def test_the_prompt_is_the_one_that_an_engine_would_take(
    path: str, body: dict[str, Any], ids: Any
) -> None:
    """The answer is a plain engine's, a refusal included."""
    async with stage() as both:
        sent = request("POST", path, body | {"kv_transfer_params": {"prompt_token_ids": ids}})
        plain, ours = await exchange(both.plain.port, sent), await exchange(both.world.port, sent)
        assert not difference(plain, ours, cached=False)
        if (
            path == CHAT
            and ids == IDS
            and not body.get("echo")
            and body["max_tokens"]
            and not body.get("stream")
        ):
            assert ours.json["usage"]["prompt_tokens"] == len(IDS)
        if ids == [] and path == CHAT and not body.get("echo") and body["max_tokens"]:
            assert (ours.status, ours.json["error"]["param"]) == (
                400,
                "kv_transfer_params.prompt_token_ids",
            )


async def test_handles_beside_such_a_prompt_are_removed() -> None:
    """The engine gets the prompt and nothing else, on the routes where it reads one; on others
    nothing.
    """
    given = {**HANDLE, "prompt_token_ids": IDS}
    async with world() as w:
        for path, body in ((CHAT, chat()), (RESPONSES, responses()), (MESSAGES, message())):
            answer = await w.ask(
                path, body | {"kv_transfer_params": given, "ec_transfer_params": given}
            )
            assert answer.status == 200
            counted = answer.json["usage"]
            assert counted.get("prompt_tokens", counted.get("input_tokens")) == len(IDS)
        assert not w.prefill[0].requests
        assert w.decode[0].requests[0].kv == {"prompt_token_ids": IDS}
        assert (await w.ask(COMPLETIONS, completion(kv_transfer_params=given))).status == 200
        assert "remote_host" in (w.decode[0].requests[-1].kv or {}), "split, as without it"


async def test_a_picture_is_read_and_not_the_ids() -> None:
    """The request goes to one engine as it came: that decides."""
    async with world() as w:
        body = chat(messages=PICTURE, kv_transfer_params={"prompt_token_ids": IDS})
        await w.ask(CHAT, body)
        assert w.decode[0].requests[0].json == body
        assert (await w.ended()).legs[0].why_alone == "prompt_ids"
