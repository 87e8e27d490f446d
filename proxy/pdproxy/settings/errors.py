"""How a mistake in the settings is told: one line that names the key, what it should be and where it was read.

Owns `SettingsError` and the spelling of keys and values in it. Values of secrets are not spelled at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches

KeyPath = tuple[str | int, ...]

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_LONGEST = 80  # characters of a value or a key in an error


class SettingsError(ValueError):
    """The settings are wrong. Its text is one line, fit for the operator who wrote them."""


def spell_key(path: KeyPath) -> str:
    """Spell a key's path the way people write it: `pools[0].nodes[1].url`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + (step if _PLAIN.fullmatch(step) and len(step) <= _LONGEST else quote(step))
    return text or "the top level"


def spell_value(path: KeyPath, value: object) -> str:
    """Spell a value as an error may show it: collections by their kind, keys and anything under `auth` not at all."""
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
        case int() if abs(value) < 10**_LONGEST:
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
    """Put a text in quotes on one line, whatever it holds: no line breaks, no terminal escapes, no novel."""
    return json.dumps(text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return ` (did you mean x?)` for the known name that is closest, else nothing."""
    close = get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
