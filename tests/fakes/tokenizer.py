"""A tokenizer for the simulated engines: the simulator's own, as the proxy would load one."""

from __future__ import annotations

import threading
from typing import Any

from pdproxy.tokens.chat import Chat, ContentFormat, conversation
from pdproxy.tokens.errors import UnusableError
from pdproxy.tokens.ids import BegunIds, TokenIds, from_numbers
from pdproxy.tokens.tokenizer import PromptText
from pdproxy_lab.sim.api.template import render
from pdproxy_lab.sim.facts import Template
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer

ROOT = "./model"
"""What simulated engines call their model's root."""


class SimTokenizer:
    """Makes what simulated engines make. `template` and `add_bos` are theirs, or wrong; `gate`:
    every prompt waits for it.
    """

    def __init__(self, template: Template = "chatml", *, add_bos: bool = False) -> None:
        self._template = template
        self._tokenizer = BuiltInTokenizer(add_bos)
        self.gate = threading.Event()
        self.gate.set()
        self.first: int | None = None
        self.made = 0
        self.waiting = 0

    def completion(self, text: str, *, add_special_tokens: bool, scope: bytes = b"") -> TokenIds:
        """The ids of a text."""
        self.waiting += 1
        self.gate.wait(10)
        self.waiting -= 1
        self.made += 1
        return from_numbers(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def beginning(self, text: PromptText) -> BegunIds | None:
        """The ids of the first `first` characters, None to have all made."""
        if self.first is None:
            return None
        read = text.text[: self.first]
        special = text.add_special_tokens
        ids = from_numbers(self._tokenizer.encode(read, add_special_tokens=special))
        tokens = ids.count * len(text.text) // max(1, len(read))
        return BegunIds(ids, tokens, is_whole=read == text.text)

    def rendered(self, chat: Chat, form: ContentFormat) -> str:
        """The text of a chat."""
        return render(
            self._template,
            conversation(chat.messages, form, developer=True),
            tools=[_known(tool) for tool in chat.tools or ()],
            add_generation_prompt=chat.arguments["add_generation_prompt"],
            continue_final_message=chat.arguments["continue_final_message"],
            kwargs=chat.arguments,
        )


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _known(one) for name, one in value.items() if one is not None}
    return value


class Shelf:
    """Tokenizers by the folder that they would be loaded from. Any other folder holds none."""

    def __init__(self, **tokenizers: SimTokenizer) -> None:
        self._tokenizers = tokenizers

    def load(self, path: str) -> SimTokenizer:
        """The one of a folder."""
        try:
            return self._tokenizers[path]
        except KeyError:
            raise UnusableError("is not a folder") from None

    def find(self, name: str) -> SimTokenizer:
        """The one of an engine's root."""
        return self.load("root" if name == ROOT else name)
