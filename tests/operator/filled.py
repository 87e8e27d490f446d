"""What an API server fills in: the defaults of the definitions."""

from __future__ import annotations

from functools import cache
from typing import Any

import yaml

from pdproxy_operator import definitions

Schema = dict[str, Any]


@cache
def schema_of(name: str) -> Schema:
    """The schema of a resource of `definitions.NAMES`."""
    (version,) = yaml.safe_load(definitions.text_of(name))["spec"]["versions"]
    found: Schema = version["schema"]["openAPIV3Schema"]
    return found


def filled(thing: Any, one: Schema) -> Any:
    """A value with the defaults of its schema."""
    if not isinstance(thing, dict):
        return thing
    fields = one.get("properties", {})
    given = {name: field["default"] for name, field in fields.items() if "default" in field}
    return {name: filled(value, fields.get(name, {})) for name, value in {**given, **thing}.items()}
