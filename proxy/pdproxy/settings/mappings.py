"""Objects that describe KV transfer, as plain mappings: values from YAML or JSON, dataclasses, structs, pydantic models.

Owns the rule for them: None stays None, and what can't be read is an error that names its type. An empty mapping in its place
would mean that nothing was configured, and the engines would silently recompute every prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

import msgspec


class NotAMappingError(TypeError):
    """An object can't be read as names with values. The error's text is the object's type."""


def as_mapping(value: object) -> dict[str, Any] | None:
    """Return a mapping of names to values (a dict is returned itself), None for None.

    Accepted: dicts and other mappings, instances of dataclasses, msgspec structs, pydantic models old and new, sequences of
    pairs, and plain objects with attributes.

    Raises:
        NotAMappingError: it is none of these, or can't be read as one; or a name in it is no text.
    """
    if value is None or (isinstance(value, dict) and all(isinstance(name, str) for name in value)):
        return value
    try:
        plain = _read(value)
    except (TypeError, ValueError, AttributeError):
        plain = None
    if plain is None:
        raise NotAMappingError(type(value).__name__)
    if not all(isinstance(name, str) for name in plain):
        raise NotAMappingError(f"{type(value).__name__} with names that are no text")
    return plain


def _read(value: object) -> dict[Any, Any] | None:
    if isinstance(value, type | str | bytes | bytearray | int | float):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields_of(value)}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    for name in ("model_dump", "dict"):  # pydantic 2 and 1
        if callable(dump := getattr(value, name, None)):
            dumped = dump()
            return dict(dumped) if isinstance(dumped, Mapping) else None
    if callable(getattr(value, "items", None)) and isinstance(value, Iterable):
        return dict(value)  # not registered as a Mapping, such as OmegaConf's
    if isinstance(value, Iterable):
        pairs = list(value)
        return dict(pairs) if all(isinstance(pair, tuple) for pair in pairs) and pairs else None
    return dict(vars(value))
