"""Values of the chart that people have: each set is rendered, and judged, by several tests."""

from __future__ import annotations

from typing import Any

_2P2D: list[dict[str, Any]] = [
    {"name": "prefill", "role": "prefill", "replicas": 2},
    {"name": "decode", "role": "decode", "replicas": 2, "args": ["--max-num-seqs=256"]},
]
QWEN = {"model": "Qwen/Qwen3-0.6B"}
IMAGE = {"repository": "registry.example.com/pdproxy", "digest": f"sha256:{'5' * 64}"}
ENGINES: dict[str, Any] = {"engineDefaults": QWEN, "engines": _2P2D}
"""The smallest 2P2D."""
PODS = {"url": "pods://llm-engines:8000/app=vllm", "role": "by_label"}


def _pools(*nodes: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"config": {"pools": [{"nodes": [*nodes]}], **settings}}


SETS: dict[str, dict[str, Any]] = {
    "2p2d": ENGINES,
    "2p2d of simulated engines": {"engines": _2P2D, "engineDefaults": {"simulated": True}},
    "push": {**ENGINES, "engineDefaults": {**QWEN, "connector": "nixl-push"}},
    "mooncake": {**ENGINES, "engineDefaults": {**QWEN, "connector": "mooncake"}},
    "shared storage": {
        **ENGINES,
        "engineDefaults": {
            **QWEN,
            "connector": "shared",
            "kvTransferConfig": {
                "kv_connector": "ExampleConnector",
                "kv_connector_extra_config": {"shared_storage_path": "/kv"},
            },
            "volumes": [{"name": "kv", "persistentVolumeClaim": {"claimName": "kv"}}],
            "volumeMounts": [{"name": "kv", "mountPath": "/kv"}],
        },
    },
    "role any, and a plain engine": {
        "engineDefaults": QWEN,
        "engines": [
            {"name": "any", "role": "any", "replicas": None},
            {"name": "plain", "role": "aggregated"},
        ],
    },
    "two models": {
        "engines": [
            *({**one, **QWEN} for one in _2P2D),
            {"name": "big-p", "role": "prefill", "model": "/models/big", "tensorParallelSize": 4},
            {"name": "big-d", "role": "decode", "model": "/models/big", "tensorParallelSize": 8},
        ],
    },
    "settings of a pool, beside those of its engines": {
        **ENGINES,
        "config": {
            "pools": [
                {
                    "name": "Qwen-Qwen3-0.6B-nixl",
                    "policy": "auto",
                    "profile": "h200-8b",
                    "nodes": [{"url": "http://10.0.0.9:8000", "role": "aggregated"}],
                }
            ]
        },
    },
    "data parallelism": {
        "engineDefaults": {**QWEN, "dataParallelSize": 4, "node": {"labels": {"rack": "r1"}}},
        "engines": _2P2D,
    },
    "engines on RDMA, with much of their own": {
        "engineDefaults": {
            **QWEN,
            "servedModelName": "qwen",
            "args": ["--max-model-len=8192", "--block-size", "64"],
            "env": [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}],
            "envFrom": [{"configMapRef": {"name": "vllm"}}],
            "hfToken": {"existingSecret": "hf"},
            "resources": {"limits": {"rdma/hca": "1"}, "requests": {"memory": "64Gi"}},
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "runtimeClassName": "nvidia",
            "priorityClassName": "engines",
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "podLabels": {"team": "llm"},
            "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
            "livenessProbe": {
                "httpGet": {"path": "/health", "port": "http"},
                "timeoutSeconds": 300,
            },
            "drainSeconds": 120,
            "podDisruptionBudget": None,
            "image": {"digest": f"sha256:{'7' * 64}"},
        },
        "engines": _2P2D,
    },
    "pods that are there, of two namespaces": _pools(
        {"url": "pods://a,b:http/app=vllm,tier in (gold,silver)", "role": "by_label"}
    ),
    "pods of the release's own namespace, over TLS": _pools(
        {"url": "podss:///app=vllm", "role": "by_label"}
    ),
    "pods of all namespaces": _pools({"url": "pods://*:8000/app=vllm", "role": "by_label"}),
    "an InferencePool": _pools({"url": "inferencepool://vllm-qwen", "role": "by_label"}),
    "an InferencePool of another namespace, with a preset": _pools(
        {"url": "inferencepool://llm-d/vllm-qwen", "role": "by_label"},
        kubernetes={"preset": "llm-d"},
    ),
    "engines at addresses": _pools(
        {"url": "http://10.0.0.1:8000", "role": "prefill"},
        {"url": "http://10.0.0.2:8000", "role": "decode"},
    ),
    "names in DNS": _pools({"url": "dns://engines.llm.svc:8000", "role": "aggregated"}),
    "keys of all kinds": {
        **ENGINES,
        "clientKeys": {"existingSecret": "clients"},
        "adminKeys": {"existingSecret": "admins", "key": "list"},
        "engineKey": {"existingSecret": "engines"},
    },
    "TLS": {**ENGINES, "tls": {"existingSecret": "pdproxy-tls"}},
    "behind a gateway": {
        **ENGINES,
        "route": {
            "enabled": True,
            "parentRefs": [{"name": "gateway", "namespace": "gateways"}],
            "hostnames": ["llm.example.com"],
            "annotations": {"owner": "llm"},
        },
        "config": {"listen": {"trusted_proxies": ["10.0.0.0/8"]}},
    },
    "monitoring": {
        **ENGINES,
        "podMonitor": {"enabled": True, "authorization": {"existingSecret": "metrics"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    },
    "monitoring of TLS": {
        **ENGINES,
        "podMonitor": {"enabled": True, "engines": False, "labels": {"release": "prometheus"}},
        "tls": {"existingSecret": "pdproxy-tls"},
    },
    "few who may": {
        **ENGINES,
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"gateway": "yes"}}}],
            "monitoring": [{"namespaceSelector": {"matchLabels": {"monitoring": "yes"}}}],
            "apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]}],
        },
    },
    "many proxies": {
        **ENGINES,
        "image": IMAGE,
        "autoscaling": {"enabled": True},
        "resources": {"requests": {"cpu": "4"}},
        "config": {
            "listen": {"workers": 4},
            "limits": {"max_inflight": 4096, "max_body_bytes": 67108864},
            "deadlines": {"drain": 300},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "proxy"}},
            }
        ],
        "podDisruptionBudget": {"minAvailable": "50%"},
    },
    "nothing but proxies, with much of their own": {
        **_pools(PODS, replicas={"count": 3}, media={"urls": False}),
        "replicas": 3,
        "networkPolicy": {"enabled": False},
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "proxies"},
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "high",
        "terminationGracePeriodSeconds": 400,
        "env": [{"name": "PDPROXY_LISTEN__WORKERS", "value": "2"}],
        "envFrom": [{"secretRef": {"name": "more"}}],
        "volumes": [{"name": "tokenizers", "emptyDir": {}}],
        "volumeMounts": [{"name": "tokenizers", "mountPath": "/tokenizers"}],
        "podLabels": {"team": "llm"},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"a": "b"}},
        "podDisruptionBudget": None,
    },
}
