"""The token ids of a prompt, as the JSON that is sent to engines: a list of numbers is seldom
needed.
"""

from __future__ import annotations

import msgspec


class TokenIds(msgspec.Struct, frozen=True):
    """A prompt's ids. `json` is a JSON array of them, `count` their number."""

    json: bytes
    count: int

    def less_one(self) -> TokenIds:
        """Return the ids without the last one, of at least two."""
        return TokenIds(self.json[: self.json.rindex(b",")] + b"]", self.count - 1)

    def numbers(self) -> list[int]:
        """Return the ids as integers, for contracts that compute with them."""
        return msgspec.json.decode(self.json, type=list[int])


class BegunIds(msgspec.Struct, frozen=True):
    """The ids of a prompt's beginning. `tokens`: the whole prompt's length; an estimate, unless
    `is_whole`: then they are all of its ids.
    """

    ids: TokenIds
    tokens: int
    is_whole: bool


def from_numbers(numbers: list[int] | tuple[int, ...]) -> TokenIds:
    """Return ids that are integers."""
    return TokenIds(msgspec.json.encode(numbers), len(numbers))
