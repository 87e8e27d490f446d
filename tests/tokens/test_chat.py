"""A chat as its template sees it has the form that vLLM 0.32.0's schema and renderer make of the
same body.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from pdproxy.tokens.chat import Chat, conversation, read_chat
from pdproxy.tokens.errors import UnsureError

USER = {"role": "user", "content": "x"}


def read(messages: list[Any] | None = None, **fields: Any) -> Chat:
    """The chat of a body."""
    body: Mapping[str, Any] = {"messages": [USER] if messages is None else messages, **fields}
    return read_chat(
        {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}
    )


CALL = {
    "type": "function",
    "index": 0,
    "id": "a",
    "function": {"name": "f", "x": 1, "arguments": '{"b": 1.50, "a": 2}'},
}


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (USER, {"role": "user", "content": "x"}),
        ({"role": "user"}, {"role": "user", "content": ""}),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
            {"role": "user", "content": "a\nb"},
        ),
        ({**USER, "name": "Ann", "weird": 3}, {"role": "user", "content": "x", "name": "Ann"}),
        ({**USER, "tool_call_id": "a", "reasoning": "r"}, {"role": "user", "content": "x"}),
        (
            {"role": "tool", "content": "1", "tool_call_id": "a"},
            {"role": "tool", "content": "1", "tool_call_id": "a"},
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": []},
            {"role": "assistant", "content": "x"},
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None},
            {"role": "assistant", "content": "x"},
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "why",
                "tool_calls": [CALL],
            },
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "a",
                        "function": {"arguments": {"b": 1.5, "a": 2}, "name": "f", "x": 1},
                        "type": "function",
                        "index": 0,
                    }
                ],
                "reasoning": "why",
                "reasoning_content": "why",
            },
        ),
    ],
    ids=str,
)
def test_messages(given: dict[str, Any], seen: dict[str, Any]) -> None:
    """What a template is given of a message, to the order of its keys, which it may print."""
    (made,) = conversation(read([given]).messages, "string", developer=True)
    assert json.dumps(made) == json.dumps(seen)


@pytest.mark.parametrize("arguments", ["", "[]", "42", "{", "[" * 100_000])
def test_calls_whose_arguments_are_no_object(arguments: str) -> None:
    """They become an empty one, as the engines have it."""
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": arguments}}
    (made,) = read([{"role": "assistant", "tool_calls": [call]}]).messages
    assert made["tool_calls"][0]["function"]["arguments"] == {}


def test_content_as_parts() -> None:
    """For a template that goes through parts, a text is one; a tool's answer is a text all the
    same.
    """
    messages = read(
        [USER, {"role": "tool", "content": [{"type": "text", "text": t} for t in "ab"]}]
    ).messages
    made = conversation(messages, "openai", developer=True)
    assert [one["content"] for one in made] == [[{"type": "text", "text": "x"}], "a\nb"]


def test_developers_where_the_template_knows_none() -> None:
    """They become system messages, and all of these one in the first place; a template that knows
    them gets them as they are.
    """
    given = [
        {"role": "system", "content": "a"},
        USER,
        {"role": "developer", "content": "b"},
        {"role": "system", "content": ""},
    ]
    messages = read(given).messages
    assert conversation(messages, "string", developer=False) == [
        {"role": "system", "content": "a\n\nb"},
        USER,
    ]
    assert conversation(messages, "openai", developer=False)[0] == {
        "role": "system",
        "content": "a\n\nb",
    }
    assert [one["role"] for one in conversation(messages, "string", developer=True)] == [
        one["role"] for one in given
    ]
    (one, _) = conversation(
        read([{"role": "developer", "content": "b"}, USER]).messages, "string", developer=False
    )
    assert one == {"role": "system", "content": "b"}
    without = read([given[0], USER, given[3]]).messages
    # system messages alone are left as they are
    assert len(conversation(without, "string", developer=False)) == 3


def test_tools() -> None:
    """Known fields in the schema's own order; what is absent is null, but for `strict`."""
    tools = [
        {
            "function": {"parameters": {"z": 1, "a": 2}, "name": "f", "unknown": 2, "strict": None},
            "extra": 1,
        }
    ]
    chat = read(
        tools=[
            *tools,
            {"type": "function", "function": {"name": "g", "strict": True, "description": "d"}},
        ]
    )
    assert json.dumps(chat.tools) == json.dumps(
        [
            {
                "type": "function",
                "function": {"name": "f", "description": None, "parameters": {"z": 1, "a": 2}},
            },
            {
                "type": "function",
                "function": {"name": "g", "description": "d", "parameters": None, "strict": True},
            },
        ]
    )
    assert read().tools is None
    assert read(tools=[]).tools == []
    assert read(tools=[], tool_choice="none").tools == []
    assert read(tools=tools, tool_choice="required").tools is not None


def test_arguments() -> None:
    """Fields of the body stand above the client's own arguments; null and "auto" among these are
    dropped.
    """
    chat = read(
        chat_template_kwargs={
            "add_generation_prompt": False,
            "reasoning_effort": "x",
            "a": None,
            "b": "auto",
            "c": 0,
        },
        reasoning_effort="low",
        documents=[{"title": "t"}],
    )
    assert chat.arguments == {
        "reasoning_effort": "low",
        "enable_thinking": True,
        "c": 0,
        "documents": [{"title": "t"}],
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    assert read(reasoning_effort="none").arguments["enable_thinking"] is False
    assert (
        read(reasoning_effort="low", chat_template_kwargs={"enable_thinking": 0}).arguments[
            "enable_thinking"
        ]
        == 0
    )
    assert read(add_special_tokens=True).add_special_tokens
    assert not read(add_generation_prompt=False).arguments["add_generation_prompt"]


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ messages }}"},
        {"truncate_prompt_tokens": 9},
        {"truncation_side": "left"},
        {"mm_processor_kwargs": {}},
        {"chat_template_kwargs": {"tokenize": False}},
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": []},
        {"documents": [{"title": 1}]},
        {"documents": "x"},
        {"reasoning_effort": 1},
        {"add_generation_prompt": None},
        {"continue_final_message": "yes"},
        {"add_special_tokens": 1},
        {"tools": [{"type": "custom"}]},
        {"tools": [{"type": "function", "function": {"name": 1}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "defer_loading": True}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "true"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}
            ]
        },
        {"messages": [{"role": "user", "content": "x", "task": "t"}]},
        {"messages": [{"role": "developer", "content": "x", "tools": []}]},
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1"}]},
        {"messages": [{"role": "assistant", "tool_calls": {}}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"type": "custom", "id": "a", "custom": {}}]}
            ]
        },
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "f"}}],
                }
            ]
        },
        {"messages": [{"role": "assistant", "content": "x", "reasoning": 1}]},
    ],
    ids=str,
)
def test_what_is_left_to_the_engines(fields: dict[str, Any]) -> None:
    """Whatever is not canonical, or depends on an engine's flags. The reason names a field and
    quotes nothing.
    """
    with pytest.raises(UnsureError) as caught:
        read(**fields)
    assert len(str(caught.value)) < 60
