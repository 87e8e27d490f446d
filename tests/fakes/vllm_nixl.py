"""As much of vLLM as the notifier touches: connectors whose decisions a test makes, and workers
whose transfers it ends.

The order of things is vLLM 0.32.0's: what a hook changes before or after it is called matters to
the notifier.
"""

from __future__ import annotations

import logging
import types
from dataclasses import dataclass, field
from typing import Any

FOLDER = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass
class Stats:
    """`vllm.v1.metrics.stats.PrefillStats`."""

    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


@dataclass
class Status:
    name: str


@dataclass
class Request:
    """`vllm.v1.request.Request`, in the scheduler's process."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = field(default_factory=lambda: [5, 6, 7])
    prefill_stats: Stats | None = field(default_factory=Stats)
    status: Status = field(default_factory=lambda: Status("FINISHED_LENGTH_CAPPED"))


@dataclass
class Results:
    """`KVConnectorTransferResults`."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class Output:
    """`KVConnectorOutput`, of all workers."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] = field(default_factory=set)
    kv_connector_worker_meta: Any = None


class WorkerMetadata:
    """`KVConnectorWorkerMetadata`."""


class NixlWorker:
    """A worker's transfers, by request: handles under way. A test says which end how, and whose
    lease runs out.
    """

    def __init__(self) -> None:
        self._recving_transfers: dict[str, list[int]] = {}
        self.xfer_stats = types.SimpleNamespace(
            data={"bytes_transferred": [], "transfer_duration": []}
        )
        # bytes and seconds, or None for a failure
        self.ends: dict[int, tuple[int, float] | None] = {}
        self.failed: set[str] = set()
        self.heard: set[str] = set()
        self.lapsed: set[str] = set()

    def _reap_expired_send_leases(self, done: set[str]) -> None:
        done |= self.lapsed
        self.lapsed = set()

    def get_transfer_results(self) -> Results:
        """One step's poll."""
        results = Results()
        for request, handles in list(self._recving_transfers.items()):
            for handle in [one for one in handles if one in self.ends]:
                handles.remove(handle)
                if (end := self.ends[handle]) is None:
                    self.failed.add(request)
                else:
                    self.xfer_stats.data["bytes_transferred"].append(end[0])
                    self.xfer_stats.data["transfer_duration"].append(end[1])
            if not handles:
                del self._recving_transfers[request]
                results.finished_recving.add(request)
        results.failed_recving = self.failed & results.finished_recving
        results.finished_sending, self.heard = self.heard, set()
        self._reap_expired_send_leases(results.finished_sending)
        return results


class Connector:
    """`NixlBaseConnector`. `decision` is what it returns for a finished request."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.connector_scheduler = object() if role == "scheduler" else None
        self.connector_worker = NixlWorker() if role == "worker" else None
        self.decision: tuple[bool, dict[str, Any] | None] = (False, None)
        self.meta: Any = None
        self.calls: list[str] = []

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """It marks the params as used."""
        self.calls.append("update_state_after_alloc")
        if request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"):
            request.kv_transfer_params["do_remote_prefill"] = False

    def request_finished_all_groups(
        self, request: Request, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Not by way of the other one, as in vLLM."""
        self.calls.append("request_finished_all_groups")
        return self.decision

    def request_finished(
        self, request: Request, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append("request_finished")
        return self.decision

    def update_connector_output(self, connector_output: Output) -> None:
        self.calls.append("update_connector_output")

    def get_transfer_results(self, finished_req_ids: set[str]) -> Results:
        assert self.connector_worker is not None
        return self.connector_worker.get_transfer_results()

    def build_connector_worker_meta(self) -> Any:
        return self.meta

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class NixlPullConnector(Connector):
    pass


class NixlPushConnector(Connector):
    pass


def modules() -> dict[str, types.ModuleType]:
    """What `sys.modules` needs for the notifier's imports."""
    names = ["vllm", "vllm.logger"]
    parts = f"{FOLDER}.nixl.connector".split(".")
    names += [".".join(parts[:depth]) for depth in range(2, len(parts) + 1)] + [f"{FOLDER}.base"]
    made = {name: types.ModuleType(name) for name in names}
    made["vllm.logger"].init_logger = logging.getLogger  # type: ignore[attr-defined]
    made[f"{FOLDER}.base"].KVConnectorWorkerMetadata = WorkerMetadata  # type: ignore[attr-defined]
    nixl: Any = made[f"{FOLDER}.nixl.connector"]
    nixl.NixlPullConnector, nixl.NixlPushConnector = NixlPullConnector, NixlPushConnector
    return made


def config(extra: dict[str, Any], engine_id: str = "engine") -> Any:
    """A `VllmConfig` with a `KVTransferConfig`."""
    return types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(
            engine_id=engine_id, get_from_extra_config=lambda key, default: extra.get(key, default)
        )
    )
