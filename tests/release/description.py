"""What versions promise, as data that is made from the code: settings, metrics, log fields, the
admin API, the command line, and clients' routes. `python -m tests.release.description` writes it as
`released.json`, which a release does. `promises` judges the changes since then.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pdproxy.observe import events
from pdproxy.observe.formats import JsonFormatter
from pdproxy.observe.logs import ACCESS_FIELDS, TRACE_FIELDS, LogObserver
from pdproxy.serving.access.routes import TABLE, RouteKind
from pdproxy.settings.conform import choices
from pdproxy.settings.json_schema import json_schema
from pdproxy.settings.schema import Settings
from pdproxy.settings.section import fields_of, is_section
from pdproxy.web import openapi
from tests.reference import admin, command_line
from tests.reference.markdown import ROOT
from tests.reference.metrics import METRICS
from tests.reference.texts import item_of
from tests.release import version

FILE = ROOT / "tests" / "release" / "released.json"
Described = dict[str, Any]
_SCHEMAS = "#/components/schemas/"
_TEXTS = {"description", "title", "$schema", "default"}
"""Keys of a schema that restrict nothing."""
_CODE = re.compile(r"\b(?:0|1|2|3|130)\b")


def described() -> Described:
    """Return the description of this version. Names are sorted."""
    made = {
        "settings": settings(),
        "metrics": metrics(),
        "log_fields": log_fields(),
        "admin_api": admin_api(json.loads(admin.page())),
        "command_line": commands(command_line.ends(command_line.parser())),
        "routes": routes(),
    }
    found: Described = json.loads(_line({"version": version.current(), **made}))  # no tuples
    return found


def released() -> Described:
    """Return the description of the last release."""
    found: Described = json.loads(FILE.read_text())
    return found


def written(of: Described) -> str:
    """Return a description as the file has it: a line for each setting, metric and so on."""
    parts = [f'"version": {json.dumps(of["version"])}']
    for area, items in sorted(of.items()):
        if area != "version":
            lines = (f"{json.dumps(name)}: {_line(one)}" for name, one in sorted(items.items()))
            parts.append(f"{json.dumps(area)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _line(of: Any) -> str:
    return json.dumps(of, sort_keys=True, ensure_ascii=False)


def settings() -> Described:
    """Return by each setting's path what it accepts, as a JSON Schema, and its default."""
    return dict(_settings(Settings, "", json_schema(Settings)))


def _settings(
    kind: Any, path: str, schema: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    own = schema if kind is Settings else schema["$defs"][kind.__name__]
    own = {**own, "$defs": schema["$defs"]}
    for field in fields_of(kind):
        here, (item, suffix) = f"{path}{field.name}", item_of(field)
        if is_section(item):
            if texts := choices(item):
                yield here, {"accepts": {"enum": [*texts]}}
            yield from _settings(item, f"{here}{suffix}.", own)
            continue
        found: dict[str, Any] = {"accepts": _bare(own["properties"][field.name])}
        if not field.required:
            found["default"] = msgspec.to_builtins(field.default)
        yield here, found


def _bare(schema: Any) -> Any:
    """Return a schema without what restricts nothing."""
    if isinstance(schema, dict):
        return {key: _bare(value) for key, value in schema.items() if key not in _TEXTS}
    return [_bare(one) for one in schema] if isinstance(schema, list) else schema


def metrics() -> Described:
    """Return by each metric's name its type, unit and labels. A label whose values are known in
    advance has these.
    """
    return {
        one.name: {
            "type": one.kind.value,
            "unit": one.unit,
            "labels": {label.name: sorted(label.known) for label in one.labels},
        }
        for one in METRICS
    }


def log_fields() -> Described:
    """Return by each message of level INFO or more the fields of its lines with their types, and
    those of all lines. `request` is the access line.
    """
    found: dict[str, dict[str, str]] = {
        "": _types(json.loads(JsonFormatter().line(0, "", "", "", {})))
    }
    logger, kept = logging.getLogger("pdproxy"), _Kept()
    before = logger.level, logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [kept], False
    logger.setLevel(logging.INFO)
    try:
        for kind in get_args(events.Event):
            for event in _samples(kind):
                LogObserver().notify(event)
    finally:
        logger.level, logger.handlers, logger.propagate = before
        logger.setLevel(before[0])
    for message, fields in kept.lines:
        found[message] = found.get(message, {}) | _types(fields)
    assert {*found["request"]} == {*ACCESS_FIELDS}
    found["request"] |= dict.fromkeys(TRACE_FIELDS, "string")
    return found


class _Kept(logging.Handler):
    """Keeps messages and their fields."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, Mapping[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), getattr(record, "fields", {})))


def _types(fields: Mapping[str, Any]) -> dict[str, str]:
    names = {bool: "boolean", int: "number", float: "number"}
    return {
        name: names.get(type(value), "string")
        for name, value in fields.items()
        if value is not None
    }


def _sample(kind: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _sample(next(one for one in inner if one is not type(None)))
    if origin is Literal:
        return inner[0]
    if origin is tuple:
        return tuple(_sample(one) for one in inner if one is not Ellipsis)
    if origin in (Sequence, list):
        return [_sample(inner[0])]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return kind(**{name: _sample(hints[name]) for name in kind.__struct_fields__})
    return {str: "x", int: 2, float: 2.0, bool: True}[kind]


def _samples(kind: Any) -> Iterator[Any]:
    """Yield events of a kind with a value in each field, and one for each choice of those that
    decide which line is written.
    """
    hints = get_type_hints(kind)
    names = kind.__struct_fields__
    values = [
        _DECIDING.get(name, _CHOICES.get(hints[name], (_sample(hints[name]),))) for name in names
    ]
    for chosen in product(*values):
        yield kind(*chosen)


_CHOICES: dict[Any, tuple[Any, ...]] = {
    bool: (True, False),
    bool | None: (True, False, None),
    Sequence[events.LegTimes]: (
        [events.LegTimes(decode="x", whole_s=1.0)],
        [_sample(events.LegTimes)],
    ),
}
"""Values that decide which line is written, or which fields it has, by their type."""
_DECIDING = {"state": ("down", "excluded", "stalled", "asleep"), "result": ("timeout",)}
"""The same by the field's name."""


def admin_api(document: Mapping[str, Any]) -> Described:
    """Return by each operation of an OpenAPI document the fields that it takes and those that it
    returns, by their paths: `body labels`, `query pool`, `200 engines[].name`.
    """
    schemas = document["components"]["schemas"]
    found: Described = {}
    for path, operations in document["paths"].items():
        for method, one in operations.items():
            takes: Described = {}
            gives: Described = {}
            for parameter in one.get("parameters", ()):
                name = f"{parameter['in']} {parameter['name']}"
                required = parameter.get("required", False)
                takes[name] = {"accepts": _bare(parameter["schema"]), "required": required}
            if body := one.get("requestBody"):
                takes |= _fields("body", _schema(body), schemas, "accepts", ())
            for status, answer in one["responses"].items():
                gives[status] = {}
                if "application/json" in answer.get("content", {}):
                    gives |= _fields(status, _schema(answer), schemas, "is", ())
            found[f"{method.upper()} {path}"] = {"takes": takes, "gives": gives}
    return found


def _schema(content: Mapping[str, Any]) -> Any:
    return content["content"]["application/json"]["schema"]


def _fields(
    path: str, schema: Any, schemas: Mapping[str, Any], word: str, above: tuple[str, ...]
) -> Described:
    """Return the fields below a schema by their paths. A schema that is below itself ends there."""
    if name := schema.get("$ref", "").removeprefix(_SCHEMAS):
        if name in above:
            return {}
        return _fields(path, schemas[name], schemas, word, (*above, name))
    parts = [schema, *schema.get("anyOf", ())]
    found: Described = {}
    for part in parts:
        if "$ref" in part and part is not schema:
            found |= _fields(path, part, schemas, word, above)
        if "items" in part:
            found |= _fields(f"{path}[]", part["items"], schemas, word, above)
        for name, inner in part.get("properties", {}).items():
            here = f"{path}{'.' if ' ' in path else ' '}{name}"
            found[here] = {
                word: _plain(inner, schemas),
                "required": name in part.get("required", ()),
            }
            found |= _fields(here, inner, schemas, word, above)
    return found


def _plain(schema: Any, schemas: Mapping[str, Any]) -> Any:
    """Return a field's own schema: what is below it has paths of its own."""
    if "$ref" in schema:
        return {"type": schemas[schema["$ref"].removeprefix(_SCHEMAS)].get("type", "object")}
    made = _bare(schema)
    if "anyOf" in made:
        made["anyOf"] = [_plain(one, schemas) for one in made["anyOf"]]
    if "items" in made:
        made["items"] = _plain(made["items"], schemas)
    if isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = _plain(made["additionalProperties"], schemas)
    return {key: value for key, value in made.items() if key not in ("properties", "required")}


def commands(parsers: Sequence[argparse.ArgumentParser]) -> Described:
    """Return by each command its exit codes, and its options: how many values they take, which, and
    the default. An argument without a name has its place.
    """
    found: Described = {}
    for of in parsers:
        actions = [one for group in of._action_groups for one in command_line.shown(group)]
        options: Described = {}
        for place, action in enumerate(one for one in actions if not one.option_strings):
            options[f"argument {place + 1}"] = _option(action)
        for action in (one for one in actions if one.option_strings):
            options |= {name: _option(action) for name in action.option_strings}
        words = re.split(r"(?<=\.)\s", " ".join((of.description or "").split()))
        codes = {
            "0",
            "2",
            *(code for one in words if "exit code" in one for code in _CODE.findall(one)),
        }
        found[of.prog] = {"exit_codes": sorted(map(int, codes)), "options": options}
    return found


def _option(action: argparse.Action) -> dict[str, Any]:
    made: dict[str, Any] = {"values": "one" if action.nargs is None else str(action.nargs)}
    if action.choices is not None:
        made["choices"] = sorted(map(str, action.choices))
    if action.required:
        made["required"] = True
    elif action.default not in (None, argparse.SUPPRESS):
        made["default"] = msgspec.to_builtins(action.default, enc_hook=str)
    return made


def routes() -> Described:
    """Return whom each route at the clients' port is for. Those that tell of the proxy's own state
    have the fields that they return.
    """
    own = {
        "/ready": openapi.READY,
        "/ready/proxy": openapi.READY_PROXY,
        "/drained": openapi.DRAINED,
        "/healthcheck": openapi.HEALTHCHECK,
    }
    found: Described = {}
    for one in TABLE:
        if one.kind is not RouteKind.REFUSED:
            gives = _fields("200", own.get(one.path, {}), {}, "is", ())
            for method in one.methods:
                found[f"{method} {one.path}"] = {"audience": one.audience.value, "gives": gives}
    return found


if __name__ == "__main__":
    FILE.write_text(written(described()))
    print(f"wrote {FILE.relative_to(ROOT)}")
