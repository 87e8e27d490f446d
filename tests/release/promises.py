"""What a version may not do to what an older one of the same major version has: a sentence for each
promise that is broken. What is added breaks none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator

from tests.release.version import major

Item = Mapping[str, Any]
_LOWER = ("minimum", "exclusiveMinimum", "minLength")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength")
_NUMBERS = {"integer": ("integer", "number")}
"""Types that take all values of a type."""


def broken(old: Item, new: Item) -> list[str]:
    """Return a sentence for each promise of an old description that a new one breaks. Another major
    version may break all.
    """
    if major(new["version"]) > major(old["version"]):
        return []
    found = []
    for area, (word, changes) in _AREAS.items():
        for name, before in old[area].items():
            called = f"{word} {name}".rstrip()
            if (after := new[area].get(name)) is None:
                found.append(f"{called} is gone: keep it, and a new name beside it")
            else:
                found += [f"{called} {change}" for change in changes(before, after)]
    return found


def _setting(before: Item, after: Item) -> Iterator[str]:
    if why := refused(before["accepts"], after["accepts"]):
        yield f"does not accept all values that it accepted: {why}"
    if "default" in before and "default" not in after:
        yield "is required now, and was not"
    elif before.get("default") != after.get("default"):
        values = _json(after.get("default")), _json(before.get("default"))
        yield "has another default: {} in place of {}".format(*values)


def _metric(before: Item, after: Item) -> Iterator[str]:
    for what in ("type", "unit"):
        if before[what] != after[what]:
            yield f"has another {what}: {after[what]} in place of {before[what]}"
    if before["labels"].keys() != after["labels"].keys():
        names = (", ".join(one["labels"]) or "none" for one in (after, before))
        yield "has other labels: {} in place of {}".format(*names)
    for label, values in before["labels"].items():
        known = after["labels"].get(label, ())
        if known and (gone := [value for value in values if value not in known]):
            yield f"has no value {', '.join(gone)} of the label {label} any more"


def _line(before: Item, after: Item) -> Iterator[str]:
    for field, kind in before.items():
        if field not in after:
            yield f"has no field {field} any more"
        elif after[field] != kind:
            yield f"has the field {field} as a {after[field]} in place of a {kind}"


def _operation(before: Item, after: Item) -> Iterator[str]:
    for field, one in before["takes"].items():
        if (now := after["takes"].get(field)) is None:
            yield f"does not take the {field} any more"
        elif why := refused(one["accepts"], now["accepts"]):
            yield f"does not accept all values of the {field} that it accepted: {why}"
    for field, now in after["takes"].items():
        if now["required"] and not before["takes"].get(field, {}).get("required"):
            yield f"requires the {field} now, and did not"
    yield from _gives(before, after)


def _gives(before: Item, after: Item) -> Iterator[str]:
    for field, one in before["gives"].items():
        if (now := after["gives"].get(field)) is None:
            yield f"does not return the {field} any more"
        elif one:
            if one["required"] and not now["required"]:
                yield f"does not always return the {field} any more"
            if (types := _types(now["is"])) - _types(one["is"]):
                was = ", ".join(sorted(_types(one["is"])))
                yield f"returns the {field} as {', '.join(sorted(types))} in place of {was}"


def _command(before: Item, after: Item) -> Iterator[str]:
    for code in before["exit_codes"]:
        if code not in after["exit_codes"]:
            yield f"has no exit code {code} any more"
    for name, one in before["options"].items():
        if (now := after["options"].get(name)) is None:
            yield f"has no {name} any more"
            continue
        if one["values"] != now["values"]:
            yield f"takes another number of values behind {name}"
        if "choices" in now:
            gone = [
                value for value in one.get("choices", ["others"]) if value not in now["choices"]
            ]
            if gone:
                yield f"does not take {', '.join(gone)} behind {name} any more"
        if one.get("default") != now.get("default"):
            values = _json(now.get("default")), _json(one.get("default"))
            yield "has another default of {}: {} in place of {}".format(name, *values)
    for name, now in after["options"].items():
        if now.get("required") and not before["options"].get(name, {}).get("required"):
            yield f"requires {name} now, and did not"


def _route(before: Item, after: Item) -> Iterator[str]:
    if before["audience"] != after["audience"]:
        yield f"is for {after['audience']}, and was for {before['audience']}"
    yield from _gives(before, after)


_AREAS: dict[str, tuple[str, Callable[[Item, Item], Iterator[str]]]] = {
    "settings": ("the setting", _setting),
    "metrics": ("the metric", _metric),
    "log_fields": ("the log line", _line),
    "admin_api": ("the admin API's", _operation),
    "command_line": ("the command", _command),
    "routes": ("the route", _route),
}


def refused(old: Item, new: Item) -> str:
    """Return what of an old schema's values a new one refuses, in a few words; nothing if it takes
    all.
    """
    for one in _parts(old):
        if "enum" in one:
            gone = [v for v in one["enum"] if not Draft202012Validator(dict(new)).is_valid(v)]
            if gone:
                return ", ".join(map(_json, gone))
        elif not any(_takes(one, other) for other in _parts(new)):
            return f"{_json(one)}, now {_json(new)}"
    return ""


def _parts(schema: Item) -> list[Item]:
    """Return the alternatives of a schema."""
    if "anyOf" in schema:
        return [part for one in schema["anyOf"] for part in _parts(one)]
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": one} for one in schema["type"]]
    return [schema]


def _takes(old: Item, new: Item) -> bool:
    """Return whether an alternative takes all values of another one."""
    if not new:
        return True
    if "enum" in new or new.get("type") not in _NUMBERS.get(
        old.get("type", ""), (old.get("type"),)
    ):
        return False
    if new.get("pattern") not in (None, old.get("pattern")):
        return False
    for keys, inside in ((_LOWER, float.__ge__), (_UPPER, float.__le__)):
        for key in keys:
            if key in new and not (key in old and inside(float(old[key]), float(new[key]))):
                return False
    return all(
        not isinstance(new.get(key), dict) or not refused(old.get(key, {}), new[key])
        for key in ("items", "additionalProperties")
    )


def _types(schema: Item) -> set[str]:
    """Return the types of a schema's values. Those of a list have paths of their own."""
    return {
        _type_of(value) if "enum" in one else str(one.get("type", "any"))
        for one in _parts(schema)
        for value in one.get("enum", (None,))
    }


def _type_of(value: object) -> str:
    return {str: "string", bool: "boolean", int: "integer", type(None): "null"}[type(value)]


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True)
