"""What `scaling` must know of a runtime, from its pods and from what the proxies say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pdproxy_operator.figures import Figures
from pdproxy_operator.own import OwnPod
from pdproxy_operator.pools import Pool
from pdproxy_operator.resources import Runtime
from pdproxy_operator.scaling import Scaled


def scaled_of(
    runtime: Runtime, pool: Pool, pods: Sequence[OwnPod], figures: Figures | None, now: float
) -> Scaled:
    """Return it. `pods`: of this runtime; `now`: Unix seconds."""
    spec = runtime.spec
    engines = [one for one in pods if one.is_leader and one.status.phase not in _ENDED]
    stay = [one for one in engines if one.metadata.deletion_timestamp is None]
    since = [_since(one) for one in stay if not _has_node(one)]
    demand = None if figures is None else figures.demand.get((pool.name, spec.role))
    return Scaled(
        runtime=runtime.metadata.name,
        pool=pool.name,
        role=spec.role,
        autoscaling=spec.autoscaling,
        replicas=spec.replicas,
        pods=len(stay),
        ready=sum(one.is_ready for one in stay),
        pending=len(since),
        pending_s=max(0.0, now - min(since)) if since else 0.0,
        ending=len(engines) - len(stay),
        gpus=0 if spec.simulated else spec.tensor_parallel_size * spec.data_parallel_size,
        demand=demand,
        complete=figures is not None and figures.complete,
        state=runtime.status.scaling,
    )


_ENDED = ("Succeeded", "Failed")


def _has_node(pod: OwnPod) -> bool:
    return any(
        one.type == "PodScheduled" and one.status == "True" for one in pod.status.conditions or ()
    )


def _since(pod: OwnPod) -> float:
    """Return when a pod was made, in Unix seconds."""
    try:
        return datetime.fromisoformat(pod.metadata.creation_timestamp).timestamp()
    except ValueError:
        return float("inf")
