"""The pods of proxies.

The Helm chart makes the same pods (configs/chart/templates/deployment.yaml), and a test compares
both.
"""

from __future__ import annotations

import copy
import hashlib
import json

from pdproxy_operator.names import MANAGED_BY, PROXY
from pdproxy_operator.objects import own_labels
from pdproxy_operator.proxy_settings import KEYS, RUN, ProxySettings, port_of, scheme_of
from pdproxy_operator.resources import Object, Proxy
from pdproxy_operator.template import with_template

CONTAINER = "pdproxy"
_USER = 10001
"""That of the image."""
_SETTINGS = "/etc/pdproxy"


def proxy_pod(proxy: Proxy, settings: ProxySettings) -> Object:
    """Return the template of the pods of proxies.

    Raises:
        ConfigError: `template` changes what pdproxy needs.
    """
    name = proxy.metadata.name
    keys = _keys(proxy)
    pod: Object = {
        "metadata": {
            "labels": {**own_labels(proxy), "app.kubernetes.io/name": "pdproxy"},
            "annotations": {"checksum/config": _checksum(settings.content)},
        },
        "spec": {
            "serviceAccountName": name,
            "automountServiceAccountToken": settings.finds_pods,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": settings.grace_seconds,
            "securityContext": {
                "runAsNonRoot": True,
                **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _USER),
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(proxy, keys)],
            "volumes": [
                {"name": "config", "configMap": {"name": name}},
                # The socket of the admin API, and what was found last.
                {"name": "run", "emptyDir": {"sizeLimit": "64Mi"}},
                *(
                    {"name": volume, "secret": {"secretName": secret, "defaultMode": 0o440}}
                    for volume, (secret, _) in keys.items()
                ),
            ],
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {PROXY: name}},
                }
            ],
        },
    }
    of_container = f"spec.containers[{CONTAINER}]"
    needed = {
        **{f"metadata.labels.{label}": "" for label in (MANAGED_BY, PROXY)},
        "spec.serviceAccountName": "",
        "spec.automountServiceAccountToken": "",
        "spec.terminationGracePeriodSeconds": "config.deadlines",
        f"{of_container}.image": "image",
        f"{of_container}.args": "config",
        f"{of_container}.command": "config",
        f"{of_container}.env[PDPROXY_CONFIG]": "config",
        f"{of_container}.env[POD_NAMESPACE]": "",
        f"{of_container}.ports[{port_of(proxy)}]": "config.listen",
        **{f"{of_container}.volumeMounts[{path}]": "" for path in (_SETTINGS, RUN)},
        **{f"{of_container}.volumeMounts[{path}]": "" for _, path in keys.values()},
        **{f"spec.volumes[{volume}]": "" for volume in ("config", "run", *keys)},
    }
    return with_template(pod, proxy.spec.template, needed)


def _container(proxy: Proxy, keys: dict[str, tuple[str, str]]) -> Object:
    def probe(path: str, seconds: int, timeout: int, failures: int) -> Object:
        return {
            "httpGet": {"path": path, "port": "http", "scheme": scheme_of(proxy).upper()},
            "periodSeconds": seconds,
            "timeoutSeconds": timeout,
            "failureThreshold": failures,
        }

    own = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    return {
        "name": CONTAINER,
        "image": proxy.spec.image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["serve"],
        "env": [
            {"name": "PDPROXY_CONFIG", "value": f"{_SETTINGS}/pdproxy.yaml"},
            {"name": "POD_NAMESPACE", **own},
        ],
        "ports": [{"name": "http", "containerPort": port_of(proxy)}],
        # The process runs. With /ready, which is also about engines, all proxies would restart
        # while engines load.
        "startupProbe": probe("/health", 2, 2, 60),
        "livenessProbe": probe("/health", 10, 5, 6),
        # 503 from the beginning of a shutdown: the proxy serves for listen.linger more.
        "readinessProbe": probe("/ready/proxy", 2, 2, 2),
        "resources": proxy.spec.resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "config", "mountPath": _SETTINGS, "readOnly": True},
            {"name": "run", "mountPath": RUN},
            *(
                {"name": volume, "mountPath": path, "readOnly": True}
                for volume, (_, path) in keys.items()
            ),
        ],
    }


def _keys(proxy: Proxy) -> dict[str, tuple[str, str]]:
    """Return the Secret and the folder of each volume with keys."""
    spec = proxy.spec
    kinds = (
        ("client-keys", "clients", spec.client_keys),
        ("admin-keys", "admin", spec.admin_keys),
        ("engine-key", "engines", spec.engine_key),
    )
    return {
        volume: (secret.name, f"{KEYS}/{folder}")
        for volume, folder, secret in kinds
        if secret is not None
    }


def _checksum(content: Object) -> str:
    """Return a hash of all settings but the engines: a proxy takes other engines from the changed
    file at once, and other changes replace the pods.
    """
    fixed = copy.deepcopy(content)
    for pool in fixed["pools"]:
        pool.pop("nodes", None)
    text = json.dumps(fixed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
