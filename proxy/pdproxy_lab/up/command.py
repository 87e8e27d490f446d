"""How an engine is started: flags and environment. Pure.

Owns what a machine without GPUs needs so that several engines fit into it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdproxy_lab.up.arrangement import Plan, PlannedEngine, Role
from pdproxy_lab.up.machine import LOOPBACK, Vllm

SERVER = "vllm.entrypoints.openai.api_server"
_KV_ROLES: Mapping[Role, str] = {
    "prefill": "kv_producer",
    "decode": "kv_consumer",
    "any": "kv_both",
}
_CPU_FLAGS: tuple[str, ...] = (
    *("--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"),
    *("--max-model-len", "2048", "--max-num-seqs", "16", "--block-size", "32"),
    *("--num-gpu-blocks-override", "512"),
)
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
    # The worker then lives in the engine core (`uni`): one process less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One engine's command line, and the variables that it needs beside those of this process."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def command(
    engine: PlannedEngine, plan: Plan, vllm: Vllm, flags: Sequence[str], given: Mapping[str, str]
) -> EngineCommand:
    """Return how one engine is started.

    `flags`: the user's; they come last and override the others. `given`: the environment of this
    process; it overrides what is only a default.
    """
    return EngineCommand(
        (*_arguments(engine, plan, vllm), *flags), _environment(engine, plan, given)
    )


def _arguments(engine: PlannedEngine, plan: Plan, vllm: Vllm) -> Sequence[str]:
    is_cpu = plan.threads is not None
    # On CPUs it is the module that `vllm serve` runs: the console script of some CPU builds looks
    # for a distribution called vllm, and ends when theirs is called otherwise.
    if is_cpu:
        line = [str(vllm.python), "-m", SERVER, "--model", plan.model.source]
    else:
        line = [str(vllm.program), "serve", plan.model.source]
    line += ["--served-model-name", plan.model.name]
    line += ["--host", LOOPBACK, "--port", str(engine.port), "--enable-prompt-tokens-details"]
    if plan.tensor_parallel > 1:
        line += ["--tensor-parallel-size", str(plan.tensor_parallel)]
    if (chunk := plan.chunks.get(engine.role)) is not None:
        line += ["--max-num-batched-tokens", str(chunk)]
    if engine.side_port is not None:
        transfer: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": _KV_ROLES[engine.role],
        }
        if is_cpu:
            transfer["kv_buffer_device"] = "cpu"
        line += ["--kv-transfer-config", json.dumps(transfer)]
    if plan.events_port is not None:
        # It connects to the proxy: where an engine listens for readers of its events, it does so
        # on all addresses, and the events hold prompts' token ids.
        events = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://{LOOPBACK}:{plan.events_port}",
            "replay_endpoint": f"tcp://{LOOPBACK}:{engine.replay_port}",
            "topic": engine.name,
        }
        line += ["--kv-events-config", json.dumps(events)]
    return [*line, *(_CPU_FLAGS if is_cpu else ())]


def _environment(engine: PlannedEngine, plan: Plan, given: Mapping[str, str]) -> Mapping[str, str]:
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if plan.threads is not None:
        defaults |= {**_CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(plan.threads)}
    if plan.model.local:
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    own: dict[str, str] = {}
    if engine.side_port is not None:
        own["VLLM_NIXL_SIDE_CHANNEL_HOST"] = LOOPBACK
        own["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(engine.side_port)
    if plan.vendor is None:
        own["VLLM_HOST_IP"] = LOOPBACK
    else:
        if engine.side_port is not None:
            defaults |= plan.vendor.sharing
        gpus = ",".join(map(str, engine.gpus))
        own |= dict.fromkeys(plan.vendor.masks, gpus)
        own |= plan.vendor.variables
    return {name: value for name, value in defaults.items() if name not in given} | own
