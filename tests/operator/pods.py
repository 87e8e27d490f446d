"""Pods as the API server gives them, as engines and proxies have them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from pdproxy_operator.names import REVISION, RUNTIME
from pdproxy_operator.own import OwnObject, OwnPod

NOW = 1_800_000_000.0


def ago(seconds: float) -> str:
    """A time of the API."""
    return datetime.fromtimestamp(NOW - seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(
    name: str,
    *,
    since: float = 3600,
    ready: bool = False,
    container: dict[str, Any] | None = None,
    scheduled: str | None = None,
    revision: str = "",
    **more: Any,
) -> OwnPod:
    """A pod. `since`: seconds for which it is as it is; `container`: its only container's status;
    `scheduled`: why it has no node; `more`: of its metadata.
    """
    conditions = [{"type": "Ready", "status": str(ready), "lastTransitionTime": ago(since)}]
    if scheduled is not None:
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        conditions.append({**unscheduled, "message": scheduled})
    status = {"phase": "Running", "conditions": conditions}
    if scheduled is None:
        runs = {"ready": ready, "started": ready, "state": {"running": {}}}
        status["containerStatuses"] = [{"name": "engine", **runs, **(container or {})}]
    labels = {RUNTIME: name.rpartition("-")[0], REVISION: revision, **more.pop("labels", {})}
    metadata = {"name": name, "creationTimestamp": ago(since), "labels": labels, **more}
    return msgspec.convert({"metadata": metadata, "status": status}, OwnPod)


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    """The status of a container that waits."""
    return {"state": {"waiting": {"reason": reason, "message": message}}, **more}


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    """How a container has ended."""
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def workload(runtime: str, revision: str, replicas: int, **status: Any) -> OwnObject:
    """A Deployment."""
    labels = {RUNTIME: runtime, REVISION: revision}
    return msgspec.convert(
        {
            "metadata": {"name": f"{runtime}-{revision}", "labels": labels},
            "spec": {"replicas": replicas},
            "status": status,
        },
        OwnObject,
    )
