"""The two kinds of resources as the API server gives them: PDRuntime and PDProxy.

The API server has checked each object by its definition (`definitions/`) and has filled in the
defaults, so a default is written there alone: fields without one here are always there.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from pdproxy.wire.kubernetes import Metadata, Renamed

GROUP, VERSION = "pdproxy.dev", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

Role = Literal["prefill", "decode", "aggregated", "any"]
Connector = Literal["nixl", "nixl-push", "mooncake", "shared", "custom"]
Order = Literal["pairs", "prefillFirst", "decodeFirst"]
ConditionStatus = Literal["True", "False", "Unknown"]
Object = dict[str, Any]
"""An object of the API as JSON has it: what is written."""


class OwnMetadata(Metadata, frozen=True):
    """`generation`: rises with each change of the spec. `creation_timestamp`: RFC 3339."""

    generation: int = 0
    creation_timestamp: str = ""
    annotations: dict[str, str] | None = None


class ConditionOf(Renamed, frozen=True):
    """A condition of a resource. `reason`: one word in CamelCase; `message`: a sentence. `since`:
    when `status` changed last, RFC 3339.
    """

    type: str
    status: ConditionStatus
    reason: str
    message: str
    since: str = msgspec.field(name="lastTransitionTime")
    observed_generation: int = 0


class Model(Renamed, frozen=True):
    """`name`: as `vllm serve` takes it. `served`: its name for clients, None: the same."""

    name: str
    served: str | None = None


class Drain(Renamed, frozen=True):
    """`seconds`: for which an engine that is to end waits for its requests, at most."""

    seconds: int


class Autoscaling(Renamed, frozen=True):
    """Between which numbers of engines the operator chooses. Seconds: for which a lower number must
    be enough before engines are taken away.
    """

    max_replicas: int
    min_replicas: int
    scale_down_seconds: int


class RuntimeSpec(Renamed, frozen=True):
    """One role of one model. Docs of each field: its definition."""

    role: Role
    model: Model
    image: str
    replicas: int
    connector: Connector
    serves_whole: bool
    simulated: bool
    tensor_parallel_size: int
    data_parallel_size: int
    group_size: int
    side_channel_port: int
    start_seconds: int
    termination_grace_period_seconds: int
    drain: Drain
    args: list[str]
    env: list[Object]
    args_without_kv: list[str]
    gpu_resource: str
    kv_transfer_config: Object
    resources: Object
    labels: dict[str, str]
    template: Object
    autoscaling: Autoscaling | None = None


class ScalingState(Renamed, frozen=True):
    """What autoscaling remembers of a runtime. Times: RFC 3339; None: there was none.

    `wanted`: engines that the load needed last. `fewer_since`: since when fewer than there are have
    been enough, and `enough`: how many have been enough all that time; None: they are not.
    `seen_at`: when the demand was known last; `stepped_at`: when an engine was taken away last.
    """

    wanted: float | None = None
    enough: int | None = None
    fewer_since: str | None = None
    seen_at: str | None = None
    stepped_at: str | None = None


class RuntimeStatus(Renamed, frozen=True):
    """What the operator says of a runtime. `selector`: of its pods, for /scale."""

    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    draining_replicas: int = 0
    selector: str = ""
    revision: str = ""
    scaling: ScalingState | None = None
    conditions: list[ConditionOf] = []  # noqa: RUF012 - a struct copies its defaults


class Runtime(Renamed, frozen=True):
    """A PDRuntime."""

    metadata: OwnMetadata
    spec: RuntimeSpec
    status: RuntimeStatus = RuntimeStatus()


class Selector(Renamed, frozen=True):
    """The labels that objects must have, all of them."""

    match_labels: dict[str, str]


class SecretKey(Renamed, frozen=True):
    """A key of a Secret that exists."""

    name: str
    key: str


class Service(Renamed, frozen=True):
    """How clients reach the proxies."""

    type: str
    port: int


class Route(Renamed, frozen=True):
    """An HTTPRoute of the Gateway API."""

    parent_refs: list[Object]
    hostnames: list[str]


class Rollout(Renamed, frozen=True):
    """In which order engines are replaced where their KV changes."""

    order: Order


class Budget(Renamed, frozen=True):
    """`gpus`: that all runtimes of the proxy may have together, by autoscaling."""

    gpus: int


class Monitor(Renamed, frozen=True):
    """A PodMonitor of the operator of Prometheus. `labels`: by which that operator finds it.
    `authorization`: one key of the admin API, by which Prometheus reads the proxies' metrics.
    """

    labels: dict[str, str]
    authorization: SecretKey | None = None


class ProxySpec(Renamed, frozen=True):
    """Proxies in front of runtimes. Docs of each field: its definition."""

    runtime_selector: Selector
    image: str
    replicas: int
    config: Object
    service: Service
    rollout: Rollout
    resources: Object
    template: Object
    client_keys: SecretKey | None = None
    admin_keys: SecretKey | None = None
    engine_key: SecretKey | None = None
    route: Route | None = None
    monitor: Monitor | None = None
    budget: Budget | None = None


class PoolStatus(Renamed, frozen=True):
    """What there is of a pool of a PDProxy. Numbers: of engines that are ready, by role."""

    name: str
    model: str
    connector: str
    revision: str
    engines: dict[str, int]


class ProxyStatus(Renamed, frozen=True):
    """What the operator says of proxies. `url`: where clients in the cluster reach them."""

    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    url: str = ""
    pools: list[PoolStatus] = []  # noqa: RUF012 - a struct copies its defaults
    conditions: list[ConditionOf] = []  # noqa: RUF012 - a struct copies its defaults


class Proxy(Renamed, frozen=True):
    """A PDProxy."""

    metadata: OwnMetadata
    spec: ProxySpec
    status: ProxyStatus = ProxyStatus()


class Name(NamedTuple):
    """Which object of a kind."""

    namespace: str
    name: str


def name_of(one: Runtime | Proxy) -> Name:
    """Return an object's name."""
    return Name(one.metadata.namespace, one.metadata.name)


def selects(selector: Selector, labels: dict[str, str] | None) -> bool:
    """Return whether an object with these labels is selected."""
    return selector.match_labels.items() <= (labels or {}).items()
