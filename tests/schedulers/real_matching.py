"""Match finished prompts and registrations with vLLM's NixlPushConnectorWorker, in the engines'
environment.

The question is JSON: scripts of steps (`do`: finished, registered or expired; `id`). The answer has
for each step what was pushed and what waits. What the worker's thread does with its queues is
repeated here from `_push_writer_loop`; all else is the worker's.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec

os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker


class Worker(NixlPushConnectorWorker):
    """A worker without memory and threads."""

    def __init__(self) -> None:
        self._push_finished_blocks: dict[str, Any] = {}
        self._pending_d_registrations: dict[str, Any] = {}
        self.pushes: list[list[Any]] = []

    def __del__(self) -> None:
        pass

    def _do_start_push_kv(
        self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]
    ) -> None:
        self.pushes.append([request_id, local_block_ids[0], registration_data["request_id"]])

    def finished(self, name: str, block: int) -> None:
        matched = self._pop_matching_registration(name)
        if matched is not None:
            self._do_start_push_kv(name, ([block],), matched)
        else:
            self._push_finished_blocks[name] = ([block],)

    def registered(self, name: str, block: int) -> None:
        self._handle_push_reg_notif(
            PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode({"request_id": name})
        )

    def expired(self, name: str, block: int) -> None:
        self._push_finished_blocks.pop(name, None)
        self._pending_d_registrations.pop(name, None)

    def step(self, do: str, name: str, place: int) -> dict[str, Any]:
        self.pushes = []
        getattr(self, do)(name, place + 1)
        waiting = list(self._push_finished_blocks), list(self._pending_d_registrations)
        return {"pushes": self.pushes, "finished": waiting[0], "registered": waiting[1]}


def main() -> None:
    """Answer the question on standard input."""
    answer, sys.stdout = sys.stdout, sys.stderr
    found = []
    for script in json.load(sys.stdin):
        worker = Worker()
        found.append(
            [worker.step(step["do"], step["id"], place) for place, step in enumerate(script)]
        )
    json.dump(found, answer)


main()
