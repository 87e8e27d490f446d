"""Which tools the scripted server calls, with which arguments; the smallest value of a schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

SHELLS = (
    "Bash",
    "bash",
    "shell",
    "shell_command",
    "exec_command",
    "run_shell_command",
    "local_shell",
)
"""How agents name the tool that runs a command."""
_TEXTS = {"command": "echo tide", "cmd": "echo tide", "city": "Oslo"}


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: Any
    kind: str

    @property
    def json(self) -> str:
        return json.dumps(self.arguments)


def calls_for(
    tools: list[tuple[str, dict[str, Any], str]], results: int, choice: Any, number: int
) -> list[Call]:
    """Return what to call: one tool, then two at once, then none. A tool that runs commands is
    preferred.
    """
    if isinstance(choice, dict):  # of this name, or of any
        name = choice.get("name") or (choice.get("function") or {}).get("name")
        tools = [one for one in tools if name in (None, one[0])]
        forced = choice.get("type") in ("function", "tool", "any", "custom")
    else:
        forced = choice == "required"
    if not tools or choice == "none" or (results and forced) or results > 1:
        return []
    shells = [one for one in tools if one[0] in SHELLS]
    name, schema, kind = (shells or tools)[0]
    arguments = example(schema)
    return [Call(f"call_{number}_{at}", name, arguments, kind) for at in range(1 + results)]


def example(schema: dict[str, Any], name: str = "", root: dict[str, Any] | None = None) -> Any:
    """Return a value that a JSON schema allows, with nothing in it that need not be."""
    root = schema if root is None else root
    if reference := schema.get("$ref"):
        found: Any = root
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        return example(found, name, root)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example(schema[key][0], name, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        known = schema.get("properties") or {}
        return {one: example(known.get(one, {}), one, root) for one in schema.get("required", ())}
    if kind == "array":
        if name in _TEXTS:
            return _TEXTS[name].split()
        return [example(schema.get("items", {}), "", root)] * max(1, schema.get("minItems", 1))
    return {
        "integer": max(1, schema.get("minimum", 1)),
        "number": 1.0,
        "boolean": False,
        "null": None,
    }.get(kind, _TEXTS.get(name, "tide"))
