"""Pictures in a prompt: what stands in the places of their placeholders. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from pdproxy_lab.sim.language import mix
from pdproxy_lab.sim.request import Medium


def keyed(tokens: list[int], media: Sequence[Medium]) -> list[int]:
    """Return tokens with pictures' identifiers in the place of their placeholders: what caches of
    KV know a prompt by. Without pictures it is the same list.
    """
    if not media:
        return tokens
    found = list(tokens)
    for one in media:
        write(found, one, crc32(one.picture.identifier.encode()))
    return found


def write(tokens: list[int], medium: Medium, content: int) -> None:
    """Put a content in the places of a picture's placeholders."""
    for place in medium.places(0, len(tokens)):
        tokens[place] = mix(content, place - medium.offset)
