"""Names and labels that the operator gives to objects, each in one place."""

from __future__ import annotations

import re

from pdproxy_operator.resources import Connector, Model, Runtime

MANAGER = "pdproxy-operator"
"""The field manager of server-side apply, and app.kubernetes.io/managed-by."""
MANAGED_BY = "app.kubernetes.io/managed-by"
RUNTIME, PROXY = "pdproxy.dev/runtime", "pdproxy.dev/proxy"
"""Labels that say of which PDRuntime or PDProxy an object is."""
ROLE, MODEL, REVISION = "pdproxy.dev/role", "pdproxy.dev/model", "pdproxy.dev/revision"
WORKER = "leaderworkerset.sigs.k8s.io/worker-index"
"""The label with the number of a pod in its group: the first, 0, answers requests."""
APPLIED = "pdproxy.dev/applied"
"""The annotation of own objects with the hash of what was applied last."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""The annotation of pods by which a ReplicaSet chooses those that it deletes: the lowest first."""


def model_label(name: str) -> str:
    """Return a model's name as the value of a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:63].strip("-_.")


def pool_name(model: Model, connector: Connector) -> str:
    """Return the name of the pool of a model and a connector."""
    return f"{model_label(model.name)}-{connector}"


def engines_selector(runtime: Runtime) -> str:
    """Return the label selector of a runtime's engines: of each group, the pod with the API."""
    name = runtime.metadata.name
    return f"{RUNTIME}={name},{WORKER}=0" if runtime.spec.group_size > 1 else f"{RUNTIME}={name}"


def deployment_name(runtime: str, revision: str) -> str:
    """Return the name of the Deployment of a runtime's engines of one revision."""
    return f"{runtime}-{revision}"


def prestop_name(runtime: str) -> str:
    """Return the name of the ConfigMap with what a runtime's engines run before they end."""
    return f"{runtime}-prestop"


def engines_name(runtime: str) -> str:
    """Return the name of the policies of a runtime's engines: a PDProxy may have the same name."""
    return f"{runtime}-engines"


def replicas_name(proxy: str) -> str:
    """Return the name of the Service with an address for each proxy that is ready."""
    return f"{proxy}-replicas"


def all_name(proxy: str) -> str:
    """Return the name of the Service with an address for each proxy, ready or not."""
    return f"{proxy}-all"
