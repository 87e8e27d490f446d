"""Media that a request names by URL: an engine would fetch them, from wherever it can reach
(`media.urls`).

Owns where such URLs can stand, and which of them pass. A `data:` URL holds its medium: it always
passes. Everything is looked at in its parsed form, since JSON has many spellings of a text. Bytes
are searched first: a field that can hold no such URL is not parsed for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire import lenient_json
from pdproxy.wire.fields import Fields
from pdproxy.wire.media_rule import Media

_SIGNS = (b"url", b":/", b"\\u00")
"""One of these is in every body that names a medium by URL: its key, the URL's own marks, or an
escape that hides them.
"""
_NEVER = frozenset(
    {
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "response_format",
        "structured_outputs",
        "guided_json",
        "text",
        "metadata",
        "stop",
    }
)
"""Fields of which engines fetch nothing. Schemas and descriptions in them may have any names and
URLs.
"""
_NOT_FETCHED = frozenset({"tool_calls", "function_call", "arguments", "annotations"})
"""Names inside of messages whose values the model has written, or that are shown to it as text."""
_OF_CALLS = frozenset({"action", "outputs", "results"})
"""What else an item of Responses for a call of a tool has of that kind. Engines look at all other
names, whatever `type` says: an object of an unknown type is a message, or a part of one that names
a medium (vLLM 0.32.0, with a `uuid`).
"""
_MEDIA = frozenset({"image", "images", "audio", "audios", "video", "videos", "file", "files"})
MEDIA_KWARGS = frozenset({"mm_processor_kwargs", "media_io_kwargs"})
"""Fields that name media beside the messages, of which none needs to have one."""
_EMBEDS = frozenset({"image_embeds", "audio_embeds", "video_embeds"})
"""Keys and types of parts that have embeddings in the place of a medium. An engine that takes KV
from others takes them, and fails as a whole at one without a tensor (vLLM 0.32.0).
"""
_HIDDEN = re.compile(rb"\\u00[2-7]")
"""An escape of a letter that needs none."""
_FOR_PLUGINS = "data"
"""The field that an engine's plugin reads (`/pooling`), in a form of its own: the plugin may fetch
a URL, or read a file.
"""
_URL = re.compile(r"[\x00-\x20]*[A-Za-z][A-Za-z0-9+.\x09\x0a\x0d-]*:")
"""How a URL begins, as lenient readers see it."""
_FETCHED = re.compile(rf"{_URL.pattern}[\x09\x0a\x0d]*[/\\]|[\x00-\x20]*file:", re.IGNORECASE)
"""How a URL begins in a text that may also be a prompt ("Question: ...")."""
_PLAIN = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?([/?#][\x21-\x5b\x5d-\x7e]*)?",
    re.IGNORECASE,
)
"""A URL that all programs read alike: no user, no backslash, no blank."""


class MediaUrlError(BadRequestError):
    """A medium is named by a URL that engines are not to fetch."""

    def __init__(self, rule: Media, param: str) -> None:
        more = " or of a host that media.hosts names" if rule.urls == "hosts" else ""
        text = (
            f"a medium is named by a URL that is not fetched here (media.urls): send it as a "
            f"data: URL{more}"
        )
        super().__init__(f"`{param}`: {text}", param=param)


def check_media(fields: Fields, rule: Media) -> None:
    """Look at all fields of a body.

    Raises:
        MediaUrlError: one names a medium by a URL that may not be fetched.
        BadRequestError: one has embeddings in the place of a medium that may not be sent; or one
            that may hold such a URL, or embeddings, can't be read.
    """
    if not rule.embeds:
        _check_embeds(fields)
    if rule.urls == "any":
        return
    for name, raw in fields.items():
        if name in _NEVER:
            continue
        data = bytes(raw)
        if name == _FOR_PLUGINS:
            names = _named_for_plugins
        elif not _may_name_one(data):
            continue
        else:
            names = _named_in_kwargs if name in MEDIA_KWARGS else _named_in_parts
        for url in _urls(_decoded(data), name, names):
            if not _passes(url, rule):
                raise MediaUrlError(rule, name)


def _check_embeds(fields: Fields) -> None:
    for name, raw in fields.items():
        if name in _NEVER:
            continue
        data = bytes(raw)
        if data.find(b"_embeds") < 0 and _HIDDEN.search(data) is None:
            continue
        for key in _keys(_decoded(data)):
            if key in _EMBEDS:
                text = f"You must set `--enable-mm-embeds` to input `{key}`"  # in vLLM's words
                raise BadRequestError(text)


def _keys(value: object) -> Iterator[str]:
    """Return the keys and types of objects that engines may take for a medium."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            yield from one
            if isinstance(kind := one.get("type"), str):
                yield kind
            waiting += [inner for key, inner in one.items() if not _is_text_to_engines(one, key)]


def _may_name_one(data: bytes) -> bool:
    """Search a field's JSON, without a parser: up to 10 us per KiB, of prose 5 us."""
    if any(sign in data for sign in _SIGNS):
        return True
    if b":\\" in data:  # JSON may escape a slash, and readers of URLs skip line ends and tabs
        data = data.replace(b"\\n", b"").replace(b"\\r", b"").replace(b"\\t", b"")
        if b":/" in data or b":\\/" in data:
            return True
    return b"file:" in data.lower()


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return lenient_json.load(data)


def _urls(value: object, name: str, names: Callable[[str, str], object]) -> Iterator[str]:
    """Return what stands where engines look for the URL of a medium. `names`: whether a text,
    behind its key, is one.
    """
    waiting: list[tuple[str, object]] = [(name, value)]
    while waiting:
        key, one = waiting.pop()
        if isinstance(one, str):
            if names(key, one):
                yield one
        elif isinstance(one, list):
            waiting += [(key, item) for item in one]
        elif isinstance(one, dict):
            shown = names is _named_in_parts
            waiting += [
                (inner, item)
                for inner, item in one.items()
                if not (shown and _is_text_to_engines(one, inner))
            ]


def _named_in_parts(key: str, text: str) -> object:
    return key.endswith("url") or (key in _MEDIA and _URL.match(text))


def _named_in_kwargs(key: str, text: str) -> object:
    return key.endswith("url") or _URL.match(text)


def _named_for_plugins(key: str, text: str) -> object:
    """Return whether a plugin may fetch a text, or read a file of this name.

    Only its key or a format beside it shows a path: base64 may begin with a slash, too.
    """
    key = key.lower()
    is_path = text.lower() == "path" and key.endswith("format") and not key.startswith("out")
    return is_path or key.endswith(("url", "path")) or _FETCHED.match(text)


def _is_text_to_engines(owner: dict[str, Any], key: str) -> bool:
    """Return whether what is behind a key of an object is only shown to the model."""
    if key in _NOT_FETCHED:
        return True
    kind = owner.get("type")
    if not isinstance(kind, str):
        return False
    if kind.endswith("_call"):
        return key in _OF_CALLS
    return kind.endswith("tool_use") and key == "input"


def _passes(url: str, rule: Media) -> bool:
    if url[:5].lower() == "data:" or not url:
        return True
    if rule.urls != "hosts" or (found := _PLAIN.fullmatch(url)) is None:
        return False
    return found[1].lower() in rule.hosts
