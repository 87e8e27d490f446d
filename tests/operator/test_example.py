"""The example of the guide is what the definitions take, and makes a pool of four engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec

from pdproxy_operator.pools import pools_of
from pdproxy_operator.resources import Proxy, Runtime
from tests.kubernetes.operated import example_objects
from tests.operator.filled import filled, schema_of

PLURALS = {"PDRuntime": "pdruntimes", "PDProxy": "pdproxies"}


def strict(one: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that takes no field that it does not know, as an API server warns of them."""
    made = {
        name: strict(value) if isinstance(value, dict) else value for name, value in one.items()
    }
    if "properties" in one and "x-kubernetes-preserve-unknown-fields" not in one:
        made["additionalProperties"] = False
    return made


def mistakes(one: dict[str, Any]) -> Iterator[str]:
    known = strict(schema_of(PLURALS[one["kind"]]))
    known["properties"]["metadata"] = {}
    for error in jsonschema.Draft202012Validator(known).iter_errors(one):
        yield f"{one['metadata']['name']}: {error.message}"


def test_the_example_makes_a_2p2d() -> None:
    objects = example_objects()
    assert [wrong for one in objects for wrong in mistakes(one)] == []
    full = [filled(one, schema_of(PLURALS[one["kind"]])) for one in objects]
    runtimes = [msgspec.convert(one, Runtime) for one in full if one["kind"] == "PDRuntime"]
    proxies = [msgspec.convert(one, Proxy) for one in full if one["kind"] == "PDProxy"]
    ((_, pool),) = pools_of(proxies, runtimes)
    engines = {one.spec.role: one.spec.replicas for one in pool.runtimes}
    assert engines == {"prefill": 2, "decode": 2}
