"""Bodies of requests: prompts of given lengths, with a trace's common beginnings or with none in
common.

A completion gets token ids, so its length is exact. A chat gets words instead: how many tokens each
of them has, and how many the chat template adds, is found by two chats (`WordTokens`). What the
server counted is reported. Pure: the same arguments give the same bytes.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any, Literal

import msgspec

from pdproxy_lab.bench.trace import BLOCK
from pdproxy_lab.bench.words import WORDS
from pdproxy_lab.bench.workload import Lengths, Planned

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_KEPT_BLOCKS = 4096
"""Blocks of a trace that are kept encoded: 10 MB. Another one is made again."""
OWN_FIELDS = frozenset(
    {
        "messages",
        "prompt",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
    }
)
"""Fields of a body that are made here."""
_PLACE = b'"@"'


class WordTokens(msgspec.Struct, frozen=True):
    """What a server's tokenizer makes of a chat: `template` tokens for all, and `per_word` for each
    word, on average.
    """

    template: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int) -> int:
        """Return how many words have so many tokens with the template, one at least."""
        return max(round((tokens - self.template) / self.per_word), 1)


ONE_EACH = WordTokens()


def word_tokens(one: int, all_and_one: int) -> WordTokens:
    """Return what the server's counts of two chats show: of one word, and of that word and all of
    the list.

    What can't be of a tokenizer is not believed: then each word counts as one token.
    """
    per_word = (all_and_one - one) / len(WORDS)
    return WordTokens(max(one - per_word, 0.0), per_word) if 0.2 <= per_word <= 20 else ONE_EACH


class Prompts:
    """Makes the bodies of one run.

    `salt`: with another salt all prompts differ, so that no cache of an earlier run has them.
    `ids`: the range of token ids. `extra`: fields that each body gets, none of `OWN_FIELDS`.
    `words`: of a chat.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        salt: str,
        ids: Lengths,
        extra: dict[str, Any],
        words: WordTokens = ONE_EACH,
    ) -> None:
        self._salt = salt
        self._words = words
        self._chat = endpoint == "chat"
        if self._chat:
            self._items = [word.encode() for word in WORDS]
            self._join = b" "
        else:
            self._items = [b"%d" % number for number in range(ids.low, ids.high + 1)]
            self._join = b","
        self._blocks: OrderedDict[int, list[bytes]] = OrderedDict()
        length = "max_completion_tokens" if self._chat else "max_tokens"
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": "@"}]} if self._chat else {"prompt": "@"}
        )
        fields = {
            **prompt,  # first: its place is found by its text
            "model": model,
            length: 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._length = length
        self._fields = fields | extra

    def body(self, index: int, planned: Planned) -> bytes:
        """Return the body of a run's request `index`."""
        if planned.text is not None:
            # the beginning differs, so no cache has the prompt
            begin = random.Random(f"{self._salt}:request {index}").randbytes(4).hex()
            text = msgspec.json.encode(f"{begin} {planned.text}")
            head, tail = self._around(planned.output_tokens)
            return b"".join((head, text, tail))
        return self._with(self._prompt(index, planned), planned.output_tokens)

    def conversation(self, index: int, planned: Planned) -> str:
        """Return the name of the conversation of a run's request `index`: 16 hexadecimal digits."""
        number = planned.conversation
        what = f"request {index}" if number is None else f"conversation {number}"
        return random.Random(f"{self._salt}:name of {what}").randbytes(8).hex()

    def listing(self, index: int, planned: Planned) -> bytes:
        """Return the body of a chat of one word, or with another index than 0 of this word and all
        of the list.
        """
        return self._with([self._items[0], *(self._items if index else ())], planned.output_tokens)

    def _with(self, prompt: list[bytes], output_tokens: int) -> bytes:
        head, tail = self._around(output_tokens)
        items = self._join.join(prompt)
        return b"".join(
            (head, b'"', items, b'"', tail) if self._chat else (head, b"[", items, b"]", tail)
        )

    def _around(self, output_tokens: int) -> tuple[bytes, bytes]:
        """Return what a body has before and behind its prompt."""
        fields = self._fields | {self._length: output_tokens}
        head, _, tail = msgspec.json.encode(fields).partition(_PLACE)
        return head, tail

    def _prompt(self, index: int, planned: Planned) -> list[bytes]:
        count = self._words.words(planned.input_tokens) if self._chat else planned.input_tokens
        if planned.hash_ids is None:
            return self._draw(f"request {index}", count)
        found: list[bytes] = []
        for number in planned.hash_ids:
            found += self._block(number)
        return found[:count]

    def _block(self, number: int) -> list[bytes]:
        block = self._blocks.get(number)
        if block is None:
            size = max(round(BLOCK / self._words.per_word), 1) if self._chat else BLOCK
            block = self._blocks[number] = self._draw(f"block {number}", size)
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(number)
        return block

    def _draw(self, what: str, count: int) -> list[bytes]:
        return random.Random(f"{self._salt}:{what}").choices(self._items, k=count)
