"""What an API server says of the forms of pdproxy's own kinds, for `kubectl explain`.

The generic part of an API server checks objects by their definitions, and publishes none of them:
here the schemas of the definitions are published as a whole API server does it.
"""

from __future__ import annotations

from typing import Any

import yaml

from pdproxy_operator import definitions


def openapi(path: str) -> dict[str, Any] | None:
    """Return the document of a path, None: it is none of these."""
    if not path.startswith("/openapi/v3"):  # each request asks, and reading definitions takes 0.1 s
        return None
    found = [yaml.safe_load(definitions.text_of(name))["spec"] for name in definitions.NAMES]
    group, version = found[0]["group"], found[0]["versions"][0]["name"]
    place = f"apis/{group}/{version}"
    if path == "/openapi/v3":
        places = (place, "apis/apiextensions.k8s.io/v1")  # the server's own
        return {
            "paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}?hash=1"} for one in places}
        }
    if path != f"/openapi/v3/{place}":
        return None
    paths: dict[str, Any] = {}
    schemas = {}
    for one in found:
        kind = {"group": group, "version": version, "kind": one["names"]["kind"]}
        schema = one["versions"][0]["schema"]["openAPIV3Schema"]
        schemas[f"{group}.{kind['kind']}"] = {**schema, "x-kubernetes-group-version-kind": [kind]}
        collection = f"/{place}/namespaces/{{namespace}}/{one['names']['plural']}"
        operation: dict[str, Any] = {"x-kubernetes-group-version-kind": kind}
        strict = [{"name": "fieldValidation", "in": "query"}]
        paths[collection] = {"get": {**operation, "x-kubernetes-action": "list"}}
        paths[f"{collection}/{{name}}"] = {"patch": {**operation, "parameters": strict}}
    head = {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.36.4"}}
    return {**head, "paths": paths, "components": {"schemas": schemas}}
