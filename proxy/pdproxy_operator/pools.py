"""Pools: the runtimes of one model and connector, which exchange KV; and the revision of a pool.

Engines of one revision can exchange KV. Whatever may change the KV makes another revision: all
flags but those that are known to change none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from pdproxy_operator.names import pool_name
from pdproxy_operator.resources import Connector, Proxy, Runtime, RuntimeSpec, selects

_LENGTH = 10
"""Hexadecimal digits of a revision: it is a part of names."""


@dataclass(frozen=True)
class Pool:
    """`name`: of the pool in the settings of the proxies. `runtimes`: by their names."""

    name: str
    model: str
    connector: Connector
    runtimes: tuple[Runtime, ...]
    revision: str


def pools_of(
    proxies: Collection[Proxy], runtimes: Collection[Runtime]
) -> list[tuple[Proxy | None, Pool]]:
    """Return the pools in which runtimes of one namespace are replaced together, each runtime in
    one of them: that of the first PDProxy by name that selects it. None: no PDProxy selects it, and
    it is a pool of its own, with the revision that it has beside the others which none selects: a
    PDProxy that comes or goes replaces no engine.
    """
    left = {one.metadata.name: one for one in runtimes}
    found: list[tuple[Proxy | None, Pool]] = []
    for proxy in sorted(proxies, key=lambda one: one.metadata.name):
        found += [(proxy, pool) for pool in selected_pools(proxy, left.values())]
        for one in _selected(proxy, runtimes):
            left.pop(one.metadata.name, None)
    return found + [
        (None, replace(pool, runtimes=(one,)))
        for pool in _pools(left.values())
        for one in pool.runtimes
    ]


def selected_pools(proxy: Proxy, runtimes: Iterable[Runtime]) -> list[Pool]:
    """Return the pools of all runtimes that a PDProxy selects, also of those that another PDProxy
    selects.
    """
    return _pools(_selected(proxy, runtimes))


def _selected(proxy: Proxy, runtimes: Iterable[Runtime]) -> list[Runtime]:
    selector = proxy.spec.runtime_selector
    return [one for one in runtimes if selects(selector, one.metadata.labels)]


def _pools(runtimes: Iterable[Runtime]) -> list[Pool]:
    by_key: dict[tuple[str, Connector], list[Runtime]] = {}
    for one in sorted(runtimes, key=lambda one: one.metadata.name):
        by_key.setdefault((one.spec.model.name, one.spec.connector), []).append(one)
    return [
        Pool(
            pool_name(members[0].spec.model, connector),
            model,
            connector,
            tuple(members),
            revision_of(members),
        )
        for (model, connector), members in sorted(by_key.items())
    ]


def revision_of(runtimes: Iterable[Runtime]) -> str:
    """Return the revision of a pool of these runtimes, whatever their order. Role aggregated moves
    no KV, and has no part in it.
    """
    parts = {_kv(one.spec) for one in runtimes if one.spec.role != "aggregated"}
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:_LENGTH]


def _kv(spec: RuntimeSpec) -> str:
    """What may change the KV of an engine. `group_size`: a group is an object of another kind."""
    words = [
        *(spec.role, spec.connector, spec.image, spec.simulated, spec.model.name),
        *(spec.tensor_parallel_size, spec.data_parallel_size, spec.group_size),
        *(spec.kv_transfer_config, [*_kv_args(spec)]),
    ]
    return json.dumps(words, sort_keys=True, separators=(",", ":"))


def _kv_args(spec: RuntimeSpec) -> Iterator[str]:
    """Yield the flags that may change the KV, each with its values."""
    is_kv = True
    for word in spec.args:
        if word.startswith("-"):
            is_kv = word.partition("=")[0] not in spec.args_without_kv
        if is_kv:
            yield word
