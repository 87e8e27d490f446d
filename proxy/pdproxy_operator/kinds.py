"""The kinds of objects that the operator writes. Whatever is not here it neither writes nor
deletes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pdproxy_operator.resources import API_VERSION


class Kind(NamedTuple):
    """`version`: `v1`, or with its group. `is_optional`: of an API that a cluster may lack."""

    version: str
    kind: str
    plural: str
    is_optional: bool = False

    @property
    def api(self) -> str:
        """The path of its version."""
        return f"/apis/{self.version}" if "/" in self.version else f"/api/{self.version}"

    @property
    def group(self) -> str:
        """The name of its group, "" for Kubernetes' first one."""
        return self.version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the path of an object, or of all. `namespace` None: those of all namespaces."""
        within = "" if namespace is None else f"/namespaces/{namespace}"
        return "/".join(filter(None, (f"{self.api}{within}/{self.plural}", name, subresource)))


RUNTIMES = Kind(API_VERSION, "PDRuntime", "pdruntimes")
PROXIES = Kind(API_VERSION, "PDProxy", "pdproxies")
PODS = Kind("v1", "Pod", "pods")
DEPLOYMENTS = Kind("apps/v1", "Deployment", "deployments")
GROUPS = Kind(
    "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets", is_optional=True
)
EVENTS = Kind("events.k8s.io/v1", "Event", "events")
LEASES = Kind("coordination.k8s.io/v1", "Lease", "leases")
WRITTEN = (
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("v1", "Service", "services"),
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    DEPLOYMENTS,
    GROUPS,
    Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes", is_optional=True),
    Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors", is_optional=True),
)
"""In the order in which they are written: what pods need comes before them."""
WORKLOADS = (DEPLOYMENTS, GROUPS)
"""Those that have pods, and so `/scale`."""
_OF = {(one.version, one.kind): one for one in WRITTEN}


def kind_of(wanted: Mapping[str, Any]) -> Kind:
    """Return the kind of an object that is to be written. KeyError: none of that name is."""
    return _OF[wanted["apiVersion"], wanted["kind"]]
