"""Follow scripts with MoRIIO's scheduler, worker, writer and listener, in the engines' environment.

As `real.py`, with a step more: `report` (kind, transfer, blocks), a message of another engine.
After each step the worker does what an engine's step has it do. What needs `mori` or a GPU is made
up: handshakes have succeeded, writes succeed at once, and events of the GPU are over. The writer's
thread is run by hand. Reads need both, so a D that reads is not run here.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from types import SimpleNamespace
from typing import Any

import real
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import MoRIIOMode
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector import (
    MoRIIOConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_engine import (
    MoRIIOWrapper,
    MoRIIOWriter,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

BLOCKS = 4096


class Event:
    """An event of a GPU that is over."""

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


torch.cuda.Event = Event
torch.cuda.current_stream = lambda: None


class All(dict[str, Any]):
    """Every engine is in it."""

    def __contains__(self, name: object) -> bool:
        return True


class Wrapper(MoRIIOWrapper):
    """What moves KV at once, and sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.notify_port, self.notify_thread = 1, threading.current_thread()

    def send_notify(self, *args: Any, **named: Any) -> None:
        pass

    def write_remote_data(self, *args: Any) -> None:
        return None

    def waiting_for_transfer_complete(self, transfer_statuses: list[Any] | None = None) -> None:
        pass


class Worker(MoRIIOConnectorWorker):
    """A worker without memory, sockets and threads."""

    def __init__(
        self, *, produces: bool, writes: bool, defer_timeout: float, block_size: int
    ) -> None:
        self.is_producer, self.mode = produces, MoRIIOMode.WRITE if writes else MoRIIOMode.READ
        self.moriio_config = SimpleNamespace(defer_timeout=defer_timeout, transfer_timeout=30.0)
        self.moriio_wrapper = Wrapper()
        self.writes: list[list[Any]] = []
        self._writer = MoRIIOWriter(self)
        self._writer._write_worker_started = True
        self.transfer_id_to_request_id: dict[str, str] = {}
        self._pending_unmapped_acks: list[Any] = []
        self._consumer_notification_counts: dict[str, int] = {}
        self._completed_consumer_notifications: set[str] = set()
        self._unmatched_write_completions: set[str] = set()
        self._remote_agents, self.write_ready_flags = All(), All()
        self._ready_requests: queue.Queue[Any] = queue.Queue()
        self._handshake_lock = threading.RLock()
        self.tp_rank, self.world_size = 0, 1
        self.kv_caches = {"layer": torch.zeros((2, BLOCKS, block_size, 1, 1), dtype=torch.float16)}
        self.layer_to_spec = {
            "layer": FullAttentionSpec(
                block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float16
            )
        }
        self.layer_name_to_local_kv_cache_metadata = {"layer": [b""]}
        self._region_session_index = None
        self.kv_layer_mr_offset: dict[str, int] = {}
        self.model_config = SimpleNamespace(get_total_num_kv_heads=lambda: 1)

    def __del__(self) -> None:
        pass

    def _get_built_session(self, remote_engine_id: str) -> tuple[list[Any], Any]:
        return [None], SimpleNamespace(num_blocks=BLOCKS)

    def _compute_block_transfer_offsets(
        self, name: str, local: list[int], remote: list[int], *rest: Any, **more: Any
    ) -> Any:
        found = super()._compute_block_transfer_offsets(name, local, remote, *rest, **more)
        self.writes.append(remote[: len(local)])
        return found

    def write(self) -> list[list[Any]]:
        """Do once what the writer's thread does again and again (`_write_worker_loop`); return what
        was written.
        """
        self.writes = []
        writer = self._writer
        writer._process_deferred_tasks()
        while not writer._write_task_q.empty():
            task = writer._write_task_q.get()
            if writer._is_transfer_terminal(task.transfer_id):
                continue
            if not writer._is_remote_ready(task):
                writer._deferred_tasks.append(task)
                continue
            try:
                writer._execute_write_task(task)
            except Exception:
                writer._mark_request_done(task.transfer_id)
        return self.writes


class Engine(real.Scheduler):
    """A scheduler and its worker."""

    def __init__(self, question: dict[str, Any]) -> None:
        super().__init__(question)
        extra = question["extra"]
        self._worker = Worker(
            produces=question["role"] == "kv_producer",
            writes=not extra["read_mode"],
            defer_timeout=extra["defer_timeout"],
            block_size=self._block_size,
        )
        self._deaf = False

    def report(self, step: dict[str, Any]) -> dict[str, Any]:
        message = {"type": step["kind"], "transfer_id": step["transfer"]}
        if step["kind"] == "remote_blocks":
            message |= {"req_id": "", "block_notify_list": step["blocks"]}
        if not self._deaf:
            try:
                self._worker.moriio_wrapper._handle_structured_message(message)
            except Exception:  # `async_wait_reqid` ends its thread
                self._deaf = True
        return {"meta": self._metadata()}

    def _metadata(self, scheduled: dict[str, int] | None = None) -> dict[str, Any]:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = scheduled or {}
        meta, worker = self._scheduler.build_connector_meta(output), self._worker
        worker.start_load_kv(meta)
        if worker.is_producer:
            worker.wait_for_save(meta)
        writes = worker.write()
        sent, received = worker.get_finished()
        found = KVConnectorOutput(finished_sending=sent or None, finished_recving=received or None)
        self._scheduler.update_connector_output(found)
        return {
            "writes": writes,
            "freed": sorted(found.finished_sending or ()),
            "arrived": sorted(received),
        }


def main() -> None:
    """Answer the question on standard input. What libraries print goes to standard error."""
    question = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    json.dump([Engine(question).follow(script) for script in question["scripts"]], answer)


main()
