"""A chat's body as its template gets it: what vLLM makes of messages, tools and arguments before it
renders.

Owns which fields change a prompt, and the forms of them that are known here. Every other form is an
`UnsureError`: engines have many rules for those, and a wrong prompt is worse than none. Source:
vLLM 0.32.0 `renderers/chat_utils.py`, `renderers/hf.py`,
`entrypoints/openai/chat_completion/protocol.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from pdproxy.tokens.errors import UnsureError
from pdproxy.wire.fields import Fields

ContentFormat = Literal["string", "openai"]
"""The form of a message's content for a template: one text, or a list of parts."""

Message = dict[str, Any]
Tool = dict[str, Any]

_RENDERER_ARGUMENTS = frozenset({
    "chat_template",
    "conversation",
    "messages",
    "tools",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "raise_exception",
    "strftime_now",
})  # fmt: skip
"""Arguments of the renderer itself: as `chat_template_kwargs` they change more than what a template
prints.
"""
_UNKNOWN = (
    "chat_template",
    "truncate_prompt_tokens",
    "truncation_side",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "prompt_embeds",
)
"""Fields that change a prompt in ways that are left to the engines."""
_BILLING = "x-anthropic-billing-header"
"""vLLM removes a line with this beginning from system messages: it differs in each request of some
clients.
"""


class Chat(msgspec.Struct, frozen=True):
    """The input of a template. `arguments` are all variables besides `messages` and `tools`."""

    messages: Sequence[Message]
    tools: Sequence[Tool] | None
    arguments: Mapping[str, Any]
    add_special_tokens: bool


def read_chat(fields: Fields) -> Chat:
    """Read a chat's body.

    Raises:
        UnsureError: it has something whose effect on the prompt only an engine knows.
    """
    refuse_unknown(fields)
    tools = _tools(fields)
    given = _value(fields, "chat_template_kwargs", dict) or {}
    if clash := given.keys() & _RENDERER_ARGUMENTS:
        raise UnsureError(f"chat_template_kwargs has {min(clash)}")
    arguments = {
        name: value for name, value in given.items() if value not in (None, "auto")
    } | template_arguments(fields)
    # They and their defaults override the client's arguments.
    arguments["add_generation_prompt"] = flag(fields, "add_generation_prompt", True)
    arguments["continue_final_message"] = flag(fields, "continue_final_message", False)
    messages = _value(fields, "messages", list)
    if not messages:
        raise UnsureError("messages")
    return Chat(
        [_message(one) for one in messages],
        tools,
        arguments,
        flag(fields, "add_special_tokens", False),
    )


def refuse_unknown(fields: Fields) -> None:
    """Raise UnsureError for fields that change a prompt in ways that are left to the engines."""
    for name in _UNKNOWN:
        if bytes(fields.get(name, b"null")) != b"null":
            raise UnsureError(name)


def template_arguments(fields: Fields) -> dict[str, Any]:
    """Return what vLLM passes to a template of a chat's own fields, besides the two flags of the
    generation prompt.
    """
    arguments: dict[str, Any] = {}
    if (documents := _value(fields, "documents", list)) is not None:
        if not all(
            isinstance(one, dict) and all(isinstance(text, str) for text in one.values())
            for one in documents
        ):
            raise UnsureError("documents")
        arguments["documents"] = documents
    if (effort := _value(fields, "reasoning_effort", str)) is not None:
        arguments["reasoning_effort"] = effort
        if "enable_thinking" not in (_value(fields, "chat_template_kwargs", dict) or {}):
            arguments["enable_thinking"] = effort != "none"
    return arguments


def conversation(
    messages: Sequence[Message], form: ContentFormat, *, developer: bool
) -> list[Message]:
    """Return messages with their content in the template's form. `developer`: whether the template
    has that role.
    """
    made = [
        {**one, "content": _content(one["content"], "string" if one["role"] == "tool" else form)}
        for one in messages
    ]
    if developer or all(one["role"] != "developer" for one in made):
        return made
    made = [
        {**{key: value for key, value in one.items() if key != "tools"}, "role": "system"}
        if one["role"] == "developer"
        else one
        for one in made
    ]
    return _one_system_message(made)


def _content(texts: Sequence[str], form: ContentFormat) -> str | list[dict[str, str]]:
    return (
        "\n".join(texts) if form == "string" else [{"type": "text", "text": text} for text in texts]
    )


def _one_system_message(messages: list[Message]) -> list[Message]:
    """Return the messages with all system messages joined into the first one, unless there is only
    one and it is the first.
    """
    if [at for at, one in enumerate(messages) if one["role"] == "system"] in ([], [0]):
        return messages
    contents = [one["content"] for one in messages if one["role"] == "system"]
    texts = [
        one if isinstance(one, str) else "\n".join(part["text"] for part in one) for one in contents
    ]
    joined = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [joined, *(one for one in messages if one["role"] != "system")]


def _message(given: object) -> Message:
    """Return a message as templates get it, but with its content as a list of texts."""
    if not isinstance(given, dict) or not isinstance(role := given.get("role"), str):
        raise UnsureError("a message without a role")
    message: Message = {"role": role, "content": _texts(role, given.get("content"))}
    if role == "assistant":
        if (calls := given.get("tool_calls")) is not None:
            if not isinstance(calls, list):
                raise UnsureError("tool_calls")
            if calls:
                message["tool_calls"] = [_call(one) for one in calls]
        if (thoughts := _thoughts(given)) is not None:
            message["reasoning"] = message["reasoning_content"] = thoughts
    elif role == "tool" and "tool_call_id" in given:
        message["tool_call_id"] = _text(given["tool_call_id"], "tool_call_id")
    if isinstance(name := given.get("name"), str):
        message["name"] = name
    if given.get("task") is not None:
        raise UnsureError("a message's task")
    if role == "developer":
        if given.get("tools") is not None:
            raise UnsureError("a developer's tools")
        message["tools"] = None
    return message


def _texts(role: str, content: object) -> list[str]:
    parts = [content] if isinstance(content, str) else content if content is not None else []
    if not isinstance(parts, list):
        raise UnsureError("content")
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
            part = part["text"]
        elif part is not content:
            raise UnsureError("content")
        text = _text(part, "content")
        if role == "system" and text.startswith(_BILLING):
            raise UnsureError("a client's billing header")
        texts.append(text)
    return texts


def _thoughts(given: Mapping[str, Any]) -> str | None:
    thoughts = given.get("reasoning")
    thoughts = given.get("reasoning_content") if thoughts is None else thoughts
    return None if thoughts is None else _text(thoughts, "reasoning")


def _call(given: object) -> dict[str, Any]:
    """Return a call as vLLM's schema writes it, with its arguments as an object, empty if they are
    something else.
    """
    if (
        not isinstance(given, dict)
        or given.get("type") != "function"
        or not isinstance(given.get("function"), dict)
    ):
        raise UnsureError("tool_calls")
    function: dict[str, Any] = given["function"]
    text = _text(function.get("arguments"), "tool_calls")
    try:
        arguments = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        arguments = {}
    return {
        "id": _text(given.get("id"), "tool_calls"),
        "function": {
            "arguments": arguments if isinstance(arguments, dict) else {},
            "name": _text(function.get("name"), "tool_calls"),
            **_others(function, ("arguments", "name")),
        },
        "type": "function",
        **_others(given, ("id", "function", "type")),
    }


def _others(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in known}


def _tools(fields: Fields) -> list[Tool] | None:
    given = _value(fields, "tools", list)
    if given is None:
        return None
    if given and _any(fields, "tool_choice") == "none":
        # an engine's flag decides whether the template sees the tools
        raise UnsureError("tool_choice")
    return [tool(one) for one in given]


def tool(given: object) -> Tool:
    """Return a tool as vLLM's schema writes it: only known fields, in its own order.

    Raises:
        UnsureError: the schema would change or refuse it.
    """
    if not isinstance(given, dict) or given.get("type", "function") != "function":
        raise UnsureError("tools")
    function = given.get("function")
    if not isinstance(function, dict):
        raise UnsureError("tools")
    if given.get("defer_loading") is not None or function.get("defer_loading") is not None:
        raise UnsureError("tools: defer_loading")
    made = {
        "name": _text(function.get("name"), "tools"),
        "description": _optional(function, "description", str),
        "parameters": _optional(function, "parameters", dict),
    }
    if (strict := _optional(function, "strict", bool)) is not None:
        made["strict"] = strict
    return {"type": "function", "function": made}


def _optional(given: Mapping[str, Any], name: str, kind: type) -> Any:
    value = given.get(name)
    if value is not None and not isinstance(value, kind):
        raise UnsureError("tools")
    return value


# -- fields


def _any(fields: Fields, name: str) -> Any:
    # With Python's own parser, as engines do: a template may print its numbers.
    try:
        return json.loads(bytes(fields[name])) if name in fields else None
    except (ValueError, RecursionError):
        raise UnsureError(name) from None


def _value(fields: Fields, name: str, kind: type) -> Any:
    value = _any(fields, name)
    if value is not None and not isinstance(value, kind):
        raise UnsureError(name)
    return value


def flag(fields: Fields, name: str, default: bool) -> bool:
    """Return a field that is true, false or absent."""
    value = _any(fields, name) if name in fields else default
    if not isinstance(value, bool):
        raise UnsureError(name)
    return value


def text_of(raw: bytes) -> str:
    """Return the text of a JSON string."""
    try:
        return _text(json.loads(raw), "prompt")
    except ValueError:
        raise UnsureError("prompt") from None


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UnsureError(name)
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UnsureError(name)  # half a character: no tokenizer accepts it
    return value
