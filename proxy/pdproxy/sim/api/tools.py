"""Tool calls in simple form: the text that a model is made to say, and the parser that turns it into calls. Pure.

Owns both sides: what is forced by `tool_choice`, and the deltas of names and arguments that a client sees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pdproxy.sim.api.protocol import ChatBody, NamedTool, Tool
from pdproxy.sim.api.structured import TextGrammar, texts_of_schema
from pdproxy.sim.language import mix
from pdproxy.sim.tokenizer import Tokenizer

_NAME = re.compile(r'"name": "([^"]*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)": ')
_BEGIN, _END = "<tool_call>\n", "\n</tool_call>"


def calls_tools(body: ChatBody, prompt: Sequence[int]) -> bool:
    """Tell whether the model calls a tool: always if it must, else if the prompt's ids say so."""
    if not body.tools or body.tool_choice in (None, "none"):
        return False
    return body.tool_choice != "auto" or mix(*prompt[-64:]) % 2 == 0


def grammar_of_calls(body: ChatBody, tokenizer: Tokenizer) -> TextGrammar:
    """Return the texts that a model may say which calls a tool."""
    tools = body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        return TextGrammar(tokenizer, [a for tool in tools if tool.function.name == name for a in _arguments(tool)])
    if body.tool_choice == "required":
        texts = [f'[{{"name": "{t.function.name}", "parameters": {a}}}]' for t in tools for a in _arguments(t)]
    else:
        texts = [
            f'{_BEGIN}{{"name": "{t.function.name}", "arguments": {a}}}{_END}' for t in tools for a in _arguments(t)
        ]
    return TextGrammar(tokenizer, texts)


def _arguments(tool: Tool) -> list[str]:
    return texts_of_schema(tool.function.parameters or {"type": "object"})


class CallParser:
    """Turns the text of one choice into deltas. Free text passes, a call comes as its name and pieces of its arguments."""

    def __init__(self, body: ChatBody, call_id: str) -> None:
        choice = body.tool_choice
        self._named = choice.function.name if isinstance(choice, NamedTool) else None
        self._required = choice == "required"
        self._call_id = call_id
        self._text = ""
        self._told_content = 0
        self._told_arguments: int | None = None
        self.name: str | None = None
        self.arguments = ""

    @property
    def content(self) -> str | None:
        """The text outside of calls, of a whole answer; None where there is only a call."""
        if self.name is None:
            return self._text
        return "" if self._named or self._required else None

    def add(self, text: str, finished: bool) -> dict[str, Any] | None:
        """Take new text; return the delta to send, None if there is nothing to tell yet."""
        self._text += text
        if self._named is not None:
            self.name, begin = self._named, 0
        elif self._required or self._text.lstrip().startswith("<"):
            held = _BEGIN[: len(self._text)] if not self._required else ""
            if held and not self._text.startswith(held):
                return self._free(finished)
            found = _NAME.search(self._text)
            marker = _ARGUMENTS.search(self._text)
            if found is None:
                return None
            first = self.name is None
            self.name = found.group(1)
            if marker is None:
                return self._call("") if first else None
            begin = marker.end()
        else:
            return self._free(finished)
        return self._call(_first_value(self._text[begin:]))

    def _free(self, finished: bool) -> dict[str, Any] | None:
        new, self._told_content = self._text[self._told_content :], len(self._text)
        return {"content": new} if new or finished else None

    def _call(self, arguments: str) -> dict[str, Any] | None:
        first = self._told_arguments is None
        new, self._told_arguments = arguments[self._told_arguments or 0 :], len(arguments)
        self.arguments = arguments
        if first:
            function = {"name": self.name, "arguments": new}
            return {"tool_calls": [{"id": self._call_id, "type": "function", "index": 0, "function": function}]}
        return {"tool_calls": [{"index": 0, "function": {"arguments": new}}]} if new else None


def _first_value(text: str) -> str:
    """Return the JSON value that a text begins with, as far as it is there."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return text
    return text[:end]
