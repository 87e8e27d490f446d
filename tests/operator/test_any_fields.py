"""Fields whose form the API server does not check: with any other value at any place, there are
objects, or a sentence.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pdproxy_operator.engine_objects import engine_objects
from pdproxy_operator.errors import ConfigError
from pdproxy_operator.pools import pools_of, selected_pools
from pdproxy_operator.proxy_objects import proxy_objects
from tests.operator.resources import proxy, runtime

OTHERS: tuple[Any, ...] = (
    None,
    True,
    5,
    "",
    "pools[9]",
    [],
    [5],
    [[]],
    {},
    {"a": 5},
    {"name": {}},
    [{"name": []}],
)
OF_ENGINES: dict[str, Any] = {
    "template": {
        "metadata": {"labels": {"team": "llm"}, "annotations": {"a": "b"}},
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "env": [{"name": "A", "value": "1"}],
                    "ports": [{"containerPort": 9000}],
                    "volumeMounts": [{"name": "a", "mountPath": "/a"}],
                    "lifecycle": {"postStart": {}},
                }
            ],
            "volumes": [{"name": "a", "emptyDir": {}}],
            "tolerations": [{"operator": "Exists"}],
        },
    },
    "resources": {"limits": {"memory": "1Gi"}, "requests": {"memory": "1Gi"}},
    "kvTransferConfig": {"kv_connector_extra_config": {"a": "b"}},
}
OF_PROXIES: dict[str, Any] = {
    "config": {
        "listen": {"port": 8443, "tls": {"certificate": "/a", "key": "/b"}},
        "auth": {"reader_key_digests": ["a" * 64]},
        "kubernetes": {"timeout": 5},
        "replicas": {"count": 3},
        "pools": [
            {
                "name": "Qwen-Qwen3-0.6B-nixl",
                "connector": "nixl",
                "profile": "h200-8b",
                "nodes": [{"url": "http://a", "role": "any", "facts": {"profile": "/a"}}],
            }
        ],
    },
    "template": {"spec": {"containers": [{"name": "pdproxy", "env": [{"name": "A"}]}]}},
    "resources": {"limits": {"memory": "1Gi"}},
}


def places(thing: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value within a value."""
    if path:
        yield path
    known = dict(enumerate(thing)) if isinstance(thing, list) else thing
    for key, value in known.items() if isinstance(known, dict) else ():
        yield from places(value, (*path, key))


def changed(thing: Any, path: tuple[Any, ...]) -> Iterator[Any]:
    """A value with each other value at one place."""
    for other in OTHERS:
        found = copy.deepcopy(thing)
        inner = found
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = other
        yield found


@pytest.mark.parametrize("name", OF_ENGINES)
def test_of_a_runtime(name: str) -> None:
    field = msgspec.structs.fields(runtime("any", "any").spec)
    (attribute,) = (one.name for one in field if one.encode_name == name)
    for path in places(OF_ENGINES[name]):
        for value in changed(OF_ENGINES[name], path):
            one = runtime("any", "any")
            one = replace(one, spec=replace(one.spec, **{attribute: value}))
            ((_, pool),) = pools_of([], [one])
            made(lambda one=one, pool=pool: engine_objects(one, pool, [proxy()], {}))


@pytest.mark.parametrize("name", OF_PROXIES)
def test_of_a_proxy(name: str) -> None:
    one = runtime("any", "any")
    for path in places(OF_PROXIES[name]):
        for value in changed(OF_PROXIES[name], path):
            front = proxy()
            front = replace(front, spec=replace(front.spec, **{name: value}))
            ((_, pool),) = pools_of([front], [one])
            assert engine_objects(one, pool, [front], {})
            pools = selected_pools(front, [one])
            made(lambda front=front, pools=pools: proxy_objects(front, pools, "a" * 64))


def made(build: Any) -> None:
    """Have objects made, and see that they can be written, or that there is a sentence."""
    with contextlib.suppress(ConfigError):
        assert msgspec.json.encode(build())


def test_each_value_is_replaced() -> None:
    assert len([*places(OF_ENGINES)]) > 25
    assert [*changed({"a": [{"b": 1}]}, ("a", 0, "b"))][2] == {"a": [{"b": 5}]}
