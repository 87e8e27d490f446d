"""The settings as a JSON Schema, for editors and for Kubernetes' Helm: made of the types of the
fields, as the checks of `conform` are.

The schema says what one field may hold. What fields must have together, `crosscheck` says alone.
"""

from __future__ import annotations

import re
import types
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from pdproxy.settings.conform import choices, expectation
from pdproxy.settings.section import NAMES, Section, fields_of, is_section

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(kind: type[Section]) -> dict[str, Any]:
    """Return the JSON Schema of a section, with all below it."""
    sections: dict[str, Any] = {}
    _section(kind, sections)
    own = sections.pop(kind.__name__)
    return {"$schema": DRAFT, "type": "object", **own, "$defs": dict(sorted(sections.items()))}


def _section(kind: Any, sections: dict[str, Any]) -> None:
    if kind.__name__ in sections:
        return
    sections[kind.__name__] = {}  # a section may be below itself
    fields = fields_of(kind)
    made: dict[str, Any] = {
        "properties": {field.name: _field(field.type, sections) for field in fields},
        "additionalProperties": False,
    }
    if required := [field.name for field in fields if field.required]:
        made["required"] = required
    sections[kind.__name__] = made


def _field(kind: Any, sections: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field. A section whose keys are all commented out is null in YAML."""
    made = _of(kind, sections)
    return made | {"type": [made["type"], "null"]} if "$ref" in made else made


def _of(kind: Any, sections: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type."""
    if is_section(kind):
        _section(kind, sections)
        made = {"type": "object", "$ref": f"#/$defs/{kind.__name__}"}
        texts = choices(kind)
        return {"anyOf": [made, {"type": "null"}, {"enum": [*texts]}]} if texts else made
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return {"type": "array", "items": _of(inner[0], sections)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(inner[1], sections)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(one, sections) for one in inner]}
    if origin is Literal:
        # YAML reads `off` as false.
        return {"enum": [*inner, *([False] if "off" in inner else [])]}
    if any(NAMES in (getattr(mark, "extra", None) or {}) for mark in inner[1:]):
        return {"enum": [*choices(kind)]}
    made = msgspec.json.schema(kind)
    if "pattern" in made:
        made["pattern"] = _portable(made["pattern"])
        made.setdefault("description", expectation(kind))
    return made


def _portable(pattern: str) -> str:
    """Return a pattern with the anchors that all languages know."""
    return re.sub(r"\\Z$", "$", re.sub(r"^\\A", "^", pattern))
