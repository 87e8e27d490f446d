"""Follow scripts with a connector scheduler of vLLM: `python real.py < question > answer`, in the
engines' environment.

The question is JSON: `scheduler` ("module:class"), `connector`, `role` and `extra` (kv_connector,
kv_role and kv_connector_extra_config), `tensor_parallel_size`, `block_size`, `silent` (methods that
would send: their calls become part of the metadata), and `scripts`, lists of steps
(tests/schedulers/scripts.py).
The answer is a list per script, with an object per step: what the scheduler returned, and its
metadata for the workers as plain values. An exception is a death: the script ends there.

The scheduler is called as `vllm/v1/core/sched/scheduler.py` calls it. Only the configuration is
made up.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

HOST, PORT = "127.0.0.1", 5600
os.environ |= {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(PORT),
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}

# MoRIIO's modules import it for their sockets, which are not opened here; the engines' environment
# does not have it.
sys.modules.setdefault("msgpack", ModuleType("msgpack"))

import torch  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheBlocks  # noqa: E402
from vllm.v1.core.kv_cache_utils import KVCacheBlock  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

STATUS = {
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "stop": RequestStatus.FINISHED_STOPPED,
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
}
now = [0.0]
time.perf_counter = time.monotonic = lambda: now[0]  # the clocks of the schedulers


def plain(value: Any) -> Any:
    """Return a value that JSON can hold; a request is its id."""
    if isinstance(value, Request):
        return value.request_id
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(one) for one in value)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


class Scheduler:
    """A connector scheduler, and the requests of one script."""

    def __init__(self, question: dict[str, Any]) -> None:
        module, _, name = question["scheduler"].partition(":")
        self._block_size = question["block_size"]
        spec = FullAttentionSpec(
            block_size=self._block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        transfer = KVTransferConfig(
            kv_connector=question["connector"],
            kv_role=question["role"],
            engine_id="engine",
            kv_connector_extra_config=question["extra"],
        )
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=question["tensor_parallel_size"],
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                data_parallel_rank=0,
                data_parallel_index=0,
                data_parallel_size_local=1,
                local_engines_only=False,
            ),
            cache_config=SimpleNamespace(block_size=self._block_size),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            kv_transfer_config=transfer,
            num_prefill_lookahead_tokens=0,
            num_lookahead_tokens=0,
            speculative_config=None,
            num_speculative_tokens=0,
        )
        cache = KVCacheConfig(
            num_blocks=4096,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self._scheduler = getattr(importlib.import_module(module), name)(config, "engine", cache)
        self._calls: list[Any] = []
        for method in question["silent"]:
            setattr(self._scheduler, method, self._recorder(method))
        self._requests: dict[str, Request] = {}
        self._blocks: dict[str, list[KVCacheBlock]] = {}

    def _recorder(self, method: str) -> Any:
        def record(*args: Any, **named: Any) -> None:
            self._calls.append([method, *args, named])

        return record

    def follow(self, script: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Follow one script to its end or to the first death."""
        seen = []
        for step in script:
            now[0] = step["now"]
            try:
                seen.append(getattr(self, step["do"])(step))
            except Exception as error:
                seen.append({"died": repr(error)})
                break
        return seen

    def new(self, step: dict[str, Any]) -> dict[str, Any]:
        extra = {"kv_transfer_params": step["params"]} if step["params"] is not None else None
        sampling = SamplingParams(max_tokens=64, extra_args=extra)
        request = Request(step["id"], list(range(step["prompt"])), sampling, None)
        self._requests[request.request_id] = request
        if hasattr(self._scheduler, "on_new_request"):
            self._scheduler.on_new_request(request)
        return {}

    def schedule(self, step: dict[str, Any]) -> dict[str, Any]:
        request = self._requests[step["id"]]
        matched, later = self._scheduler.get_num_new_matched_tokens(request, step["computed"])
        tokens = step["computed"] + matched if later else request.num_prompt_tokens
        count = -(-tokens // self._block_size)
        blocks = [KVCacheBlock(block_id) for block_id in step["blocks"][:count]]
        for block in blocks[: step["computed"] // self._block_size]:
            block._block_hash = b"hash"
        self._blocks[request.request_id] = blocks
        self._scheduler.update_state_after_alloc(request, KVCacheBlocks((blocks,)), matched)
        scheduled = 0 if later else request.num_prompt_tokens - step["computed"] - matched
        request.num_computed_tokens = step["computed"] + matched
        return {
            "matched": [matched, later],
            "meta": self._metadata({request.request_id: scheduled}),
        }

    def received(self, step: dict[str, Any]) -> dict[str, Any]:
        """Its KV is here: the request runs, in blocks that it has."""
        request = self._requests[step["id"]]
        if hasattr(self._scheduler, "update_connector_output"):
            self._scheduler.update_connector_output(
                KVConnectorOutput(finished_recving={request.request_id})
            )
        self._scheduler.update_state_after_alloc(
            request, KVCacheBlocks((self._blocks[request.request_id],)), 0
        )
        return {"meta": self._metadata()}

    def finish(self, step: dict[str, Any]) -> dict[str, Any]:
        request = self._requests.pop(step["id"])
        request.status, request.num_computed_tokens = STATUS[step["reason"]], step["computed"]
        blocks = [block.block_id for block in self._blocks.get(request.request_id, ())]
        computed = blocks[: -(-step["computed"] // self._block_size)]
        kept, handle = self._scheduler.request_finished(request, (computed,))
        if handle:
            # Since vLLM 0.33.0: how often the engine has registered its memory again, which only
            # `/sleep` brings about.
            handle.pop("remote_registration_generation", None)
        return {"kept": kept, "handle": plain(handle), "meta": self._metadata()}

    def wait(self, step: dict[str, Any]) -> dict[str, Any]:
        return {"meta": self._metadata()}

    def _metadata(self, scheduled: dict[str, int] | None = None) -> dict[str, Any]:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = scheduled or {}
        found: dict[str, Any] = plain(vars(self._scheduler.build_connector_meta(output)))
        calls, self._calls = plain(self._calls), []
        return found | {"calls": calls, "deferred": self._deferred()}

    def _deferred(self) -> dict[str, float]:
        """MoRIIO: return how long blocks are kept for a transfer: seconds that are left of it. What
        is over is freed.
        """
        kept: dict[str, tuple[float, str]] | None = getattr(
            self._scheduler, "_deferred_send_deadlines", None
        )
        if kept is None:
            return {}
        self._scheduler.update_connector_output(KVConnectorOutput())
        return {transfer_id: until - now[0] for until, transfer_id in kept.values()}


def main() -> None:
    """Answer the question on standard input. What libraries print goes to standard error."""
    question = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    json.dump([Scheduler(question).follow(script) for script in question["scripts"]], answer)


if __name__ == "__main__":
    main()
