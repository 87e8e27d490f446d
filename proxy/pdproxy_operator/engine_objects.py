"""The objects of a runtime: its engines, how many may be missing, who reaches them, and what runs
before they end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

from pdproxy_operator.engine_pod import engine_labels, engine_pod, worker_pod
from pdproxy_operator.names import (
    MANAGED_BY,
    MODEL,
    PROXY,
    REVISION,
    ROLE,
    RUNTIME,
    deployment_name,
    engines_name,
    prestop_name,
)
from pdproxy_operator.objects import owned
from pdproxy_operator.pools import Pool
from pdproxy_operator.proxy_settings import url_of_all
from pdproxy_operator.resources import Object, Proxy, Runtime

_EXTRA_START_SECONDS = 600
"""Behind startSeconds, until the Deployment says that it makes no progress: for the image."""


def engine_objects(
    runtime: Runtime, pool: Pool, proxies: Sequence[Proxy], replicas: Mapping[str, int]
) -> list[Object]:
    """Return the objects of a runtime. `pool`: that in which it is replaced. `proxies`: those that
    select it. `replicas`: engines by revision, none of a revision that is not there.

    Engines of other revisions than the pool's have the templates that they had: objects of these
    are not returned.

    Raises:
        ConfigError: the runtime asks for what can't be.
    """
    count = replicas.get(pool.revision, 0)
    pod = engine_pod(runtime, pool, proxies)
    return [
        _prestop(runtime, proxies),
        _groups(runtime, pod, count)
        if runtime.spec.group_size > 1
        else _deployment(runtime, pod, count),
        _budget(runtime),
        *_network_policy(runtime, proxies),
    ]


def _deployment(runtime: Runtime, pod: Object, replicas: int) -> Object:
    name, revision = runtime.metadata.name, pod["metadata"]["labels"][REVISION]
    return owned(
        runtime,
        "Deployment",
        deployment_name(name, revision),
        _labels(pod),
        spec={
            "replicas": replicas,
            # GPUs for one more engine are seldom there.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            # The proxies must have found and probed an engine before the next one ends.
            "minReadySeconds": 10,
            "progressDeadlineSeconds": runtime.spec.start_seconds + _EXTRA_START_SECONDS,
            "selector": {"matchLabels": {RUNTIME: name, REVISION: revision}},
            "template": pod,
        },
    )


def _groups(runtime: Runtime, pod: Object, replicas: int) -> Object:
    """Return groups of pods, each of which is one engine. LeaderWorkerSet makes the Service by
    which workers find their leader.
    """
    name, revision = runtime.metadata.name, pod["metadata"]["labels"][REVISION]
    return owned(
        runtime,
        "LeaderWorkerSet",
        deployment_name(name, revision),
        _labels(pod),
        spec={
            "replicas": replicas,
            # A leader is ready only once its workers have come.
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "leaderWorkerTemplate": {
                "size": runtime.spec.group_size,
                # The weights of a lost pod are lost, and the others wait for it.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": pod,
                "workerTemplate": worker_pod(pod),
            },
        },
    )


def _labels(pod: Object) -> dict[str, str]:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return {key: labels[key] for key in (ROLE, MODEL, REVISION)}


def _budget(runtime: Runtime) -> Object:
    name = runtime.metadata.name
    return owned(
        runtime,
        "PodDisruptionBudget",
        engines_name(name),
        spec={"maxUnavailable": 1, "selector": {"matchLabels": {RUNTIME: name}}},
    )


def _network_policy(runtime: Runtime, proxies: Sequence[Proxy]) -> Iterator[Object]:
    """Yield who may reach the engines, besides those that other policies allow: the proxies, and
    engines of the same model, at ports for KV that the libraries choose. An engine without proxies
    is left to whoever uses it.
    """
    if not proxies:
        return
    name = runtime.metadata.name
    labels = engine_labels(runtime, "")
    names = sorted(one.metadata.name for one in proxies)
    peers = [
        {"podSelector": {"matchExpressions": [{"key": PROXY, "operator": "In", "values": names}]}},
        {"podSelector": {"matchLabels": {key: labels[key] for key in (MANAGED_BY, MODEL)}}},
    ]
    yield owned(
        runtime,
        "NetworkPolicy",
        engines_name(name),
        spec={
            "podSelector": {"matchLabels": {RUNTIME: name}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": peers}],
        },
    )


def _prestop(runtime: Runtime, proxies: Sequence[Proxy]) -> Object:
    """What runs before an engine ends. The proxies are not a part of the pods: other proxies
    restart no engine.
    """
    script = files("pdproxy_operator").joinpath("prestop.sh").read_text(encoding="utf-8")
    services = " ".join(sorted(url_of_all(one) for one in proxies))
    data = {"prestop.sh": script, "variables": f"PDPROXY_SERVICES='{services}'\n"}
    return owned(runtime, "ConfigMap", prestop_name(runtime.metadata.name), data=data)
