"""What the PodSecurity standards forbid, as far as pods of the chart could have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_BASELINE_CAPABILITIES = frozenset(
    (
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
        *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    )
)
_RESTRICTED_VOLUMES = frozenset(
    (
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
        *("persistentVolumeClaim", "projected", "secret"),
    )
)
Spec = dict[str, Any]


def against_baseline(spec: Spec) -> list[str]:
    """Return what the standard `baseline` forbids."""
    return list(_baseline(spec))


def against_restricted(spec: Spec) -> list[str]:
    """Return what the standard `restricted` forbids."""
    return [*_baseline(spec), *_restricted(spec)]


def _baseline(spec: Spec) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    yield from (f"volume {one['name']}" for one in spec.get("volumes", ()) if "hostPath" in one)
    for container in _containers(spec):
        context = container.get("securityContext", {})
        if context.get("privileged"):
            yield "privileged"
        added = {*context.get("capabilities", {}).get("add", ())}
        yield from sorted(added - _BASELINE_CAPABILITIES)
        yield from (
            f"hostPort of {one['name']}" for one in container.get("ports", ()) if "hostPort" in one
        )
    for context in _contexts(spec):
        if context.get("seccompProfile", {}).get("type") == "Unconfined":
            yield "seccompProfile"


def _restricted(spec: Spec) -> Iterator[str]:
    for volume in spec.get("volumes", ()):
        if not _RESTRICTED_VOLUMES & volume.keys():
            yield f"volume {volume['name']}"
    whole = spec.get("securityContext", {})
    for container in _containers(spec):
        context = whole | container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            yield "runAsNonRoot"
        if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile"
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()):
            yield "capabilities.drop"
        if {*capabilities.get("add", ())} - {"NET_BIND_SERVICE"}:
            yield "capabilities.add"


def _containers(spec: Spec) -> list[Spec]:
    return [*spec["containers"], *spec.get("initContainers", ())]


def _contexts(spec: Spec) -> list[Spec]:
    return [one.get("securityContext", {}) for one in (spec, *_containers(spec))]
