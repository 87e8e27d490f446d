"""Tool calls in simple form: the text that a model is forced to generate, and the parser that turns
it into calls. Pure.

Owns both sides: what is forced by `tool_choice`, and the deltas of names and arguments that a
client gets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pdproxy_lab.sim.api.protocol import ChatBody, NamedTool, Tool
from pdproxy_lab.sim.api.structured import TextGrammar, texts_of_schema
from pdproxy_lab.sim.language import mix
from pdproxy_lab.sim.request import Grammar
from pdproxy_lab.sim.tokenizer import IM_END, TOOL_CALL, BuiltInTokenizer

_NAME = re.compile(r'"name": "([^"]*)"')
_ARGUMENTS = re.compile(r'"arguments": ')
_TOOLS = re.compile(r"<\|im_start\|>tools\n(\[.*?\])<\|im_end\|>")
_BEGIN, _END = "<tool_call>\n", "\n</tool_call>"


def calls_tools(body: ChatBody, prompt: Sequence[int]) -> bool:
    """Return whether the model calls a tool: always if it must, else depending on the prompt's
    ids.
    """
    if not body.tools or body.tool_choice in (None, "none"):
        return False
    return body.tool_choice != "auto" or mix(*prompt[-64:]) % 2 == 0


def grammar_of_calls(body: ChatBody, tokenizer: BuiltInTokenizer) -> TextGrammar:
    """Return the texts that a model may generate to call a tool."""
    choice, tools = body.tool_choice, body.tools or []
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    texts = [
        f'{_BEGIN}{{"name": "{tool.function.name}", "arguments": {arguments}}}{_END}'
        for tool in tools
        for arguments in texts_of_schema(tool.function.parameters or {"type": "object"})
    ]
    return TextGrammar(tokenizer, texts)


def grammar_of_begun_call(prompt: Sequence[int], tokenizer: BuiltInTokenizer) -> Grammar | None:
    """Return how a model ends a call that a prompt ends with the beginning of, None where it does
    not. As a real model would.
    """
    begun = next(
        (place for place in range(len(prompt) - 1, -1, -1) if prompt[place] in (TOOL_CALL, IM_END)),
        None,
    )
    if begun is None or prompt[begun] != TOOL_CALL:
        return None
    found = _TOOLS.findall(tokenizer.decode(prompt[:begun], skip_special_tokens=False))
    if not found:
        return None
    tools = [Tool.model_validate(one) for one in json.loads(found[-1])]
    body = ChatBody.model_validate({"messages": [], "tools": tools, "tool_choice": "required"})
    return _Rest(grammar_of_calls(body, tokenizer), tuple(prompt[begun:]))


class _Rest:
    """What a grammar allows behind some ids."""

    binds_thoughts = True

    def __init__(self, grammar: TextGrammar, begun: tuple[int, ...]) -> None:
        self._grammar, self._begun = grammar, begun

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        """Return the ids that may follow."""
        return self._grammar.allowed((*self._begun, *generated))


class CallParser:
    """Turns the text of one choice into deltas. Free text passes, a call comes as its name and
    pieces of its arguments.
    """

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self._text = ""
        self._told = 0
        self.name: str | None = None
        self.arguments = ""

    @property
    def content(self) -> str | None:
        """The text outside of calls, of a whole answer; None where there is only a call."""
        return self._text if self.name is None or not self.arguments else None

    def add(self, text: str) -> dict[str, Any] | None:
        """Take new text; return the delta to send, None if there is none yet."""
        self._text += text
        if not self._text.startswith(_BEGIN[: len(self._text)]):
            new, self._told = self._text[self._told :], len(self._text)
            return {"content": new} if new else None
        if self.name is None:
            found = _NAME.search(self._text)
            if found is None:
                return None
            self.name = found.group(1)
            function = {"name": self.name}
            call = {"id": self._call_id, "type": "function", "index": 0, "function": function}
            return {"content": None, "tool_calls": [call]}
        marker = _ARGUMENTS.search(self._text)
        if marker is None:
            return None
        before, self.arguments = len(self.arguments), _first_value(self._text[marker.end() :])
        new = self.arguments[before:]
        return (
            {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": new}}]}
            if new
            else None
        )


def _first_value(text: str) -> str:
    """Return the JSON value that a text begins with, as far as it is complete."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return text
    return text[:end]
