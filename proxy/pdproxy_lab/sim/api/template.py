"""The chat templates: messages to the text of a prompt. Pure.

Owns how roles, tools and thinking are printed. `chatml` is common, `plain` has other marks, `dated`
prints the date, as some real templates do: around midnight two engines may make different prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdproxy_lab.sim.api.errors import RefusedRequest
from pdproxy_lab.sim.api.pictures import MARK, key_of
from pdproxy_lab.sim.facts import Template

_MARKS: dict[Template, tuple[str, str]] = {
    "chatml": ("<|im_start|>{}\n", "<|im_end|>\n"),
    "dated": ("<|im_start|>{}\n", "<|im_end|>\n"),
    "plain": ("[{}] ", "\n"),
}
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
"""The types of parts that are text, each with the key of the text. A part with a `uuid` is read by
its keys alone.
"""
_MEDIA = frozenset(
    {
        "image_url",
        "image_pil",
        "image_embeds",
        "input_image",
        "audio_url",
        "audio_embeds",
        "input_audio",
        "video_url",
        "video_embeds",
        "prompt_embeds",
    }
)


def render(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    date: str = "",
    sees: bool = False,
) -> str:
    """Return a chat as the text of a prompt; if the model `sees`, with marks for pictures.

    Raises:
        Refused: the conversation is empty, or has content that the model can't read.
    """
    if not messages:
        raise RefusedRequest(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    if not isinstance(messages[0].get("role"), str):
        raise RefusedRequest("Each message must have a role.")
    begin, end = _MARKS[template]
    parts = [begin.format("system") + f"Today is {date}." + end] if template == "dated" else []
    parts += [
        begin.format(message.get("role")) + _content(message, sees) + end for message in messages
    ]
    if tools:
        parts.append(
            begin.format("tools")
            + json.dumps(list(tools), ensure_ascii=False, sort_keys=True)
            + end
        )
    if continue_final_message:
        return "".join(parts)[: -len(end)]
    if add_generation_prompt:
        parts.append(begin.format("assistant"))
        if kwargs and kwargs.get("enable_thinking") is False:
            parts.append("<think>\n\n</think>\n\n")
    return "".join(parts)


def _content(message: Mapping[str, Any], sees: bool) -> str:
    content = message.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "\n".join(_part(part, sees) for part in content)
    else:
        raise RefusedRequest("Message content must be a string or a list of parts.")
    calls = message.get("tool_calls") or ()
    printed = [
        json.dumps(_call(call.get("function", {})), ensure_ascii=False, sort_keys=True)
        for call in calls
    ]
    return text + "".join(f"<tool_call>\n{call}\n</tool_call>" for call in printed)


def _call(function: Any) -> Any:
    """Return a call's function with its arguments as an object, as templates expect it."""
    if not isinstance(function, Mapping):
        return function
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**function, "arguments": arguments if isinstance(arguments, Mapping) else {}}


def has_media(parts: Iterable[Any]) -> bool:
    """Return whether a part of a message is a medium: by its type, or by a key, whatever its type
    is.
    """
    return any(
        isinstance(part, Mapping)
        and not (part.get("type", "text") in _TEXTS and _MEDIA.isdisjoint(part))
        for part in parts
    )


def _part(part: Any, sees: bool) -> str:
    if isinstance(part, str):
        return part
    if sees and key_of(part) is not None:
        return MARK
    if (
        isinstance(part, Mapping)
        and part.get("uuid") is None
        and part.get("type", "text") in _TEXTS
    ):
        text = part.get(_TEXTS[part.get("type", "text")])
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RefusedRequest(
        f"At most 0 {str(kind).removesuffix('_url')}(s) may be provided in one prompt."
    )
