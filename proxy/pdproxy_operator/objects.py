"""What all objects that the operator makes have: name, labels and owner."""

from __future__ import annotations

from typing import Any

from pdproxy_operator.kinds import WRITTEN
from pdproxy_operator.names import MANAGED_BY, MANAGER, PROXY, RUNTIME
from pdproxy_operator.resources import API_VERSION, Object, Proxy, Runtime

_VERSIONS = {one.kind: one.version for one in WRITTEN}


def owned(
    owner: Runtime | Proxy,
    kind: str,
    name: str,
    labels: dict[str, str] | None = None,
    **parts: Any,
) -> Object:
    """Return an object in the namespace of its owner, with which it is deleted. `labels`: more of
    them; `parts`: what it has beside its metadata. KeyError: the operator writes no such kind.
    """
    metadata = owner.metadata
    return {
        "apiVersion": _VERSIONS[kind],
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": metadata.namespace,
            "labels": {**(labels or {}), **own_labels(owner)},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": "PDRuntime" if isinstance(owner, Runtime) else "PDProxy",
                    "name": metadata.name,
                    "uid": metadata.uid,
                    "controller": True,
                }
            ],
        },
        **parts,
    }


def own_labels(owner: Runtime | Proxy) -> dict[str, str]:
    """Return the labels of all objects of a resource."""
    key = RUNTIME if isinstance(owner, Runtime) else PROXY
    return {MANAGED_BY: MANAGER, key: owner.metadata.name}
