"""What of a recorded body is kept: its shape, not the texts of its client.

A long text becomes a short one that says how long it was; ids, days and paths become fixed ones; of
many tools those stay that show something new. Two bodies with the same `shape` are one.
"""

from __future__ import annotations

import json
import re
from typing import Any

LONGEST = 160
"""Characters of a text that is kept as it is."""
_DESCRIPTION = 40
_FILLER = "It stands for what the client wrote: only its shape matters to a proxy."
_IDS = (
    re.compile(r"(?<![0-9a-f])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"),
    re.compile(r"(?<![0-9a-z-])(?=[0-9a-f]*[0-9])[0-9a-f]{6,}\b"),
)
_DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")
_PATH = re.compile(r"(?<![\w:/.])/(?:tmp|root|work|home)/[^\s\"'<>\\]*")
_KINDS = ("type", "role", "effort", "format")
"""Keys whose texts belong to the shape."""


def trimmed(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body as it is kept. Its model is `tiny`."""
    kept: dict[str, Any] = _short(body, "", {})
    kept["model"] = "tiny"
    if tools := kept.get("tools"):
        kept["tools"] = _telling(tools, _called(kept))
    return kept


def shape(value: Any, key: str = "") -> Any:
    """Return what two bodies share that differ in texts, numbers and repetitions only. It can be
    hashed.
    """
    if isinstance(value, dict):
        return tuple(sorted((name, shape(item, name)) for name, item in value.items()))
    if isinstance(value, list):
        return ("list", *sorted({repr(shape(item, key)) for item in value}))
    if key in _KINDS or value is None or isinstance(value, bool):
        return repr(value)
    return type(value).__name__


def _short(value: Any, key: str, ids: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _short(item, name, ids) for name, item in value.items()}
    if isinstance(value, list):
        return [_short(item, key, ids) for item in value]
    return _text(value, key, ids) if isinstance(value, str) else value


def _text(text: str, key: str, ids: dict[str, str]) -> str:
    if text.startswith("data:") or key == "data":
        return text
    if len(text) > LONGEST and text[:1] == "{":  # JSON in JSON stays that
        try:
            return json.dumps({"text": f"JSON of {len(json.dumps(json.loads(text)))} characters."})
        except ValueError:
            pass
    if key in ("description", "title") and len(text) > _DESCRIPTION:
        return "A description."
    if len(text) > LONGEST:
        length = 10 ** (len(str(len(text))) - 1)
        return f"A text of more than {length} characters. {_FILLER}"
    for pattern in _IDS:
        text = pattern.sub(lambda found: ids.setdefault(found[0], _id(len(ids), found[0])), text)
    return _PATH.sub("/folder", _DAY.sub("2026-01-01", text))


def _id(number: int, text: str) -> str:
    """The id of this number, as long as `text`."""
    fixed = f"{number + 1:0{len(text.replace('-', ''))}x}"
    parts, at = [], 0
    for part in text.split("-"):
        parts.append(fixed[at : at + len(part)])
        at += len(part)
    return "-".join(parts)


def _called(body: dict[str, Any]) -> set[str]:
    """The names of all tools that the conversation has called."""
    found = re.findall(r'"name": "([^"]+)"', json.dumps(body.get("messages", body.get("input"))))
    return set(found)


def _telling(tools: list[dict[str, Any]], called: set[str]) -> list[dict[str, Any]]:
    """Return the tools that were called, and those with keys or a type that none before had. What
    is in the schemas of their arguments tells nothing.
    """
    kept, seen = [], set[object]()
    for tool in tools:
        inner = tool.get("function") or tool
        words = {tool.get("type"), *tool, *inner}
        if isinstance(listed := tool.get("tools"), list):
            tool = tool | {"tools": listed[:1]}
        if inner.get("name") in called or not words <= seen or len(tools) < 3:
            kept.append(tool)
            seen |= words
    return kept
