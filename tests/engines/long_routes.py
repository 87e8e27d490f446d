"""Generated requests of Responses and Messages: the answers are the plain engine's, and D computes
no token of a prompt.
"""

# `PDPROXY_TEST_GENERATED_ROUTES` is their number for each route.

import os
import random
import secrets
from typing import Any

import pytest

from .client import ask
from .engine import MODEL
from .equality import Moved, in_full
from .fleet import Fleet
from .prompts import STORY
from .proxy import Proxy
from .test_other_routes import content_of
from .test_split_routes import FUNCTION, MESSAGES, RESPONSES, TOOL

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600, func_only=True)]

COUNT = int(os.environ.get("PDPROXY_TEST_GENERATED_ROUTES", "300"))
SALTS = ["pepper", "a b", "é"]
WORDS = STORY.split()


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices([*WORDS, "né", "🚢", "<|im_end|>", "\n\n", '{"a":1}'], k=20))


def _turns(draw: random.Random, path: str) -> list[dict[str, Any]]:
    """A conversation with some calls in it, that ends with the user's words."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": f"{secrets.token_hex(6)} {STORY}"}]
    for at in range(draw.randrange(4)):
        called = draw.random() < 0.4
        if path == RESPONSES:
            if called:
                call = {"call_id": f"c{at}", "name": "forecast", "arguments": '{"city":"Oslo"}'}
                turns.append({"type": "function_call", **call})
                turns.append(
                    {"type": "function_call_output", "call_id": f"c{at}", "output": _text(draw)}
                )
            else:
                part = {"type": "output_text", "text": _text(draw), "annotations": []}
                turns.append({"type": "message", "role": "assistant", "content": [part]})
        elif called:
            use = {
                "type": "tool_use",
                "id": f"c{at}",
                "name": "forecast",
                "input": {"city": "Oslo"},
            }
            turns.append({"role": "assistant", "content": [use]})
            result = {"type": "tool_result", "tool_use_id": f"c{at}", "content": _text(draw)}
            turns.append({"role": "user", "content": [result]})
            continue
        else:
            turns.append({"role": "assistant", "content": _text(draw)})
        turns.append({"role": "user", "content": _text(draw)})
    return turns


def _request(draw: random.Random, path: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": MODEL, "stream": draw.random() < 0.5}
    limit = draw.choice([1, 2, 7, 12, 24])
    if path == RESPONSES:
        fields |= {"input": _turns(draw, path), "max_output_tokens": limit}
        optional: dict[str, Any] = {
            "instructions": _text(draw),
            "store": draw.choice([True, False, None]),
            "tools": [FUNCTION],
            "top_p": 0.9,
            "metadata": {"a": "b"},
            "truncation": "auto",
            "seed": 3,
            "reasoning": {"effort": "low"},
            "parallel_tool_calls": False,
            "cache_salt": draw.choice(SALTS),
            "user": "u",
            "text": {"format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
        }
    else:
        fields |= {"messages": _turns(draw, path), "max_tokens": limit}
        optional = {
            "system": [{"type": "text", "text": _text(draw), "cache_control": None}],
            "tools": [TOOL],
            "top_k": 5,
            "top_p": 0.9,
            "metadata": {"user_id": "u"},
            "stop_sequences": ["zz", "\n\n\n"],
            "thinking": {"type": draw.choice(["disabled", "adaptive"])},
            "output_config": {"effort": "low"},
            "cache_salt": draw.choice(SALTS),
            "chat_template_kwargs": {"enable_thinking": False},
        }
    wanted = draw.sample(sorted(optional), draw.randrange(len(optional)))
    fields |= {name: optional[name] for name in wanted}
    fields["temperature"] = 0
    if draw.random() < 0.08:  # what engines refuse
        fields |= draw.choice([{"temperature": -1}, {"top_p": 7}, {"model": "nope"}, {"tools": 3}])
    return fields


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_generated_requests(fleet: Fleet, proxy_1p1d: Proxy, path: str) -> None:
    """All differences are shown together."""
    draw, found, split = random.Random(COUNT), [], 0
    before = Moved.now(fleet, proxy_1p1d, 1)
    for _ in range(COUNT):
        body = _request(draw, path)
        plain = await ask(fleet.plain.url, path, body)
        ours = await ask(proxy_1p1d.url, path, body)
        split += plain.status == 200
        if (ours.status, content_of(ours)) != (plain.status, content_of(plain)):
            found.append((body, plain.body, ours.body))
    assert not found, found[:3]
    refused = COUNT - split
    await before.settled(lambda increases: in_full(increases) and increases["alone"] <= refused)
    print(f"\n{path}: {COUNT} requests, {split} answers, KV {before.since('')}")
