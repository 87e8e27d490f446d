"""The pods of a runtime's engines: what each is told, how it starts, how it ends.

The Helm chart makes the same pods (configs/chart/templates/engines.yaml), and a test compares both.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence

from pdproxy_operator.errors import ConfigError
from pdproxy_operator.names import (
    MANAGED_BY,
    MODEL,
    REVISION,
    ROLE,
    RUNTIME,
    model_label,
    prestop_name,
)
from pdproxy_operator.objects import own_labels
from pdproxy_operator.pools import Pool
from pdproxy_operator.resources import Object, Proxy, Runtime, RuntimeSpec, SecretKey
from pdproxy_operator.template import with_template
from pdproxy_operator.transfer_config import transfer_config

CONTAINER, PORT = "engine", 8000
_STOP_SECONDS = 30
"""For which vLLM ends what it still has, behind preStop (--shutdown-timeout)."""
_MOONCAKE_KV_SECONDS = 490
"""For how long an engine may have KV that nobody reads: 480 s, not 30 as with other connectors."""
_KEY = "VLLM_API_KEY"
_HEALTH: Object = {
    "httpGet": {"path": "/health", "port": "http"},
    "periodSeconds": 5,
    "timeoutSeconds": 4,
}


def engine_labels(runtime: Runtime, revision: str) -> dict[str, str]:
    """Return the labels of a runtime's pods of one revision."""
    return {
        **own_labels(runtime),
        "app.kubernetes.io/name": "pdproxy-sim" if runtime.spec.simulated else "vllm",
        ROLE: runtime.spec.role,
        MODEL: model_label(runtime.spec.model.name),
        REVISION: revision,
    }


def engine_pod(runtime: Runtime, pool: Pool, proxies: Sequence[Proxy]) -> Object:
    """Return the template of the pods of a runtime's engines. `proxies`: those that select it.

    Raises:
        ConfigError: the runtime asks for what can't be.
    """
    spec = runtime.spec
    pod: Object = {
        "metadata": {"labels": engine_labels(runtime, pool.revision)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": spec.termination_grace_period_seconds,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [_container(runtime, proxies)],
            "volumes": [
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
                {"name": "prestop", "configMap": {"name": prestop_name(runtime.metadata.name)}},
            ],
        },
    }
    return with_template(pod, spec.template, _NEEDED)


def worker_pod(leader: Object) -> Object:
    """Return the template of the other pods of a group, of that of the pod that answers requests:
    vLLM computes there, and has no API. They end behind their leader.
    """
    pod = copy.deepcopy(leader)
    engine = next(one for one in pod["spec"]["containers"] if one["name"] == CONTAINER)
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports"):
        engine.pop(name, None)
    engine["args"].append("--headless")
    return pod


_OF_CONTAINER = f"spec.containers[{CONTAINER}]"
_NEEDED = {
    **{f"metadata.labels.{name}": "" for name in (MANAGED_BY, RUNTIME, REVISION)},
    f"metadata.labels.{ROLE}": "role",
    f"metadata.labels.{MODEL}": "model",
    "spec.terminationGracePeriodSeconds": "terminationGracePeriodSeconds",
    f"{_OF_CONTAINER}.image": "image",
    f"{_OF_CONTAINER}.command": "image or simulated",
    f"{_OF_CONTAINER}.args": "args",
    f"{_OF_CONTAINER}.lifecycle.preStop": "drain",
    f"{_OF_CONTAINER}.env[POD_IP]": "",
    f"{_OF_CONTAINER}.env[VLLM_NIXL_SIDE_CHANNEL_HOST]": "",
    f"{_OF_CONTAINER}.env[VLLM_NIXL_SIDE_CHANNEL_PORT]": "sideChannelPort",
    f"{_OF_CONTAINER}.ports[{PORT}]": "",
    f"{_OF_CONTAINER}.volumeMounts[/pdproxy]": "",
    "spec.volumes[prestop]": "",
}


def _container(runtime: Runtime, proxies: Sequence[Proxy]) -> Object:
    spec = runtime.spec
    made: Object = {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["pdproxy", "sim"] if spec.simulated else ["vllm", "serve"],
        "args": [
            *(_sim_args(spec) if spec.simulated else _vllm_args(spec)),
            *spec.args,
        ],
        "env": [*_env(spec, _engine_key(runtime, proxies))],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {**_HEALTH, "failureThreshold": spec.start_seconds // 5},
        # A busy engine is not down.
        "readinessProbe": {**_HEALTH, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": [*_prestop(spec)]}}},
        "resources": _resources(spec),
        # `baseline` of the PodSecurity standards: the image of vLLM runs as root.
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a pod's own
            {"name": "prestop", "mountPath": "/pdproxy", "readOnly": True},
        ],
    }
    if spec.role != "aggregated":
        made["ports"] += [
            {"name": f"kv-{rank}", "containerPort": spec.side_channel_port + rank}
            for rank in range(spec.data_parallel_size)
        ]
    return made


def _sim_args(spec: RuntimeSpec) -> Iterator[str]:
    yield from (f"--role={spec.role}", "--host=0.0.0.0", f"--port={PORT}")
    yield "--enable-prompt-tokens-details"
    yield from ("--side-channel-host=$(POD_IP)", f"--side-channel-port={spec.side_channel_port}")
    if spec.connector not in ("nixl", "custom"):
        yield f"--connector={spec.connector}"
    yield f"--model={spec.model.served or spec.model.name}"


def _vllm_args(spec: RuntimeSpec) -> Iterator[str]:
    yield from (spec.model.name, f"--port={PORT}", "--enable-prompt-tokens-details")
    yield f"--shutdown-timeout={_STOP_SECONDS}"
    if spec.model.served:
        yield f"--served-model-name={spec.model.served}"
    yield f"--tensor-parallel-size={spec.tensor_parallel_size}"
    if spec.data_parallel_size > 1:
        yield f"--data-parallel-size={spec.data_parallel_size}"
    if spec.group_size > 1:
        # The variables are LeaderWorkerSet's.
        yield from ("--distributed-executor-backend=mp", f"--nnodes={spec.group_size}")
        yield from ("--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)")
    if (transfer := transfer_config(spec)) is not None:
        yield f"--kv-transfer-config={json.dumps(transfer, sort_keys=True, separators=(',', ':'))}"


def _env(spec: RuntimeSpec, key: SecretKey | None) -> Iterator[Object]:
    # First, since others refer to it: Kubernetes knows a variable only behind its own.
    yield {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    if not spec.simulated:
        yield {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "$(POD_IP)"}
        yield {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(spec.side_channel_port)}
    if key is not None and all(one["name"] != _KEY for one in spec.env):
        reference = {"name": key.name, "key": key.key}
        yield {"name": _KEY, "valueFrom": {"secretKeyRef": reference}}
    yield from spec.env


def _engine_key(runtime: Runtime, proxies: Sequence[Proxy]) -> SecretKey | None:
    keys = {proxy.metadata.name: proxy.spec.engine_key for proxy in proxies}
    if len({*keys.values()}) > 1:
        names = " and ".join(sorted(keys))
        raise ConfigError(
            f"the PDProxies {names} select {runtime.metadata.name} and have different engineKeys: "
            "an engine has one key"
        )
    return next(iter(keys.values()), None)


def _prestop(spec: RuntimeSpec) -> Iterator[str]:
    yield from ("env", f"DRAIN_SECONDS={spec.drain.seconds}")
    if spec.connector == "mooncake":
        yield f"KV_SECONDS={_MOONCAKE_KV_SECONDS}"
    yield from ("sh", "/pdproxy/prestop.sh")


def _resources(spec: RuntimeSpec) -> Object:
    if spec.simulated:
        return spec.resources
    gpus = spec.tensor_parallel_size * spec.data_parallel_size // spec.group_size
    own = spec.resources.get("limits") or {}
    if not isinstance(own, dict):
        raise ConfigError("resources.limits: expected a mapping")
    return {**spec.resources, "limits": {spec.gpu_resource: str(gpus), **own}}
