"""The definitions of the operator's resources: what the operator reads is what an API server takes,
and fills in; and the form that Kubernetes demands of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import msgspec
import pytest
import yaml
from msgspec import inspect

from pdproxy_operator import definitions
from pdproxy_operator.resources import GROUP, VERSION, Proxy, Runtime
from tests.chart.render import CHART, VERSIONS, mistakes
from tests.operator.filled import Schema, filled, schema_of

KINDS = {"pdruntimes": Runtime, "pdproxies": Proxy}
SIMPLE = {
    inspect.StrType: "string",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "boolean",
}
UNKNOWN = "x-kubernetes-preserve-unknown-fields"


def nodes(one: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Each schema within a schema, with its path."""
    yield path, one
    for name, field in one.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    for key, sign in (("items", "[]"), ("additionalProperties", "{}")):
        if key in one:
            yield from nodes(one[key], path + sign)


def differences(of: inspect.Type, one: Schema, path: str) -> Iterator[str]:
    """What the operator reads in another form than the definition has it."""
    if isinstance(of, inspect.UnionType):  # or None
        (of,) = (member for member in of.types if not isinstance(member, inspect.NoneType))
    if isinstance(of, inspect.LiteralType):
        if {*of.values} != {*one.get("enum", ())}:
            yield f"{path}: {of.values}"
    elif isinstance(of, inspect.StructType):
        yield from _differences_of_fields(of, one, path)
    elif isinstance(of, inspect.ListType):
        if one["type"] != "array":
            yield f"{path}: {one['type']}"
        yield from differences(of.item_type, one["items"], f"{path}[]")
    elif isinstance(of, inspect.DictType):
        if one["type"] != "object":
            yield f"{path}: {one['type']}"
        if not isinstance(of.value_type, inspect.AnyType):
            yield from differences(of.value_type, one["additionalProperties"], f"{path}{{}}")
        elif UNKNOWN not in one and "properties" not in one:
            yield f"{path}: nothing may be in it"
    elif one["type"] != SIMPLE[type(of)]:
        yield f"{path}: {one['type']}"


def _differences_of_fields(of: inspect.StructType, one: Schema, path: str) -> Iterator[str]:
    fields = {field.encode_name: field for field in of.fields}
    properties = one["properties"]
    yield from (f"{path}.{name}" for name in fields.keys() ^ properties.keys())
    for name, field in fields.items():
        there = name in one.get("required", ()) or "default" in properties.get(name, {})
        if field.required != there:
            yield f"{path}.{name}: {'missing' if field.required else 'there'} without a value"
        if name in properties:
            yield from differences(field.type, properties[name], f"{path}.{name}")


@pytest.mark.parametrize("name", definitions.NAMES)
def test_the_operator_reads_each_field_as_it_is_defined(name: str) -> None:
    of = inspect.type_info(KINDS[name])
    assert isinstance(of, inspect.StructType)
    whole = schema_of(name)["properties"]
    found = [
        one
        for field in of.fields
        if field.encode_name != "metadata"
        for one in differences(field.type, whole[field.encode_name], field.encode_name)
    ]
    assert found == []


@pytest.mark.parametrize("name", definitions.NAMES)
def test_each_field_is_explained(name: str) -> None:
    for path, one in nodes(schema_of(name)):
        if path.startswith(".metadata") or path.endswith(("[]", "{}")):
            continue
        said = one.get("description", "")
        assert said[:1].isupper() or said.startswith(GROUP), path
        assert said.endswith("."), path


@pytest.mark.parametrize("name", definitions.NAMES)
def test_what_kubernetes_demands_of_a_schema(name: str) -> None:
    for path, one in nodes(schema_of(name)):
        assert "type" in one, path
        assert not {"$ref", "definitions", "uniqueItems", "allOf", "oneOf"} & one.keys(), path
        assert not {"properties", "additionalProperties"} <= one.keys(), path
        if "default" in one:
            jsonschema.validate(one["default"], one)
        for key in one.get("x-kubernetes-list-map-keys", ()):
            assert key in one["items"]["required"], path
        for rule in one.get("x-kubernetes-validations", ()):
            assert rule["message"], path  # without one, the API server shows the rule
        if path.startswith(".spec"):  # what may be long makes the rules on it dear
            ruled = "x-kubernetes-validations" in one
            assert one["type"] != "array" or "maxItems" in one, path
            assert not ruled or one["type"] != "string" or {"maxLength", "enum"} & one.keys(), path


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_definitions(version: str) -> None:
    documents = list(yaml.safe_load_all(definitions.text()))
    assert [one["metadata"]["name"] for one in documents] == [f"{name}.{GROUP}" for name in KINDS]
    for one in documents:
        assert one["spec"]["versions"][0]["name"] == VERSION
        assert mistakes(one, version) == []


def test_a_default_is_what_the_operator_gets() -> None:
    """An object with nothing but what must be given, filled in as the API server does it."""
    spec = {"role": "prefill", "model": {"name": "m"}, "image": "i"}
    runtime = msgspec.convert(
        filled({"metadata": {}, "spec": spec}, schema_of("pdruntimes")), Runtime
    )
    assert runtime.spec.drain.seconds == 310
    assert runtime.spec.args_without_kv
    spec = {
        "runtimeSelector": {"matchLabels": {"a": "b"}},
        "image": "i",
        "clientKeys": {"name": "k"},
    }
    proxy = msgspec.convert(filled({"metadata": {}, "spec": spec}, schema_of("pdproxies")), Proxy)
    assert (proxy.spec.service.port, proxy.spec.rollout.order) == (80, "pairs")
    assert proxy.spec.client_keys is not None
    assert proxy.spec.client_keys.key == "keys"


def test_engines_and_proxies_are_as_the_charts() -> None:
    """Who goes from the chart to the operator, or back, needs to change no more than the form."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    theirs = values["engineDefaults"]
    ours = filled({"role": "any"}, schema_of("pdruntimes")["properties"]["spec"])
    assert len(theirs.keys() & ours.keys()) > 10
    for name in theirs.keys() & ours.keys() - {"model", "argsWithoutKv"}:
        assert ours[name] == theirs[name], name
    # the operator sets that flag alone
    assert {*ours["argsWithoutKv"], "--shutdown-timeout"} == {*theirs["argsWithoutKv"]}
    seconds = json.loads((CHART / "files" / "seconds.json").read_text())["deadlines"]
    assert ours["drain"]["seconds"] == seconds["engine_drain"] + 10
    assert ours["terminationGracePeriodSeconds"] == ours["drain"]["seconds"] + 60
    image = schema_of("pdruntimes")["properties"]["spec"]["properties"]["image"]["description"]
    assert f"{theirs['image']['repository']}:{theirs['image']['tag']}" in image

    proxies = filled({}, schema_of("pdproxies")["properties"]["spec"])
    for name in ("replicas", "resources", "config"):
        assert proxies[name] == values[name], name
    assert proxies["service"].items() <= values["service"].items()
