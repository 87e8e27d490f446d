"""The parsers of one choice of a chat together: its thoughts, its tool calls, and what is hidden of
both. Pure.

Owns the order: thoughts come first, calls are looked for in the text behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdproxy_lab.sim.api import reasoning
from pdproxy_lab.sim.api.protocol import ChatBody, NamedTool
from pdproxy_lab.sim.api.tools import CallParser
from pdproxy_lab.sim.facts import SimFacts


def looks_for_calls(body: ChatBody) -> bool:
    """Return whether a parser looks for tool calls in the answers to a chat."""
    return bool(body.tools) and body.tool_choice not in (None, "none")


def finish_of(body: ChatBody, reason: str | None, parser: CallParser | None) -> str | None:
    """Return the finish reason that a client sees. `parser`: of the choice, None if it looks for no
    calls.
    """
    named = isinstance(body.tool_choice, NamedTool)
    called = parser is not None and parser.name is not None and not named
    return "tool_calls" if called and reason == "stop" else reason


class ChoiceParser:
    """The parsers of one choice of a stream. `prompt`: its ids; `hides`: the client gets no
    reasoning.
    """

    def __init__(
        self,
        facts: SimFacts,
        prompt: Sequence[int],
        calls: CallParser | None,
        *,
        hides: bool = False,
    ) -> None:
        self._thinks = facts.reasoning_parser != "none"
        self._looks = facts.enable_auto_tool_choice
        self._thoughts = reasoning.Thoughts(prompt)
        self._hides = hides
        self.calls = calls

    def add(self, text: str, ids: Sequence[int]) -> dict[str, Any] | None:
        """Take what one step made; return the delta to send, None: nothing."""
        found = self._parsed(text, ids)
        if found is None or not self._hides:
            return found
        if not found.get("content") and "tool_calls" not in found:
            return None
        return {"content": found.get("content"), "reasoning": None} | {
            name: value for name, value in found.items() if name == "tool_calls"
        }

    def _parsed(self, text: str, ids: Sequence[int]) -> dict[str, Any] | None:
        if self._thinks and self._thoughts.open:
            return self._thoughts.add(text, ids)
        if self.calls is not None:
            found = self.calls.add(text)
            if (
                found is not None
                and "id" in (found.get("tool_calls") or [{}])[0]
                and (more := self.calls.add(""))
            ):
                # The step made several tokens: arguments came with the name.
                found["tool_calls"][0]["function"] |= more["tool_calls"][0]["function"]
            return found
        if self._looks and not text:
            return None  # a tool parser runs with and without tools, and has no output here
        return {"content": text}
