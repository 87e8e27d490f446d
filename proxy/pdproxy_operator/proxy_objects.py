"""The objects of a PDProxy: the proxies with their settings and rights, and how others reach
them.

The Helm chart makes the same objects, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml

from pdproxy_operator.names import MODEL, PROXY, REVISION, ROLE, RUNTIME, all_name, replicas_name
from pdproxy_operator.objects import owned
from pdproxy_operator.pools import Pool
from pdproxy_operator.proxy_pod import proxy_pod
from pdproxy_operator.proxy_settings import ProxySettings, port_of, proxy_settings, scheme_of
from pdproxy_operator.resources import Object, Proxy

_RBAC = "rbac.authorization.k8s.io"
_SCRAPE_INTERVAL = "15s"


def proxy_objects(proxy: Proxy, pools: Sequence[Pool], key_hash: str | None) -> list[Object]:
    """Return the objects of a PDProxy. `pools`: of all runtimes that it selects. `key_hash`: of the
    key by which the operator reads the proxies' metrics, None: it has none.

    Raises:
        ConfigError: the proxies would refuse these settings, or the PDProxy asks for what can't be.
    """
    settings = proxy_settings(proxy, pools, key_hash)
    return [
        *_settings_and_rights(proxy, settings),
        _deployment(proxy, settings),
        *_services(proxy),
        owned(
            proxy,
            "PodDisruptionBudget",
            proxy.metadata.name,
            spec={"maxUnavailable": 1, "selector": {"matchLabels": _selector(proxy)}},
        ),
        _network_policy(proxy, settings),
        *_route(proxy),
        *_monitors(proxy, pools),
    ]


def _selector(proxy: Proxy) -> dict[str, str]:
    return {PROXY: proxy.metadata.name}


def _settings_and_rights(proxy: Proxy, settings: ProxySettings) -> Iterator[Object]:
    name = proxy.metadata.name
    text = yaml.safe_dump(settings.content, allow_unicode=True)
    yield owned(proxy, "ConfigMap", name, data={"pdproxy.yaml": text})
    yield owned(proxy, "ServiceAccount", name, automountServiceAccountToken=False)
    if settings.finds_pods:
        rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
        yield owned(proxy, "Role", name, rules=rules)
        account = {
            "kind": "ServiceAccount",
            "name": name,
            "namespace": proxy.metadata.namespace,
        }
        yield owned(
            proxy,
            "RoleBinding",
            name,
            roleRef={"apiGroup": _RBAC, "kind": "Role", "name": name},
            subjects=[account],
        )


def _deployment(proxy: Proxy, settings: ProxySettings) -> Object:
    return owned(
        proxy,
        "Deployment",
        proxy.metadata.name,
        spec={
            "replicas": proxy.spec.replicas,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "selector": {"matchLabels": _selector(proxy)},
            "template": proxy_pod(proxy, settings),
        },
    )


def _services(proxy: Proxy) -> Iterator[Object]:
    name = proxy.metadata.name

    def service(name: str, port: int, **more: object) -> Object:
        ports = [{"name": "http", "port": port, "targetPort": "http", "protocol": "TCP"}]
        spec = {"selector": _selector(proxy), "ports": ports, **more}
        return owned(proxy, "Service", name, spec=spec)

    yield service(name, proxy.spec.service.port, type=proxy.spec.service.type)
    # An address for each proxy that is ready: replicas.name of the settings.
    yield service(replicas_name(name), port_of(proxy), clusterIP="None")
    # An address for each proxy, ready or not: one that is ending still has requests at engines,
    # which their preStop hooks ask for.
    yield service(all_name(name), port_of(proxy), clusterIP="None", publishNotReadyAddresses=True)


def _network_policy(proxy: Proxy, settings: ProxySettings) -> Object:
    spec: Object = {
        "podSelector": {"matchLabels": _selector(proxy)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": "http", "protocol": "TCP"}]}],
    }
    if not settings.has_engines_elsewhere:
        spec["policyTypes"] = ["Ingress", "Egress"]
        spec["egress"] = [
            # Names.
            {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]},
            # The API server is no pod.
            {"ports": [{"port": port, "protocol": "TCP"} for port in (443, 6443)]},
            {"to": [{"podSelector": {}}]},
        ]
    return owned(proxy, "NetworkPolicy", proxy.metadata.name, spec=spec)


def _route(proxy: Proxy) -> Iterator[Object]:
    route, name = proxy.spec.route, proxy.metadata.name
    if route is None:
        return
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        # None: the proxy has deadlines for each wait, and tries again what has sent nothing yet.
        "timeouts": {"request": "0s", "backendRequest": "0s"},
        "backendRefs": [{"name": name, "port": proxy.spec.service.port}],
    }
    spec: Object = {"parentRefs": route.parent_refs, "rules": [rule]}
    if route.hostnames:
        spec["hostnames"] = route.hostnames
    yield owned(proxy, "HTTPRoute", name, spec=spec)


def _monitors(proxy: Proxy, pools: Sequence[Pool]) -> Iterator[Object]:
    monitor, name = proxy.spec.monitor, proxy.metadata.name
    if monitor is None:
        return

    def endpoint(job: str) -> Object:
        # Rules and dashboards look for this job.
        relabelings = [{"targetLabel": "job", "replacement": job}]
        return {
            "port": "http",
            "path": "/metrics",
            "interval": _SCRAPE_INTERVAL,
            "relabelings": relabelings,
        }

    of_proxies = endpoint("pdproxy")
    if scheme_of(proxy) == "https":
        # The certificate has the name that clients use, not the pods' addresses.
        of_proxies |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    if monitor.authorization is not None:
        of_proxies["authorization"] = {
            "credentials": {"name": monitor.authorization.name, "key": monitor.authorization.key}
        }
    spec: Object = {
        "selector": {"matchLabels": _selector(proxy)},
        "podMetricsEndpoints": [of_proxies],
    }
    yield owned(proxy, "PodMonitor", name, monitor.labels, spec=spec)
    runtimes = sorted(one.metadata.name for pool in pools for one in pool.runtimes)
    if runtimes:
        chosen = {"key": RUNTIME, "operator": "In", "values": runtimes}
        spec = {
            "selector": {"matchExpressions": [chosen]},
            "podTargetLabels": [ROLE, MODEL, REVISION],
            "podMetricsEndpoints": [endpoint("vllm")],
        }
        yield owned(proxy, "PodMonitor", f"{name}-engines", monitor.labels, spec=spec)
