"""What the API of Kubernetes says of pods and of InferencePools: the fields that matter here.

The rest of an object is not kept: `managedFields` alone are often most of it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Renamed(msgspec.Struct, frozen=True, rename="camel"):
    """The base of parts of objects: their names are spelled as in the API."""


class Metadata(Renamed, frozen=True):
    """Which object it is. `uid`: no other object ever has it; `deletion_timestamp`: it is being
    deleted.
    """

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class ContainerPort(Renamed, frozen=True):
    """A port of a container, perhaps with a name."""

    container_port: int
    name: str = ""


class Container(Renamed, frozen=True):
    """A container of a pod."""

    ports: list[ContainerPort] | None = None


class PodSpec(Renamed, frozen=True):
    """What a pod was made of. `init_containers`: some may run as long as the pod does."""

    node_name: str = ""
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None


class Condition(Renamed, frozen=True):
    """Whether something is so: `status` is `True`, `False` or `Unknown`."""

    type: str
    status: str


class PodAddress(Renamed, frozen=True):
    """An address of a pod."""

    ip: str = ""


class PodStatus(Renamed, frozen=True):
    """How a pod is now."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    pod_ips: list[PodAddress] | None = msgspec.field(default=None, name="podIPs")
    conditions: list[Condition] | None = None


class Pod(Renamed, frozen=True):
    """A pod."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class PoolSelector(Renamed, frozen=True):
    """The labels that the pods of an InferencePool have."""

    match_labels: dict[str, str] | None = None


class TargetPort(Renamed, frozen=True):
    """A port at which each pod of an InferencePool serves."""

    number: int


class InferencePoolSpec(Renamed, frozen=True):
    """Which pods are in an InferencePool."""

    selector: PoolSelector = PoolSelector()
    target_ports: list[TargetPort] | None = None


class InferencePool(Renamed, frozen=True):
    """An InferencePool (inference.networking.k8s.io/v1)."""

    metadata: Metadata = Metadata()
    spec: InferencePoolSpec = InferencePoolSpec()


class PageMetadata(Renamed, frozen=True):
    """Which version of a collection a list shows. `continue_`: names the next page, "" if there is
    none.
    """

    resource_version: str
    continue_: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A page of a list."""

    metadata: PageMetadata
    items: list[T]


class Event(msgspec.Struct, frozen=True):
    """A line of a watch. `type`: ADDED, MODIFIED and DELETED have an object, BOOKMARK has one with
    nothing but a version, ERROR has a `Status`.
    """

    type: str
    object: msgspec.Raw


class Status(Renamed, frozen=True):
    """An error of the API server. `code`: of HTTP."""

    message: str = ""
    code: int = 0
