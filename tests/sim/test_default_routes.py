"""Routes that vLLM has by default beside those of OpenAI: batches, invocations, scores, the load,
the tokenizer.
"""

import asyncio
import math
from typing import Any

import msgspec
import pytest

from pdproxy_lab.sim.server import SimServer
from tests.sim.moments import FAST
from tests.sim.raw import Raw, ask, chat, completion, get, post, until

BATCH = "/v1/chat/completions/batch"
SCORING: dict[str, Any] = {
    "query": "one two",
    "items": ["three", "four"],
    "label_token_ids": [300, 301],
}


def user(text):
    return [{"role": "user", "content": text}]


async def told(sim: SimServer, path: str, **body: Any) -> tuple[int | None, str]:
    """The status and the error's message."""
    answer = (await ask(sim.port, post(path, **body))).answer
    return answer.status, answer.json["error"]["message"]


async def test_a_batch_has_the_choices_of_its_chats(sim):
    texts = ["one two", "three", "four five six"]
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    batch = (
        await ask(sim.port, post(BATCH, messages=[user(text) for text in texts], **fields))
    ).answer.json
    chats = [(await ask(sim.port, chat(messages=user(text)))).answer.json for text in texts]
    assert batch["choices"] == [
        {**one["choices"][0], "index": index} for index, one in enumerate(chats)
    ]
    assert list(batch) == list(chats[0])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(one["usage"][name] for one in chats)


async def test_a_batch_reports_nothing_of_single_prompts(sim):
    body = (
        await ask(sim.port, post(BATCH, messages=[user("a")], return_token_ids=True, max_tokens=2))
    ).answer.json
    assert len(body["choices"][0]["token_ids"]) == 2
    assert body["prompt_token_ids"] is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"n": 2},
            (
                "Batch chat completions do not support `n > 1`. Please set `n` to 1. (parameter=n, "
                "value=2)"
            ),
        ),
        (
            {"use_beam_search": True},
            (
                "Batch chat completions do not support beam search. Please set `use_beam_search` "
                "to "
                "False. (parameter=use_b"
            ),
        ),
        (
            {"tool_choice": "auto"},
            "1 validation error:\n  {'type': 'literal_error', 'loc': 'body.tool_choice'",
        ),
        (
            {"messages": [[]]},
            "1 validation error:\n  {'type': 'too_short', 'loc': 'body.messages.0'",
        ),
        ({"messages": []}, "1 validation error:\n  {'type': 'too_short', 'loc': 'body.messages'"),
        (
            {"kv_transfer_params": {"prompt_token_ids": [1]}},
            "Batch chat completions do not support `kv_transfer_params['prompt_token_ids']`",
        ),
        (
            {"continue_final_message": True},
            "Cannot set both `continue_final_message` and `add_generation_prompt`",
        ),
    ],
)
async def test_what_a_batch_refuses(sim, fields, said):
    status, message = await told(sim, BATCH, **{"messages": [user("a")], **fields})
    assert status == 400
    assert message.startswith(said)


async def test_an_invocation_is_what_its_body_is(sim):
    for request in (chat(), completion()):
        own = (await ask(sim.port, request)).answer.json
        path = b"POST /v1/chat/completions " if b"messages" in request else b"POST /v1/completions "
        invoked = (await ask(sim.port, request.replace(path, b"POST /invocations "))).answer.json
        assert invoked["choices"] == own["choices"]
        assert invoked["object"] == own["object"]


async def test_an_invocations_model_is_that_of_its_header(sim):
    answer = (
        await ask(sim.port, post("/invocations", model="nope", prompt="a", max_tokens=1))
    ).answer
    assert (answer.status, answer.json["model"]) == (200, "sim")
    header = "X-Amzn-SageMaker-Adapter-Identifier: nope\r\n"
    assert (await ask(sim.port, post("/invocations", header, prompt="a"))).answer.status == 404


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"),
        (
            {"prompt": {"a": 1}},
            (
                "Cannot find suitable handler for request. Expected one of: "
                "['ChatCompletionRequest', 'CompletionRequest']"
            ),
        ),
        ({"requestType": "NEW_SESSION"}, "Invalid payload. stateful sessions not enabled"),
    ],
)
async def test_an_invocation_of_no_kind(sim, body, said):
    assert await told(sim, "/invocations", **body) == (400, said)


async def test_scores_are_probabilities(sim):
    both = []
    for labels in ([300, 301], [301, 300]):
        answer = (
            await ask(
                sim.port, post("/generative_scoring", **{**SCORING, "label_token_ids": labels})
            )
        ).answer
        assert answer.status == 200
        both.append([one["score"] for one in answer.json["data"]])
        assert answer.json["usage"]["completion_tokens"] == 2
    for one, other in zip(*both, strict=True):
        assert math.isclose(one + other, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"items": []}, "items must contain at least one item."),
        ({"label_token_ids": []}, "label_token_ids must contain at least one token ID."),
        (
            {"label_token_ids": [10**9]},
            (
                "label_token_id 1000000000 is out of vocabulary range [0, 4096). Please provide "
                "valid token IDs."
            ),
        ),
        ({"label_token_ids": list(range(129))}, "Requested logprob_token_ids of length 129"),
    ],
)
async def test_what_scoring_refuses(sim, fields, said):
    status, message = await told(sim, "/generative_scoring", **{**SCORING, **fields})
    assert status == 400
    assert message.startswith(said)


async def test_the_load_is_counted_only_with_the_flag():
    for tracked in (False, True):
        facts = msgspec.structs.replace(
            FAST,
            enable_server_load_tracking=tracked,
            hardware=msgspec.structs.replace(FAST.hardware, speed=1, decode_step_s=30),
        )
        async with SimServer(facts) as sim:
            client = await Raw.connect(sim.port)
            client.send(completion(stream=True))
            await sim.journal.received()
            assert (await ask(sim.port, get("/load"))).answer.json == {"server_load": int(tracked)}
            client.leave()


async def test_the_tokenizer_is_described_only_with_the_flag(sim):
    assert (await ask(sim.port, get("/tokenizer_info"))).answer.status == 404
    async with SimServer(
        msgspec.structs.replace(FAST, enable_tokenizer_info_endpoint=True)
    ) as other:
        answer = (await ask(other.port, get("/tokenizer_info"))).answer
        assert (answer.status, answer.json["tokenizer_class"]) == (200, "Tokenizer")


async def test_fields_of_a_chat_that_tokenizing_does_not_read_may_be_anything(sim):
    messages = user("a")
    plain = (await ask(sim.port, post("/tokenize", messages=messages))).answer
    odd = post("/tokenize", messages=messages, n=[], max_tokens="b")
    answer = (await ask(sim.port, odd)).answer
    assert (answer.status, answer.json) == (plain.status, plain.json) == (200, plain.json)


async def test_a_client_that_leaves_a_batch_ends_it():
    slow = msgspec.structs.replace(FAST.hardware, speed=1, decode_step_s=30)
    async with SimServer(msgspec.structs.replace(FAST, hardware=slow)) as sim:
        client = await Raw.connect(sim.port)
        client.send(post(BATCH, messages=[user("a"), user("b")], max_tokens=4))
        core = sim.engine._core
        assert core is not None
        await until(lambda: len(core._sequences) == 2)
        client.leave()
        await until(lambda: not core._sequences)
        await asyncio.sleep(0)
