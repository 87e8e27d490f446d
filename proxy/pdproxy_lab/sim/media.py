"""Pictures in a prompt: what caches know them by, and what attention reads in their places. Pure.

Owns the encoder. A picture is encoded when a step computes KV of one of its placeholders, unless
the encoder's cache has it. So an engine that has all KV from elsewhere encodes nothing, except
where the last token of a prompt is a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from pdproxy_lab.sim.language import mix
from pdproxy_lab.sim.request import EngineDeadError, Medium, Picture
from pdproxy_lab.sim.stats import Stats


def keyed(tokens: list[int], media: Sequence[Medium]) -> list[int]:
    """Return tokens with pictures' identifiers in the place of their placeholders: what caches of
    KV know a prompt by. Without pictures it is the same list.
    """
    if not media:
        return tokens
    found = list(tokens)
    for one in media:
        _write(found, one, crc32(one.picture.identifier.encode()))
    return found


def _write(tokens: list[int], medium: Medium, content: int) -> None:
    for place in medium.places(0, len(tokens)):
        tokens[place] = mix(content, place - medium.offset)


class Encoder:
    """The encoder of a core, with its cache: what it has encoded, by identifier. The cache is never
    full.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._encoded: dict[str, int] = {}

    def seen(
        self, tokens: Sequence[int], media: Sequence[Medium], start: int, end: int
    ) -> Sequence[int]:
        """Return tokens as attention reads those between `start` and `end`: placeholders there have
        the content of their pictures. Whatever is not in the cache is encoded.

        Raises:
            EngineDeadError: there is nothing to encode.
        """
        wanted = [one for one in media if one.places(start, end)]
        if not wanted:
            return tokens
        found = list(tokens)
        for one in wanted:
            _write(found, one, self._content(one.picture))
        return found

    def _content(self, picture: Picture) -> int:
        if picture.identifier not in self._encoded:
            if picture.content is None:
                raise EngineDeadError
            self._encoded[picture.identifier] = picture.content
            self._stats.encoder_inputs += 1
        return self._encoded[picture.identifier]
