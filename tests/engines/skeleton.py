"""The structure of an answer: everything that must be equal if two models generate different text.

Statuses, content types, keys in their order, types, nulls, error bodies to the byte; for a stream
the kinds of its events in the order of their first appearance. Masked: texts, ids, times, numbers,
and whether an answer ended by length or by a stop, which is random.
"""

import json
import re
from typing import Any

from .client import Answer

_NUMBER = re.compile(r"\d+(\.\d+)?")
_HEX = re.compile(r"\b[0-9a-f]{12,}\b")
_FREE = {"top_logprobs"}  # of completions: its keys are texts


def view(answer: Answer) -> dict[str, Any]:
    """Return the structure of an answer, without texts and numbers."""
    seen: dict[str, Any] = {"status": answer.status, "broken": bool(answer.broken)}
    kind = answer.headers.get("Content-Type", "")
    seen["type"] = kind
    if answer.streamed:
        seen["events"] = _distinct([_event(event) for event in answer.events if not _silent(event)])
        seen["ends"] = answer.events[-1] == "[DONE]" if answer.events else None
    elif answer.body and "json" in kind:
        seen["body"] = _error(answer.json) if answer.status >= 400 else shape(answer.json)
    return seen


def shape(value: Any, key: str = "") -> Any:
    """Return a value as its types; maps keep their keys in order, lists become the distinct shapes
    of their items.
    """
    if isinstance(value, dict):
        if key in _FREE or (value and all(name.isdigit() for name in value)):
            return ["map of", shape(next(iter(value.values()), None))]
        found = {name: shape(item, name) for name, item in value.items()}
        if value.get("finish_reason") and "delta" in found:
            found["delta"] = "delta"  # text, a call, or nothing: the last token is random
        return found
    if key == "bytes":
        return "bytes"
    if isinstance(value, list):
        kinds = _distinct([shape(item, key) for item in value if item is not None])
        return ["list of", *kinds]
    if key in ("finish_reason", "role", "object", "type") and value is not None:
        return "ended" if value in ("stop", "length") else value
    if key == "stop_reason":
        return "any"
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return "number"
    return None if value is None else "text"


def _silent(event: str) -> bool:
    """Return whether a chat's event has ids or probabilities but no text: half a character, which
    is random.
    """
    return '"delta":{},' in event and '"finish_reason":null' in event


def _event(event: str) -> Any:
    if event == "[DONE]":
        return event
    try:
        found = json.loads(event)
    except ValueError:
        return {"no JSON": True}
    return {"error": _error(found)} if "error" in found else shape(found)


def _error(body: Any) -> Any:
    """Return an error body with the ids in its text masked."""
    return json.loads(_HEX.sub("*", json.dumps(body)))


def _distinct(items: list[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def structure_difference(simulated: Any, real: Any, place: str = "$") -> str:
    """Return the first place where two views differ, keys and their order included; empty if there
    is none.
    """
    if isinstance(simulated, dict) and isinstance(real, dict):
        if list(simulated) != list(real):
            return f"{place}: keys {list(simulated)}, real ones have {list(real)}"
        pairs = [(simulated[key], real[key], f"{place}.{key}") for key in real]
    elif isinstance(simulated, list) and isinstance(real, list) and len(simulated) == len(real):
        pairs = [
            (one, two, f"{place}[{at}]")
            for at, (one, two) in enumerate(zip(simulated, real, strict=True))
        ]
    else:
        if isinstance(simulated, list) and isinstance(real, list):
            less, more = (
                [one for one in real if one not in simulated],
                [one for one in simulated if one not in real],
            )
            return f"{place}: lacks {less}, has {more} beyond the real ones'"
        return "" if simulated == real else f"{place}: {simulated!r}, real: {real!r}"
    return next(
        (why for one, two, where in pairs if (why := structure_difference(one, two, where))), ""
    )
