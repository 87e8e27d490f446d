"""Which engines there are at the pods of a cluster: a function of the pods alone.

A pod that is being deleted, or has ended, has no engine any more. One that is not ready keeps the
engine that it has: only health checks decide whether an engine is up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from pdproxy.fleet.sources import FoundEngine
from pdproxy.kit.addresses import read_address
from pdproxy.kit.text import truncate
from pdproxy.settings.engines import Role
from pdproxy.settings.errors import quote
from pdproxy.settings.kubernetes import Family, Labels
from pdproxy.wire.kubernetes import Pod

_ROLES: tuple[Role, ...] = get_args(Role)
_ENDED = ("Succeeded", "Failed")
MAX_LABEL = 63
"""Characters of a label's value, as the API has it."""


@dataclass(frozen=True, slots=True)
class PodRules:
    """How pods become engines. `scheme`: of the engines' URLs; `ports`: numbers or names, each is
    an engine; `family`: of their addresses, None: any.
    """

    scheme: str
    ports: Sequence[int | str]
    labels: Labels
    family: Family | None = None


class PodEngines(NamedTuple):
    """The engines of a pod. `wrong`: why it has none although it should, None if nothing is
    wrong.
    """

    engines: tuple[FoundEngine, ...] = ()
    wrong: str | None = None


def engines_of(pod: Pod, rules: PodRules) -> PodEngines:
    """Return the engines of one pod."""
    name = f"pod {pod.metadata.namespace}/{pod.metadata.name}"
    status = pod.status
    if pod.metadata.deletion_timestamp is not None or status.phase in _ENDED:
        return PodEngines()
    addresses = [one.ip for one in status.pod_ips or () if one.ip] or (
        [status.pod_ip] if status.pod_ip else []
    )
    if not addresses:
        return PodEngines()  # it has not begun
    host = next((shown for ip in addresses if (shown := _host(ip, rules.family))), None)
    if host is None:
        return _wrong(f"{name}: {', '.join(addresses)}: no {rules.family or 'IP'} address")
    role = _role(pod, rules.labels)
    no_role = "" if role is not None else truncate(f"{name}: {_why_no_role(pod, rules.labels)}")
    labels, own = pod.metadata.labels or {}, dict[str, str]()
    for key, label in rules.labels.engine.items():
        if (value := labels.get(label)) is not None:
            own[key] = value[:MAX_LABEL]
    own["pod"], own["namespace"] = pod.metadata.name, pod.metadata.namespace
    if pod.spec.node_name:
        own["host"] = pod.spec.node_name
    ready = any(one.type == "Ready" and one.status == "True" for one in status.conditions or ())
    found = []
    for port in rules.ports:
        number = port if isinstance(port, int) else _port(pod, port)
        if number is None:
            return _wrong(f"{name}: none of its containers has a port {port}")
        url = f"{rules.scheme}://{host}:{number}"
        found.append(FoundEngine(url, role, own, ready, pod.metadata.uid, no_role))
    return PodEngines(tuple(found))


def joined(pods: Iterable[PodEngines]) -> tuple[list[FoundEngine], list[str]]:
    """Return the engines of all pods, and a sentence for each pod that is left out.

    Pods on their machine's own network may have one address and port. Only one of them can listen
    there: the one that is ready. If that is not one alone, none is used.
    """
    wrong: list[str] = []
    by_url: dict[str, list[FoundEngine]] = {}
    for pod in pods:
        if pod.wrong is not None:
            wrong.append(pod.wrong)
        for engine in pod.engines:
            by_url.setdefault(engine.url, []).append(engine)
    found = []
    for url, engines in by_url.items():
        able = engines if len(engines) == 1 else [one for one in engines if one.ready]
        if len(able) == 1:
            found.append(able[0])
            continue
        names = " and ".join(
            f"{one.labels['namespace']}/{one.labels['pod']}" for one in engines[:2]
        )
        wrong.append(f"pods {names} have the same address {url}")
    return found, wrong


def _wrong(text: str) -> PodEngines:
    return PodEngines(wrong=truncate(text))


def _role(pod: Pod, names: Labels) -> Role | None:
    labels = pod.metadata.labels or {}
    for value in (labels.get(label, "") for label in names.role):
        role = names.roles.get(value) or next((known for known in _ROLES if known == value), None)
        if role is not None:
            return role
    return None


def _why_no_role(pod: Pod, names: Labels) -> str:
    labels = pod.metadata.labels or {}
    label = next((label for label in names.role if label in labels), names.role[0])
    expected = ", ".join(dict.fromkeys((*_ROLES, *names.roles)))
    if label not in labels:
        return f"has no label {label}: expected one with {expected}"
    return f"label {label} is {quote(labels[label])}: expected {expected}"


def _host(ip: str, family: Family | None) -> str | None:
    """Return an address as a URL has it, None if it is not of the family."""
    address = read_address(ip)
    if address is None or (family is not None and address.version != int(family[-1])):
        return None
    return str(address) if address.version == 4 else f"[{address}]"


def _port(pod: Pod, name: str) -> int | None:
    containers = (*(pod.spec.containers or ()), *(pod.spec.init_containers or ()))
    return next(
        (
            port.container_port
            for container in containers
            for port in container.ports or ()
            if port.name == name
        ),
        None,
    )
