"""Which requests are split over two engines, which one engine serves alone, and that the reason is
counted.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.world import CHAT, CHAT_TEXT, COMPLETIONS, PROMPT, chat, completion, world

IMAGE = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "a"}
        ],
    }
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "long enough for some blocks of KV"}]}
]


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (COMPLETIONS, {"n": 2, "temperature": 1, "prompt": [PROMPT, PROMPT]}, "n"),
        (COMPLETIONS, {"n": 2, "temperature": 1, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"n": 2}, "unusual"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (CHAT, {"return_prompt_text": True}, "echo"),
        (CHAT, {"return_prompt_text": "yes"}, "unusual"),
        (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"use_beam_search": True}, "beam_search"),
        (CHAT, {"messages": IMAGE}, "non_text"),
        (CHAT, {"kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}}, "prompt_ids"),
        (
            CHAT,
            {"kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}, "n": 2, "temperature": 1},
            "prompt_ids",
        ),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "non_text"),
        (COMPLETIONS, {"prompt": "short"}, "short_prompt"),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, "short_prompt"),
        (COMPLETIONS, {"stream": "yes"}, "unusual"),
        (COMPLETIONS, {"max_tokens": "4"}, "unusual"),
        (COMPLETIONS, {"max_tokens": 2, "min_tokens": 3}, "unusual"),
        (COMPLETIONS, {"prompt": {"text": "x"}}, "unusual"),
        (COMPLETIONS, {"prompt": ""}, "unusual"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "unusual"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "unusual"),
        (CHAT, {"messages": []}, "unusual"),
        (CHAT, {"messages": "hello"}, "unusual"),
        (CHAT, {"top_logprobs": 2}, "unusual"),
    ],
)
async def test_alone_by_rule(path: str, fields: dict[str, Any], reason: str) -> None:
    """A request under a rule goes to the decode engine as the client wrote it, without a handle."""
    async with world() as w:
        body = completion(**fields) if path == COMPLETIONS else chat(**fields)
        await w.ask(path, body)
        assert not w.prefill[0].requests
        assert w.decode[0].requests[0].json == body
        assert w.metric("pdproxy_alone_total", reason=reason) == 1
        assert (await w.ended()).legs[0].why_alone == reason


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"return_prompt_text": False}),
        (COMPLETIONS, {"return_prompt_text": True}),
        (COMPLETIONS, {"n": 1, "echo": False, "prompt_logprobs": None, "use_beam_search": False}),
        (COMPLETIONS, {"prompt": list(range(40)), "logprobs": 2, "min_tokens": 2}),
        (COMPLETIONS, {"prompt": ["only one prompt, but a list, and long enough"]}),
        (COMPLETIONS, {"stream": None, "max_tokens": None}),
        (CHAT, {"messages": PARTS, "logprobs": True, "top_logprobs": 2}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
        ),
        (CHAT, {"response_format": {"type": "json_object"}}),
    ],
)
async def test_split(path: str, fields: dict[str, Any]) -> None:
    """Everything else is split."""
    async with world() as w:
        answer = await w.ask(path, completion(**fields) if path == COMPLETIONS else chat(**fields))
        assert answer.status == 200
        assert len(w.prefill[0].requests) == 1
        assert w.decode[0].requests[0].kv is not None
        assert w.metric("pdproxy_alone_total") == 0


@pytest.mark.parametrize(("size", "split"), [(15, False), (16, True)])
async def test_a_prompt_under_one_block_has_nothing_to_move(size: int, split: bool) -> None:
    """Token ids are counted exactly against the engines' block size."""
    async with world() as w:
        await w.ask(COMPLETIONS, completion(prompt=list(range(1, size + 1))))
        assert bool(w.prefill[0].requests) is split


@pytest.mark.parametrize("stream", [False, True])
async def test_alone_streams_have_usage_only_if_asked(stream: bool) -> None:
    """On one engine alone, too, the proxy asks for usage and keeps it to itself."""
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(echo=True, stream=stream))
        assert (b'"choices":[],"usage"' in answer.body) is False
        report = await w.ended()
        assert report.prompt_tokens is not None
        assert report.completion_tokens == 4
        asked = await w.ask(
            COMPLETIONS, completion(echo=True, stream=True, stream_options={"include_usage": True})
        )
        assert b'"choices":[],"usage"' in asked.body


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_has_a_seed_of_its_own(stream: bool) -> None:
    """Choice i of a seeded request says what a request with one choice and seed + i says, wherever
    that was decoded.
    """
    async with world() as w:
        sampled = {"temperature": 1.0, "max_tokens": 8}
        singles = [
            (await w.ask(COMPLETIONS, completion(seed=5 + i, **sampled))).text for i in range(3)
        ]
        assert len(w.prefill[0].requests) == 3, "those were split"
        answer = await w.ask(COMPLETIONS, completion(n=3, seed=5, stream=stream, **sampled))
        assert [answer.text_of(index) for index in range(3)] == singles
        assert len(set(singles)) == 3


@pytest.mark.parametrize(
    "fields", [{"n": 2, "temperature": 1}, {"prompt": [PROMPT, PROMPT], "echo": True}]
)
async def test_the_usage_of_several_choices_is_not_shown(fields: dict[str, Any]) -> None:
    """The engine is asked for it; the fingerprint goes from there back to each choice's last
    chunk.
    """
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(stream=True, **fields))
        assert (
            answer.body.count(b'"system_fingerprint":"')
            == answer.body.count(b'"finish_reason":"length"')
            == 2
        )
        assert b'"usage":{' not in answer.body
        report = await w.ended()
        assert report.prompt_tokens is not None
        assert report.completion_tokens == 8, "four for each choice"


async def test_a_stream_that_only_the_engine_understands_as_one_keeps_its_usage() -> None:
    """`stream: "true"` is a stream to vLLM: the usage event that the client asked for is not taken
    away.
    """
    from tests.fakes import answers, scripts

    async with world() as w:
        events = answers.stream(False, 9, [" a"], with_usage=True)
        w.decode[0].script(scripts.streams(*events))
        answer = await w.ask(
            COMPLETIONS, completion(stream="true", stream_options={"include_usage": True})
        )
        assert answer.body == b"".join(events)


async def test_aggregated_engines_serve_alone_first() -> None:
    """One engine alone is an aggregated one where there is one; it never takes a handle, and serves
    without pairs.
    """
    async with world(aggregated=1) as w:
        await w.ask(COMPLETIONS, completion(echo=True))
        assert len(w.aggregated[0].requests) == 1
        await w.ask(COMPLETIONS, completion())
        assert w.decode[0].requests[0].kv is not None
        assert len(w.aggregated[0].requests) == 1
    async with world(prefill=0, decode=0, aggregated=2) as w:
        for stream in (True, False):
            answer = await w.ask(CHAT, chat(stream=stream))
            assert answer.text == CHAT_TEXT
        assert [len(engine.requests) for engine in w.aggregated] == [1, 1]
        assert w.metric("pdproxy_alone_total", reason="no_pair") == 2


async def test_alone_goes_to_an_engine_that_has_the_model() -> None:
    """An aggregated engine without the model does not shadow a decode engine that has it."""

    def other(w: Any) -> None:
        w.aggregated[0].models = ["other"]

    async with world(aggregated=1, before=other) as w:
        assert (await w.ask(COMPLETIONS, completion(echo=True))).status == 200
        assert len(w.decode[0].requests) == 1
        assert (await w.ask(COMPLETIONS, completion(model="other"))).status == 200
        assert len(w.aggregated[0].requests) == 1
