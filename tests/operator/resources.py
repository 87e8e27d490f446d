"""Resources as the API server gives them, with the defaults of their definitions."""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy_operator.resources import Proxy, Runtime

IMAGE = "vllm/vllm-openai:v0.32.0"
ARGS_WITHOUT_KV = ["--max-num-seqs", "--max-model-len", "--gpu-memory-utilization"]


def runtime(name: str, role: str, **more: Any) -> Runtime:
    """A PDRuntime. `more`: of its spec, spelled as there, and `own_labels`: of its metadata."""
    labels = more.pop("own_labels", {"model": "qwen"})
    spec = {
        "role": role,
        "model": {"name": "Qwen/Qwen3-0.6B"},
        "image": IMAGE,
        "replicas": 1,
        "connector": "nixl",
        "servesWhole": False,
        "simulated": False,
        "tensorParallelSize": 1,
        "dataParallelSize": 1,
        "groupSize": 1,
        "sideChannelPort": 5600,
        "startSeconds": 1800,
        "terminationGracePeriodSeconds": 370,
        "drain": {"seconds": 310},
        "args": [],
        "env": [],
        "argsWithoutKv": ARGS_WITHOUT_KV,
        "gpuResource": "nvidia.com/gpu",
        "kvTransferConfig": {},
        "resources": {},
        "labels": {},
        "template": {},
        **more,
    }
    metadata = {"name": name, "namespace": "llm", "uid": f"uid-of-{name}", "labels": labels}
    return msgspec.convert({"metadata": metadata, "spec": spec}, Runtime)


def proxy(name: str = "pdproxy", **more: Any) -> Proxy:
    """A PDProxy of all runtimes with the label model=qwen. `more`: of its spec."""
    spec = {
        "runtimeSelector": {"matchLabels": {"model": "qwen"}},
        "image": "pdproxy:0.1.0",
        "replicas": 2,
        "config": {},
        "service": {"type": "ClusterIP", "port": 80},
        "rollout": {"order": "pairs"},
        "resources": {
            "requests": {"cpu": "1", "memory": "512Mi"},
            "limits": {"memory": "2Gi"},
        },
        "template": {},
        **more,
    }
    metadata = {"name": name, "namespace": "llm", "uid": f"uid-of-{name}", "labels": {}}
    return msgspec.convert({"metadata": metadata, "spec": spec}, Proxy)
