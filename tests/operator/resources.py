"""Resources as the API server gives them, with the defaults of their definitions."""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy_operator.resources import Proxy, Runtime
from tests.operator.filled import filled, schema_of

IMAGE = "vllm/vllm-openai:v0.32.0"


def runtime(name: str, role: str, **more: Any) -> Runtime:
    """A PDRuntime. `more`: of its spec, spelled as there, and `own_labels`: of its metadata."""
    labels = more.pop("own_labels", {"model": "qwen"})
    spec = {
        "role": role,
        "model": {"name": "Qwen/Qwen3-0.6B"},
        "image": IMAGE,
        **more,
    }
    metadata = {"name": name, "namespace": "llm", "uid": f"uid-of-{name}", "labels": labels}
    thing = {"metadata": metadata, "spec": spec}
    return msgspec.convert(filled(thing, schema_of("pdruntimes")), Runtime)


def proxy(name: str = "pdproxy", **more: Any) -> Proxy:
    """A PDProxy of all runtimes with the label model=qwen. `more`: of its spec."""
    spec = {
        "runtimeSelector": {"matchLabels": {"model": "qwen"}},
        "image": "pdproxy:0.1.0",
        **more,
    }
    metadata = {"name": name, "namespace": "llm", "uid": f"uid-of-{name}", "labels": {}}
    thing = {"metadata": metadata, "spec": spec}
    return msgspec.convert(filled(thing, schema_of("pdproxies")), Proxy)
