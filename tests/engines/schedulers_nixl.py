"""Runs vLLM's own scheduler class of NIXL (pull) on scripted requests, without an engine. For the
engines' Python.

Reads a JSON list of cases from stdin, and writes what came of each. `test_turn_scheduler.py` has
the cases. The class is made without its constructor, which needs a model: these are the attributes
that vLLM 0.32.0 reads.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.v1.request import RequestStatus

STATUS = {
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "stop": RequestStatus.FINISHED_STOPPED,
    "abort": RequestStatus.FINISHED_ABORTED,
}


def scheduler(case: dict[str, Any]) -> Any:
    """Return a scheduler of an engine without a model."""
    made = object.__new__(NixlPullConnectorScheduler)
    parallel = SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1)
    values = {
        "vllm_config": SimpleNamespace(num_prefill_lookahead_tokens=1, parallel_config=parallel),
        "kv_cache_config": SimpleNamespace(select_transfer_block_ids=lambda blocks: blocks),
        "kv_recompute_threshold": case["threshold"],
        "is_bidirectional_kv_xfer_enabled": case["bidirectional"],
        "decoder_kv_blocks_ttl": 480,
        "engine_id": "engine",
        "side_channel_host": "127.0.0.1",
        "side_channel_port": 1,
        "transfer_tp_size": 1,
    }
    for name, value in values.items():
        setattr(made, name, value)
    for name in ("use_host_buffer", "_has_mamba", "_bounded_replay", "_is_hma_required"):
        setattr(made, name, False)
    made._kv_lease_duration, made._last_heartbeat_time = 30, 0.0
    for name in ("recv", "save", "send"):
        setattr(made, f"_reqs_need_{name}", {})
    made._reqs_in_batch, made._reqs_not_processed = set(), set()
    made._heartbeat_by_engine, made._heartbeat_req_engine = {}, {}
    made._registration_generation = 0
    return made


UNCOMPARED = ("remote_blocks_expiry_time", "remote_registration_generation")
"""A time; and since vLLM 0.33.0 how often the engine has registered its memory again, which only
`/sleep` brings about.
"""


class Blocks:
    """`KVCacheBlocks` of one group: `local` blocks from the prefix cache, then new ones."""

    def __init__(self, local: int, new: int) -> None:
        self.blocks = (
            [
                SimpleNamespace(block_id=at, block_hash=at if at < local else None, is_null=False)
                for at in range(local + new)
            ],
        )

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        return [[one.block_id for one in self.blocks[0] if one.block_hash is None]]


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    """Return what the scheduler wants of another engine, what it asks for, and what it keeps at the
    end.
    """
    made, size = scheduler(case), case["block_size"]
    params = None if case["params"] is None else dict(case["params"])
    one = SimpleNamespace(
        request_id="request",
        kv_transfer_params=params,
        prompt_token_ids=list(range(case["prompt"])),
        num_prompt_tokens=case["prompt"],
        num_computed_tokens=0,
        status=None,
    )
    wants, later = made.get_num_new_matched_tokens(one, case["local"])
    local = case["local"] // size
    new = -(-(case["local"] + wants) // size) - local
    made.update_state_after_alloc(one, Blocks(local, new), wants)
    asked = made._reqs_need_recv.get("request")
    one.num_computed_tokens, one.status = (
        case["prompt"] + case["generated"] - 1,
        STATUS[case["end"]],
    )
    kept, handle = made.request_finished(one, ([*range(-(-one.num_computed_tokens // size))],))
    return {
        "wants": wants,
        "later": later,
        "asks": "nothing" if asked is None else "pull" if asked[3] else "release",
        "blocks": len(asked[1][0]) if asked is not None and asked[1] else 0,
        "kept": kept,
        "params": handle
        and {name: value for name, value in handle.items() if name not in UNCOMPARED},
        "expires": bool(handle and handle["remote_blocks_expiry_time"]),
    }


if __name__ == "__main__":
    json.dump([outcome(case) for case in json.load(sys.stdin)], sys.stdout)
