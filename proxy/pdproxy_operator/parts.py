"""The parts of a pool: how many engines of each runtime and revision there are, and serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdproxy.kit.text import truncate
from pdproxy_operator.figures import Figures
from pdproxy_operator.names import REVISION, RUNTIME
from pdproxy_operator.own import OwnObject, OwnPod
from pdproxy_operator.pools import Pool
from pdproxy_operator.rollout import Part
from pdproxy_operator.troubles import is_there, ready_for, seconds_since, trouble_of

MAX_REPLICAS = 10_000
"""Engines of a runtime at most, as its definition has it: a rollout counts them one by one."""


def engines_of(pods: Sequence[OwnPod]) -> list[OwnPod]:
    """Return those of some pods that are engines, or the first ones of their groups, and stay."""
    return [pod for pod in pods if is_there(pod) and pod.is_leader]


def parts_of(
    pool: Pool,
    workloads: Sequence[OwnObject],
    pods: Sequence[OwnPod],
    figures: Figures | None,
    now: float,
) -> list[Part]:
    """Return the parts of a pool. `workloads`: the Deployments and LeaderWorkerSets of its
    runtimes; `pods`: of the same. `figures` None: no proxy is there to say something. `now`: Unix
    time.

    An engine of an old revision serves if it is ready. One of the pool's revision must serve at all
    proxies that answer, too: nothing ends for an engine that they can't use.
    """
    roles = {one.metadata.name: one.spec.role for one in pool.runtimes}
    engines: dict[tuple[str, str], list[OwnPod]] = {}
    for pod in engines_of(pods):
        engines.setdefault(_key(pod), []).append(pod)
    found = []
    for workload in workloads:
        runtime, revision = _key(workload)
        if runtime not in roles:
            continue
        ready, unstarted = 0, 0
        waiting: list[tuple[float, str]] = []
        some = engines.get((runtime, revision), [])
        for pod in some:
            trouble = trouble_of(pod, now)
            if trouble is not None:
                unstarted += not trouble.started
                waiting.append((trouble.seconds, trouble.clause))
            elif revision == pool.revision and (why := _unused(pod, figures)) is not None:
                waiting.append((ready_for(pod, now), why))
            else:
                ready += 1
        # what somebody has written into a Deployment may be any number
        replicas = min(workload.spec.get("replicas", 1), MAX_REPLICAS)
        if len(some) < replicas:
            unstarted += replicas - len(some)
            if (why_none := _not_created(workload, now)) is not None:
                waiting.append(why_none)
        # Engines that have never served end at once: the controller of the pods must agree.
        unstarted = min(unstarted, max(0, replicas - _ready_replicas(workload)))
        seconds, clause = max(waiting, default=(0.0, None))
        found.append(
            Part(runtime, roles[runtime], revision, replicas, ready, clause, seconds, unstarted)
        )
    return found


def _key(one: OwnObject | OwnPod) -> tuple[str, str]:
    labels = one.metadata.labels or {}
    return labels.get(RUNTIME, ""), labels.get(REVISION, "")


def _unused(pod: OwnPod, figures: Figures | None) -> str | None:
    """Return why the proxies do not use an engine that is ready, None: they do."""
    if figures is None or not figures.answered:
        return None
    name, of = pod.metadata.name, figures.answered
    engine = figures.engines.get(name)
    if engine is None or engine.known < of:
        left = of - (engine.known if engine is not None else 0)
        return f"{name} is not known to {left} of {of} proxies"
    if engine.up < of:
        return f"{name} is not up for {of - engine.up} of {of} proxies"
    if engine.fails:
        return (
            f"{name} is used without its KV, which does not move, by {engine.fails} of {of} proxies"
        )
    return None


def _not_created(workload: OwnObject, now: float) -> tuple[float, str] | None:
    """Return for how long pods could not be created, and why; None: nothing is known."""
    for one in _status(workload).get("conditions") or ():
        if one.get("type") == "ReplicaFailure" and one.get("status") == "True":
            said = truncate(one.get("message") or one.get("reason") or "")
            clause = f"{workload.metadata.name} can create no pod: {said}"
            return seconds_since(one.get("lastTransitionTime"), now), clause
    return None


def _ready_replicas(workload: OwnObject) -> int:
    """Return how many of its pods are ready, as their controller says."""
    found = _status(workload).get("readyReplicas")
    return found if isinstance(found, int) else 0


def _status(workload: OwnObject) -> dict[str, Any]:
    return workload.status if isinstance(workload.status, dict) else {}
