"""Objects that the operator has made, as the API server gives them: to be compared with what it
would write, and to see how their pods are.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from pdproxy.wire.kubernetes import Container, PodAddress, Renamed
from pdproxy_operator.names import WORKER
from pdproxy_operator.resources import GROUP, Object, OwnMetadata


class OwnedMetadata(OwnMetadata, frozen=True):
    """`owner_references`: which objects this one is deleted with."""

    owner_references: list[Object] | None = None

    @property
    def controller(self) -> str | None:
        """The uid of the object that controls this one, None: none does."""
        found = [one.get("uid") for one in self.owner_references or () if one.get("controller")]
        return found[0] if found else None

    @property
    def is_of_operator(self) -> bool:
        """Whether a PDRuntime or a PDProxy controls this object, perhaps one that is gone."""
        return any(
            one.get("controller") and str(one.get("apiVersion")).startswith(f"{GROUP}/")
            for one in self.owner_references or ()
        )


class OwnObject(Renamed, frozen=True):
    """An object of any kind that the operator writes. The fields are those that such objects have:
    only these are compared.
    """

    metadata: OwnedMetadata
    spec: Any = UNSET
    data: Any = UNSET
    rules: Any = UNSET
    role_ref: Any = UNSET
    subjects: Any = UNSET
    automount_service_account_token: Any = UNSET
    status: Any = UNSET

    def fields(self) -> Object:
        """Return it as JSON has it, without what is not compared."""
        found = msgspec.to_builtins(self)
        assert isinstance(found, dict)
        return found


class PodCondition(Renamed, frozen=True):
    """Whether something is so, and why."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    since: str | None = msgspec.field(name="lastTransitionTime", default=None)


class Waiting(Renamed, frozen=True):
    """Why a container does not run: `reason` such as ImagePullBackOff, CrashLoopBackOff."""

    reason: str = ""
    message: str = ""


class Terminated(Renamed, frozen=True):
    """How a container has ended. `finished_at`: RFC 3339."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    finished_at: str | None = None


class ContainerState(Renamed, frozen=True):
    """What a container does."""

    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(Renamed, frozen=True):
    """How a container is, and how its last run was. `started`: its startup probe has passed."""

    name: str = ""
    ready: bool = False
    started: bool | None = None
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class OwnPodSpec(Renamed, frozen=True):
    """What a pod was made of."""

    node_name: str = ""
    containers: list[Container] | None = None


class OwnPodStatus(Renamed, frozen=True):
    """How a pod is now."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    pod_ips: list[PodAddress] | None = msgspec.field(default=None, name="podIPs")
    conditions: list[PodCondition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class OwnPod(Renamed, frozen=True):
    """A pod of engines or of proxies."""

    metadata: OwnedMetadata = OwnedMetadata()
    spec: OwnPodSpec = OwnPodSpec()
    status: OwnPodStatus = OwnPodStatus()

    @property
    def is_leader(self) -> bool:
        """Whether it is the pod of its group that answers requests, or of no group."""
        return (self.metadata.labels or {}).get(WORKER, "0") == "0"

    @property
    def is_ready(self) -> bool:
        """Whether it serves: it is ready, and not being deleted."""
        return self.metadata.deletion_timestamp is None and any(
            one.type == "Ready" and one.status == "True" for one in self.status.conditions or ()
        )
