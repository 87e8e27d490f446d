"""Turns tokens into text one by one: holds back incomplete characters, finds stop strings. Pure.

Owns vLLM's order of steps: text first, then stop strings in the new text, then what of it is held
back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from pdproxy_lab.sim.tokenizer import BuiltInTokenizer


class Detokenizer:
    """The text of one choice."""

    def __init__(
        self,
        tokenizer: BuiltInTokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._include_stop, self._min_tokens, self._skip_special = (
            include_stop,
            min_tokens,
            skip_special_tokens,
        )
        self._held = (
            max((len(stop) for stop in stops), default=1) - 1 if stops and not include_stop else 0
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._given = 0
        self.count = 0
        """The tokens so far."""
        self.text = ""
        """All text so far, including what is held back."""

    def add(self, tokens: Iterable[int], stopped: bool) -> str | None:
        """Take new tokens; return the stop string that they complete, if any.

        `stopped`: the last of them ended the request and is not text, unless stops are included in
        the output.
        """
        ids = list(tokens)
        silent = ids.pop() if stopped and ids and not self._include_stop else None
        checked_from = len(self.text)
        for token in ids:
            if self.count < self._min_tokens:
                checked_from = len(self.text)
            self.count += 1
            if self._skip_special and self._tokenizer.is_special(token):
                continue
            self.text += self._decoder.decode(self._tokenizer.piece(token))
            if self.count <= self._min_tokens:
                checked_from = len(self.text)
        self.count += silent is not None
        if self._stops and self.count > self._min_tokens:
            return self._cut(len(self.text) - checked_from)
        return None

    def take(self, finished: bool) -> str:
        """Return the text that is new since the last time, without what may be the beginning of a
        stop string.
        """
        end = len(self.text) if finished else len(self.text) - self._held
        if end <= self._given:
            return ""
        new, self._given = self.text[self._given : end], end
        return new

    def _cut(self, new: int) -> str | None:
        if not new:
            return None
        for stop in self._stops:
            place = self.text.find(stop, max(len(self.text) - new - len(stop) + 1, 0))
            if place < 0:
                continue
            self.text = self.text[: place + len(stop) * self._include_stop]
            return stop
        return None
