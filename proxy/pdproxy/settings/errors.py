"""Errors of settings: one line that names the key, what was expected and where it was read.

Owns `SettingsError` and how it shows keys and values. Values of secrets are not shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches

KeyPath = tuple[str | int, ...]

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MAX_SHOWN = 80  # characters of a value or a key in an error


class SettingsError(ValueError):
    """The settings are wrong. Its text is one line for the operator who wrote them."""


def spell_key(path: KeyPath) -> str:
    """Return a key's path as people write it: `pools[0].nodes[1].url`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + (
                step if _PLAIN.fullmatch(step) and len(step) <= _MAX_SHOWN else quote(step)
            )
    return text or "the top level"


def spell_value(path: KeyPath, value: object) -> str:
    """Return a value as an error may show it: only the kind of a collection; nothing of API keys or of values under `auth`."""
    match value:
        case None:
            return "null"
        case dict():
            return "a mapping"
        case list() | tuple() | set():
            return "a list"
        case _ if path[:1] == ("auth",) or path[-1:] == ("api_key",):
            return "something else (not shown)"
        case bool():
            return "true" if value else "false"
        case int() if abs(value) < 10**_MAX_SHOWN:
            return str(value)
        case int():
            return "a huge number"
        case float():
            return str(value)
        case str():
            return quote(value)
        case _:
            return quote(str(value))


def quote(text: str) -> str:
    """Return a text in quotes, on one line and at most 80 characters long, without line breaks and terminal escapes."""
    return json.dumps(text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "...")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return ` (did you mean x?)` for the known name that is closest, else nothing."""
    close = get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
