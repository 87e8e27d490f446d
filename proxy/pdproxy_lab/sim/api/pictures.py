"""Pictures in messages, as the processor of a vision-language model reads them.

Owns which content parts are pictures, how many tokens each takes, and what is refused in vLLM's
words. Its model is Qwen2-VL: a token for 28 by 28 pixels of a PNG. No other format's size is read:
their bytes decide. A picture behind a URL is not fetched: the URL stands for its bytes.
"""

from __future__ import annotations

import binascii
import hashlib
import math
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from pdproxy_lab.sim.api.errors import RefusedRequest
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.request import Medium, Picture
from pdproxy_lab.sim.tokenizer import PLACEHOLDER

MARK = "<|image_pad|>"
"""What stands for a picture in the text of a prompt."""
_PNG = b"\x89PNG\r\n\x1a\n"
_PIXELS = 28
"""Of a token, in each direction."""
_MIN, _MAX = 4, 64
"""Tokens of a picture; larger and smaller ones are resized."""
_KINDS = {"image_url": "image_url", "input_image": "image_url", "image_embeds": "image_embeds"}
"""The types of parts that are pictures, each with the key of its value."""


def key_of(part: Any) -> str | None:
    """Return under which key a part has a picture, None if it is none."""
    if not isinstance(part, Mapping):
        return None
    if part.get("uuid") is None and part.get("type") is not None:
        return _KINDS.get(str(part["type"]))
    return next((key for key in ("image_url", "image_embeds") if key in part), None)


def with_pictures(
    engine: SimEngine, messages: Sequence[Mapping[str, Any]], text: str, *, special: bool
) -> tuple[list[int], tuple[Medium, ...]]:
    """Return the ids of a prompt's text, with placeholders for the pictures of its messages, and
    these. `special`: the tokenizer adds its own tokens.

    Raises:
        Refused: a picture can't be read, or the text itself has a mark of pictures.
    """
    pictures = _read(engine, list(_parts(messages)))
    first, *others = text.split(MARK)
    if len(others) != len(pictures):
        raise RefusedRequest(f"Expected {len(pictures)} pictures, found {len(others)} marks.")
    ids, media = engine.tokenizer.encode(first, add_special_tokens=special), []
    for picture, piece in zip(pictures, others, strict=True):
        media.append(Medium(len(ids), picture))
        ids += [PLACEHOLDER] * picture.length
        ids += engine.tokenizer.encode(piece, add_special_tokens=False)
    return ids, tuple(media)


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if (key := key_of(part)) is not None:
                yield key, part


def _read(engine: SimEngine, parts: Sequence[tuple[str, Mapping[str, Any]]]) -> Sequence[Picture]:
    """Return what the processor makes of parts. All are read before it is asked for any."""
    keys = {key for key, _ in parts}
    if "image_embeds" in keys and not engine.facts.takes_metadata:
        raise RefusedRequest(
            "You must set `--enable-mm-embeds` to input `image_embeds`", "image_embeds"
        )
    if len(keys) > 1:
        raise RefusedRequest("Mixing raw image and embedding inputs is not allowed", "image_embeds")
    if "image_embeds" in keys:
        return [_named(_embedded(part), part, index) for index, (_, part) in enumerate(parts)]
    made = [_raw(part) for _, part in parts]
    return [
        _processed(engine, one, part, index)
        for index, ((_, part), one) in enumerate(zip(parts, made, strict=True))
    ]


def _processed(
    engine: SimEngine, picture: Picture | None, part: Mapping[str, Any], index: int
) -> Picture:
    """Return a picture as it was when the processor first read it under this identifier."""
    known = engine.pictures.get(str(part.get("uuid") or (picture and picture.identifier)))
    engine.stats.mm_cache_queries += 1
    engine.stats.mm_cache_hits += known is not None
    if known is None:
        known = _named(picture, part, index)
        engine.pictures[known.identifier] = known
    return known


def _named(picture: Picture | None, part: Mapping[str, Any], index: int) -> Picture:
    """Return a picture under the name that its part gives it."""
    if picture is None:
        raise RefusedRequest(f"Cache miss for image at index {index} but data is not provided.")
    return replace(picture, identifier=str(part.get("uuid") or picture.identifier))


def _raw(part: Mapping[str, Any]) -> Picture | None:
    """Return what a picture's bytes make; None: there are none."""
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not url:
        return None
    data = _bytes(str(url))
    length = _MIN + crc32(data) % (_MAX - _MIN + 1)
    if data.startswith(_PNG):
        if len(data) < 24:
            raise _unreadable()
        width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
        tokens = math.ceil(width / _PIXELS) * math.ceil(height / _PIXELS)
        length = min(max(tokens, _MIN), _MAX)
    return _picture(data, length)


def _picture(data: bytes, length: int) -> Picture:
    digest = hashlib.sha256(data)
    content = int.from_bytes(digest.digest()[:8])
    return Picture(digest.hexdigest(), length, content, (1, 2, 2 * length))


def _bytes(url: str) -> bytes:
    if url.startswith(("http://", "https://")):
        return url.encode()
    if url[:5].lower() != "data:":
        raise RefusedRequest("The URL must be either a HTTP, data or file URL.")
    kind, comma, text = url.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise _unreadable()
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _unreadable() from None
    if not data:
        raise _unreadable()
    return data


def _unreadable() -> RefusedRequest:
    return RefusedRequest("Failed to load image: cannot identify image file")


def _embedded(part: Mapping[str, Any]) -> Picture | None:
    """Return what a picture's size, with or without a tensor, makes; None: there is nothing."""
    value = part.get("image_embeds")
    if value is None:
        return None
    grid = value.get("image_grid_thw") if isinstance(value, Mapping) else None
    if not isinstance(grid, list) or not all(type(one) is int and one > 0 for one in grid):
        raise RefusedRequest("image_embeds must have image_grid_thw", "image_embeds")
    tensor = value.get("image_embeds")
    length = max(math.prod(grid) // 4, 1)
    made = _picture(repr((grid, tensor)).encode(), length)
    return replace(made, content=made.content if tensor else None, grid=tuple(grid))
