"""Follow scripts with the scheduler of an EC connector of vLLM: `python real_ec.py < question >
answer`, in the engines' environment.

The question is JSON: `extra` (`ec_connector_extra_config`), `rows` (of each picture), and
`scripts`: `connector`, `role` and `steps` (tests/schedulers/long_ec.py). The answer is a list per
script, with an object per step. An exception is a death: the script ends there.

The schedulers are called as `vllm/v1/core/sched/scheduler.py` calls them. What workers and other
engines do is made up: memory, sockets, and that each copy has ended when the step has.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"

import torch
from vllm.config.ec_transfer import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.cpu import scheduler as cpu
from vllm.distributed.ec_transfer.ec_connector.cpu import session
from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUWorkerMetadata
from vllm.distributed.ec_transfer.ec_connector.cpu.protocol import XferReq, XferStatus
from vllm.distributed.ec_transfer.ec_connector.mooncake import scheduler as mooncake
from vllm.distributed.ec_transfer.ec_connector.mooncake.metadata import (
    ECMooncakeWorkerMetadata,
)
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.outputs import ECConnectorOutput

ROW, WIDTH = 3072, 1536
OVER = {mooncake.SchedulerTransferState[name] for name in ("CANCELLED", "EXPIRED", "UNAVAILABLE")}
now = [0.0]
time.monotonic = lambda: now[0]
NOTHING_FREED = SimpleNamespace(free_encoder_mm_hashes=[], preempted_req_ids=None)


class Data(dict[str, Any]):
    """What the processor has made of a picture, or what a request says in place of it."""

    def get_data(self) -> dict[str, Any]:
        return {name: one.data for name, one in self.items()}


def config_of(script: dict[str, Any], extra: dict[str, Any]) -> Any:
    transfer = ECTransferConfig(
        ec_connector=script["connector"],
        ec_role=script["role"],
        ec_connector_extra_config=extra,
    )
    return SimpleNamespace(
        ec_transfer_config=transfer,
        model_config=SimpleNamespace(dtype=torch.bfloat16, model="sim"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            distributed_executor_backend="mp",
        ),
    )


class Side:
    """A scheduler, the requests of one script, and what the encoder's cache has."""

    def __init__(self, script: dict[str, Any], extra: dict[str, Any], rows: dict[str, int]) -> None:
        self.rows = rows
        self.scheduler = self.made(config_of(script, extra))
        grids = SimpleNamespace(fields_for=lambda modality: {"image_grid_thw"})
        self.scheduler._metadata_resolver = grids
        self.requests: dict[str, Any] = {}
        self.cached: set[str] = set()
        self.failed: set[str] = set()
        self.asks: list[Any] = []

    def made(self, config: Any) -> Any:
        raise NotImplementedError

    def stepped(self) -> bool:
        """Let a step happen; return whether something was loaded in it."""
        raise NotImplementedError

    def follow(self, script: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Follow one script to its end or to the first death."""
        seen = []
        for step in script:
            now[0] = step["now"]
            try:
                found = getattr(self, step["do"])(step)
                asks, self.asks = sorted(self.asks), []
                seen.append(found | {"asks": asks})
            except Exception as error:
                seen.append({"died": repr(error)})
                break
        return seen

    def new(self, step: dict[str, Any]) -> dict[str, Any]:
        features, offset = [], 0
        for name, raw in step["media"]:
            rows = self.rows[name]
            data = Data(image_grid_thw=SimpleNamespace(data=torch.tensor([1, 2, 2 * rows])))
            if raw:
                data["pixel_values"] = SimpleNamespace(data=torch.zeros(1))
            features.append(
                SimpleNamespace(
                    identifier=name,
                    modality="image",
                    mm_position=PlaceholderRange(offset=offset, length=rows),
                    data=data,
                )
            )
            offset += rows
        self.requests[step["id"]] = SimpleNamespace(
            request_id=step["id"],
            mm_features=features,
            ec_transfer_params=step["params"],
            get_num_encoder_embeds=lambda index: features[index].mm_position.length,
        )
        return {}

    def admit(self, step: dict[str, Any]) -> dict[str, Any]:
        request, scheduler = self.requests.get(step["id"]), self.scheduler
        if request is None:  # it has failed
            return {}
        ready = scheduler.ensure_cache_available(request, step["computed"])
        if self.stepped() or not ready:
            ready = scheduler.ensure_cache_available(request, step["computed"])
            self.stepped()
        self.failed |= scheduler.take_unavailable_requests()
        if step["id"] in self.failed:
            scheduler.request_finished(self.requests.pop(step["id"]))
            return {"failed": True}
        loaded = encoded = 0
        for index, feature in enumerate(request.mm_features if ready else ()):
            position, name = feature.mm_position, feature.identifier
            if position.offset + position.length <= step["computed"] or name in self.cached:
                continue
            if scheduler.has_cache_item(name):
                loaded += 1
            else:
                assert "pixel_values" in feature.data, "nothing to encode"
                encoded += 1
            scheduler.update_state_after_alloc(request, index)
            self.cached.add(name)
        self.stepped()
        return {"ready": ready, "loaded": loaded, "encoded": encoded}

    def finish(self, step: dict[str, Any]) -> dict[str, Any]:
        request = self.requests.pop(step["id"], None)
        if request is None:
            return {}
        _, items = self.scheduler.request_finished(request)
        self.stepped()
        return {"items": items}


class FetchSession:
    """A consumer's session with a producer that answers when the script says so."""

    def __init__(self, **kwargs: Any) -> None:
        self._empty()

    def _empty(self) -> None:
        kinds = ("completed", "tombstoned", "quarantined", "retryable")
        self.results = SimpleNamespace(**{kind: set() for kind in kinds}, settled=[])

    def start_xfer(self, mm_hash: str, indices: list[int], deadline: float) -> None:
        side[0].asks.append(["fetch", mm_hash])
        side[0].fetching.append((self, mm_hash))

    def poll(self, messages: object, at: float) -> None:
        pass

    def take_results(self) -> Any:
        found = self.results
        self._empty()
        return found


class Cpu(Side):
    """ECCPUConnector."""

    def made(self, config: Any) -> Any:
        rows = config.ec_transfer_config.ec_connector_extra_config["ec_cpu_bytes"] // ROW
        region = SimpleNamespace(num_blocks=rows, block_size_bytes=ROW)
        cpu.create_ec_shared_region = lambda config: region
        cpu.get_encoder_output_width = lambda config, modality: WIDTH
        session.ConsumerSession = FetchSession
        self.fetching: list[Any] = []
        self.read: list[bytes] = []

        def setup(scheduler: Any, config: Any) -> None:
            scheduler._compat_hash = "same"
            scheduler._peer_host, scheduler._peer_port = "127.0.0.1", 0
            scheduler._transport = SimpleNamespace(
                connect=lambda where: None, poll=dict, poll_dead=list
            )
            if scheduler._is_producer:
                scheduler._producer_session = session.ProducerSession(
                    transport=SimpleNamespace(poll=lambda timeout_ms: []),
                    data=SimpleNamespace(
                        get_agent_metadata=bytes,
                        get_mem_descriptor=bytes,
                        get_new_notifs=self._notifs,
                    ),
                    cache=scheduler._cache,
                    compat_hash="same",
                )

        cpu.ECCPUScheduler._setup_nixl = setup
        return cpu.ECCPUScheduler(config)

    def _notifs(self) -> dict[str, list[bytes]]:
        read, self.read = self.read, []
        return {"consumer": read}

    def stepped(self) -> bool:
        meta = self.scheduler.build_connector_meta(NOTHING_FREED)
        self.asks += [["save", name] for name in meta.saves]
        done = ECCPUWorkerMetadata(list(meta.saves), [number for number, *_ in meta.loads.values()])
        self.scheduler.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=done))
        return False

    def answer(self, step: dict[str, Any]) -> dict[str, Any]:
        if self.fetching:
            one, name = self.fetching.pop(0)
            getattr(one.results, step["kind"]).add(name)
            self.scheduler._poll_step()
            self.stepped()
        return {}

    def grant(self, step: dict[str, Any]) -> dict[str, Any]:
        name = step["name"]
        asked = XferReq(mm_hash=name, compatibility_hash="same", session_id="s")
        found = self.scheduler._producer_session._grant_or_nack(asked)
        self.read.append(f"s:{name}".encode())
        self.stepped()
        return {"granted": found.status == XferStatus.OK}


class Mooncake(Side):
    """ECMooncakeConnector."""

    def made(self, config: Any) -> Any:
        self.events: list[Any] = []
        self.sent: set[str] = set()
        self.pending: list[Any] = []

        def drain(address: str) -> list[Any]:
            events, self.events = self.events, []
            return events

        inbox = SimpleNamespace(drain=drain, shard_count=1)
        mooncake.ensure_mooncake_available = lambda: None
        mooncake.ControlClient = lambda timeout: None
        mooncake.EventInbox = lambda client, executor: inbox
        mooncake.get_encoder_output_width = lambda config, modality: WIDTH
        mooncake.ECMooncakeScheduler._cancel_remote = lambda *asked: False
        return mooncake.ECMooncakeScheduler(config)

    def stepped(self) -> bool:
        meta = self.scheduler.build_connector_meta(NOTHING_FREED)
        new = [one for one in meta.pushes if one.transfer_id not in self.sent]
        self.sent |= {one.transfer_id for one in new}
        pending, self.pending = [*self.pending, *new], []
        for one in pending:
            if one.mm_hash in self.cached:
                self.asks.append(["push", one.transfer_id, one.mm_hash, one.consumer_zmq])
            elif one.request_id in self.requests:
                self.pending.append(one)
        loaded = {one.mm_hash for one in meta.loads}
        done = ECMooncakeWorkerMetadata(loaded=loaded)
        self.scheduler.update_connector_output(ECConnectorOutput(ec_connector_worker_meta=done))
        return bool(loaded)

    def push(self, step: dict[str, Any]) -> dict[str, Any]:
        """What a consumer's worker reports, unless its id is that of another picture's push."""
        name, transfer_id = step["name"], step["transfer_id"]
        self._drain()
        known = self.scheduler._transfers.get(transfer_id)
        held = known is not None and known.spec is not None and known.state not in OVER
        if not held or known.mm_hash == name:
            rows = self.rows[name]
            event = {"ready": True, "transfer_id": transfer_id, "mm_hash": name}
            self.events.append(
                event | {"nbytes": rows * ROW, "shape": [rows, WIDTH], "dtype": "bfloat16"}
            )
            self._drain()
        return {}

    def _drain(self) -> None:
        self.scheduler._drain_pending = True
        self.scheduler._drain_push_notifications()


SIDES = {"ECCPUConnector": Cpu, "ECMooncakeConnector": Mooncake}
side: list[Any] = [None]


def main() -> None:
    """Answer the question on standard input. What libraries print goes to standard error."""
    question = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    found = []
    for script in question["scripts"]:
        side[0] = SIDES[script["connector"]](script, question["extra"], question["rows"])
        found.append(side[0].follow(script["steps"]))
    json.dump(found, answer)
    answer.flush()
    os._exit(0)  # its threads are idle


if __name__ == "__main__":
    main()
