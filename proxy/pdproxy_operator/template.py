"""The `template` of a resource over the pods that the operator makes: a strategic merge patch.

Mappings are merged key by key, and null removes a key. Lists of parts that have a name are merged
by that name, as Kubernetes does; all others are replaced. What pdproxy needs is refused by its
path, whatever the value is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pdproxy_operator.errors import ConfigError
from pdproxy_operator.resources import Object

_NAMED_BY: Mapping[str, str] = MappingProxyType(
    {
        "containers": "name",
        "initContainers": "name",
        "env": "name",
        "ports": "containerPort",
        "volumes": "name",
        "volumeMounts": "mountPath",
        "imagePullSecrets": "name",
        "hostAliases": "ip",
    }
)
"""The key that names a part of a list, by the name of the list: Kubernetes' patchMergeKey."""


def with_template(pod: Object, template: Object, needed: Mapping[str, str]) -> Object:
    """Return the template of pods with changes.

    `needed`: what can't be changed, by its path, such as `spec.containers[engine].image`, each with
    what to use instead, "" if nothing.

    Raises:
        ConfigError: the changes touch what is needed, or are no mapping or list where the pod has
            one.
    """
    for key in template:
        if key not in ("metadata", "spec"):
            raise ConfigError(f"template.{key}: only metadata and spec can be changed")
    metadata = template.get("metadata")
    for key in metadata if isinstance(metadata, dict) else ():
        if key not in ("labels", "annotations"):
            raise ConfigError(
                f"template.metadata.{key}: only labels and annotations can be changed"
            )
    merged: Object = _merged(copy.deepcopy(pod), template, "", needed)
    return merged


def _merged(before: Any, change: Any, path: str, needed: Mapping[str, str]) -> Any:
    _refuse(change, path, needed)
    if isinstance(change, dict):
        merged = dict(before) if isinstance(before, dict) else {}
        for key, value in change.items():
            here = f"{path}.{key}" if path else key
            if key.startswith("$"):
                raise ConfigError(f"template.{here}: directives of patches are not known here")
            if value is None:
                _refuse(None, here, needed)
                merged.pop(key, None)
            else:
                merged[key] = _merged(merged.get(key), value, here, needed)
        return merged
    name = _NAMED_BY.get(path.rpartition(".")[2])
    if isinstance(change, list) and name is not None:
        return _merged_list(before or [], change, name, path, needed)
    return change


def _merged_list(
    before: list[Object], change: list[Any], name: str, path: str, needed: Mapping[str, str]
) -> list[Object]:
    merged = {one[name]: one for one in before}
    for one in change:
        if not isinstance(one, dict) or not isinstance(one.get(name), str | int):
            raise ConfigError(f"template.{path}: each entry must have {name}")
        key = one[name]
        merged[key] = _merged(merged.get(key, {}), one, f"{path}[{key}]", needed)
    return [*merged.values()]


def _refuse(change: Any, path: str, needed: Mapping[str, str]) -> None:
    if path in needed:
        instead = needed[path]
        why = f"use {instead}" if instead else "it is pdproxy's own"
        raise ConfigError(f"template.{path}: it can't be changed here: {why}")
    for own in needed:
        is_list, is_mapping = own.startswith(f"{path}["), own.startswith(f"{path}.")
        if (is_list and not isinstance(change, list)) or (
            is_mapping and not isinstance(change, dict)
        ):
            raise ConfigError(f"template.{path}: pdproxy needs {own}: change parts beside it")
