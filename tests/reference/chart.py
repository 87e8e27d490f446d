"""What the chart has of pdproxy: the schema of its values (`values.schema.json`), and the seconds
by which it judges how long a proxy that stops may take (`files/seconds.json`).

The types of the chart's own values are those of their defaults in `values.yaml`. What defaults do
not say stands here.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import yaml

from pdproxy.app.drain import MARGIN
from pdproxy.settings.json_schema import DRAFT, json_schema
from pdproxy.settings.schema import Settings
from tests.reference.markdown import ROOT

CHART = ROOT / "configs" / "chart"
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
_NAME = {
    "type": "string",
    "pattern": "^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$",
    "not": {"enum": ["pdproxy", "proxy", "test"]},  # the chart's own
}
_OBJECTS = frozenset(
    (
        *("affinity", "annotations", "labels", "livenessProbe", "nodeSelector", "podAnnotations"),
        *("podLabels", "podSecurityContext", "resources", "securityContext"),
        "kvTransferConfig",
    )
)
"""Values that Kubernetes or vLLM know, by their names: their keys are not checked here."""
_TEXTS = frozenset(["args", "argsWithoutKv", "hostnames"])
_BUDGET = ("maxUnavailable", "minAvailable")
_SPECIAL: dict[str, dict[str, Any]] = {
    "connector": {"enum": ["nixl", "nixl-push", "mooncake", "shared"]},
    "dataParallelSize": {"type": "integer", "minimum": 1},
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "drainSeconds": {"type": ["integer", "null"], "minimum": 1},
    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    "node": {"type": "object"},
    "podDisruptionBudget": {
        "type": ["object", "null"],
        "properties": {name: {"type": ["integer", "string"]} for name in _BUDGET},
        "additionalProperties": False,
    },
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "sideChannelPort": {"type": "integer", "minimum": 1024, "maximum": 65535},
    "targetCPUUtilization": {"type": "integer", "minimum": 1, "maximum": 100},
    "tensorParallelSize": {"type": "integer", "minimum": 1},
    "terminationGracePeriodSeconds": {"type": ["integer", "null"], "minimum": 1},
    "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
}


def schema() -> str:
    """Return the schema of the chart's values. `config` is that of pdproxy's settings."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    settings = json_schema(Settings)
    definitions = settings.pop("$defs") | {"Settings": settings}
    settings.pop("$schema")
    made = _mapping(values)
    own = made["properties"]
    engine = own["engineDefaults"]["properties"]
    engine["replicas"] = {"type": ["integer", "null"], "minimum": 0}
    roles = {"enum": ["prefill", "decode", "aggregated", "any"]}
    own["engines"] = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": _NAME, "role": roles, **engine},
            "required": ["name", "role"],
            "additionalProperties": False,
        },
    }
    own["config"] = {"$ref": "#/$defs/Settings"}
    own["global"] = {"type": "object"}  # Helm adds it where the chart is a part of another one
    return _written({"$schema": DRAFT, **made, "$defs": definitions})


def seconds() -> str:
    """Return pdproxy's own values of the waits that a proxy which stops, or an engine, may take."""
    deadlines = msgspec.to_builtins(Settings().deadlines)
    listen = {"linger": Settings().listen.linger}
    return _written({"deadlines": deadlines, "listen": listen, "margin": MARGIN})


def _mapping(values: dict[str, Any]) -> dict[str, Any]:
    properties = {name: _value(name, value) for name, value in values.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(name: str, value: object) -> dict[str, Any]:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name in _OBJECTS:
        return {"type": "object"}
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return _NUMBER
        case str():
            return _TEXT
        case dict():
            return _mapping(value)
        case list():
            return {"type": "array", "items": _TEXT if name in _TEXTS else {"type": "object"}}
    raise TypeError(f"{name} has no type: {value!r}")


def _written(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2) + "\n"
