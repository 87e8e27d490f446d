"""How an engine of the demo is started: flags and environment. Pure.

Owns what a machine without GPUs needs so that several engines fit into it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdproxy_lab.demo.figures import ShownEngine

LOOPBACK = "127.0.0.1"
SERVER = "vllm.entrypoints.openai.api_server"
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_CPU_FLAGS: tuple[str, ...] = (
    *("--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"),
    *(
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        "16",
        "--block-size",
        "32",
        "--num-gpu-blocks-override",
        "512",
    ),
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
class Model:
    """The served model: `source` is a name or a folder, `name` is its name for clients."""

    source: str
    name: str
    local: bool = False
    """Whether it is on this machine, so that nothing is downloaded."""


def arguments(
    python: Path, model: Model, place: ShownEngine, port: int, *, cpu: bool, more: Sequence[str]
) -> list[str]:
    """Return the command that starts one engine; `more` are the user's flags; they come last and
    override the others.

    It is the module that `vllm serve` runs: the console script of some CPU builds looks for a
    distribution called vllm, and ends when theirs is called otherwise.
    """
    transfer: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[place.role]}
    if cpu:
        transfer["kv_buffer_device"] = "cpu"
    command = [
        str(python),
        "-m",
        SERVER,
        "--model",
        model.source,
        "--served-model-name",
        model.name,
    ]
    command += ["--host", LOOPBACK, "--port", str(port), "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    return [*command, *(_CPU_FLAGS if cpu else ()), *more]


def environment(
    given: Mapping[str, str], model: Model, side_port: int, *, gpu: str | None, threads: int
) -> dict[str, str]:
    """Return an engine's environment: a CPU's defaults, overridden by the user's, overridden by
    what the demo needs.

    `gpu` None: there is none, and the engine may use so many `threads`.
    """
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if gpu is None:
        defaults |= {**_CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    if model.local:
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    ours = {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    if gpu is None:
        ours["VLLM_HOST_IP"] = LOOPBACK
    else:
        ours["CUDA_VISIBLE_DEVICES"] = gpu
    return {**defaults, **given, **ours}
