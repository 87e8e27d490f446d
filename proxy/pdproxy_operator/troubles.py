"""Why a pod does not serve, as Kubernetes says it: for conditions, and for rollouts that wait."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from pdproxy.kit.text import truncate
from pdproxy_operator.own import ContainerStatus, OwnPod, Terminated

_IMAGE = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
)
_STARTING = ("", "ContainerCreating", "PodInitializing")
_CRASHES = 2
"""Ends of a container from which on it is more than bad luck."""


class Trouble(NamedTuple):
    """Why a pod does not serve. `reason`: in CamelCase; `clause`: begins with the pod's name;
    `seconds`: for which it has not served.

    `is_fault`: whether it will hardly serve by itself. `started`: whether its containers have
    passed their startup probes: it may have requests.
    """

    reason: str
    clause: str
    seconds: float
    is_fault: bool
    started: bool


def seconds_since(time: str | None, now: float) -> float:
    """Return the seconds since a time of the API (RFC 3339), 0 if it is none. `now`: Unix time."""
    try:
        at = datetime.fromisoformat(time or "").timestamp()
    except ValueError:
        return 0.0
    return max(0.0, now - at)


def is_there(pod: OwnPod) -> bool:
    """Return whether a pod counts: it neither ends nor has ended."""
    return pod.metadata.deletion_timestamp is None and pod.status.phase not in (
        "Succeeded",
        "Failed",
    )


_UNKNOWN = 86_400.0
"""Seconds that are assumed where the API does not say since when something is so."""


def ready_for(pod: OwnPod, now: float) -> float:
    """Return the seconds for which a pod has been ready, -1 if it is not."""
    if not pod.is_ready:
        return -1.0
    return next(
        seconds_since(one.since, now) if one.since else _UNKNOWN
        for one in pod.status.conditions or ()
        if one.type == "Ready"
    )


def trouble_of(pod: OwnPod, now: float, starts: str = "loads its model") -> Trouble | None:
    """Return why a pod does not serve, None if it does. `now`: Unix time; `starts`: what it does
    until it has started.
    """
    if pod.is_ready:
        return None
    name = pod.metadata.name
    conditions = {one.type: one for one in pod.status.conditions or ()}
    ready = conditions.get("Ready")
    since = ready.since if ready is not None and ready.since else pod.metadata.creation_timestamp
    seconds = seconds_since(since, now)
    placed = conditions.get("PodScheduled")
    if placed is not None and placed.status == "False":
        said = _said(placed.message or placed.reason)
        return Trouble("Unschedulable", f"{name} has no node: {said}", seconds, True, False)
    inits = pod.status.init_container_statuses or []
    containers = pod.status.container_statuses or []
    for one in [*inits, *containers]:
        if (found := _of_container(one, is_init=one in inits)) is not None:
            reason, clause = found
            return Trouble(reason, f"{name} {clause}", seconds, True, False)
    if not containers or any(one.state.waiting is not None for one in containers):
        return Trouble("Creating", f"{name} is being created", seconds, False, False)
    if any(one.started is False for one in containers):
        return Trouble("Loading", f"{name} {starts}", seconds, False, False)
    clause = f"{name} does not answer its readiness probe"
    return Trouble("NotReady", clause, seconds, True, True)


def _of_container(one: ContainerStatus, *, is_init: bool) -> tuple[str, str] | None:
    """Return why a container does not run: a reason, and a clause without its subject."""
    waiting, ended = one.state.waiting, one.state.terminated
    if waiting is not None and waiting.reason in _IMAGE:
        # "Back-off pulling image ...: ErrImagePull: what is wrong" and "what is wrong" take turns.
        said = waiting.message.partition("ErrImagePull: ")[2] or waiting.message
        return "ImagePull", f"cannot pull its image: {_said(said or waiting.reason)}"
    last = ended or one.last_state.terminated
    crashes = waiting is not None and waiting.reason == "CrashLoopBackOff"
    runs = waiting is None and ended is None
    if last is not None and one.restart_count and not (runs and (one.started or is_init)):
        crashes |= one.restart_count >= _CRASHES
        times = "once" if one.restart_count == 1 else f"{one.restart_count} times"
        return "CrashLoop" if crashes else "Restarted", f"has ended {times}, {_end(last)}"
    if ended is not None and not (is_init and ended.exit_code == 0):
        return "Restarted", f"has ended, {_end(ended)}"
    if crashes:
        return "CrashLoop", "has ended again and again"
    if waiting is not None and waiting.reason not in _STARTING:
        said = _said(waiting.message or waiting.reason)
        return "CannotStart", f"cannot start its container {one.name}: {said}"
    return None


def _end(last: Terminated) -> str:
    """Return how a container has ended."""
    said = last_words(last) or ("" if last.reason in ("", "Error") else last.reason)
    return f"the last time with exit code {last.exit_code}" + (f": {said}" if said else "")


def last_words(ended: Terminated) -> str:
    """Return the last line that a container has left, "" if there is none."""
    return _said(ended.message.strip().rpartition("\n")[2])


def _said(text: str) -> str:
    """Return what Kubernetes or a container says as a part of a sentence."""
    return truncate(" ".join(text.split()).rstrip("."))
