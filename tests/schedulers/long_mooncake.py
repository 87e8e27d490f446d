"""vLLM's MooncakeConnectorScheduler and the simulator's `mooncake`."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest

from pdproxy.sim.facts import Facts
from pdproxy.sim.mooncake import Mooncake, Receive
from tests.schedulers.compare import SCRIPTS, Comparison
from tests.schedulers.scripts import Params, script, spoiled
from tests.schedulers.simulated import Simulated, stats

Role = Literal["kv_producer", "kv_consumer", "kv_both"]


class SimulatedMooncake(Simulated):
    """The simulator's side."""

    def made(self, facts: Facts) -> Any:
        return Mooncake(facts, self.pool, stats())

    def asked(self, command: Any) -> list[Any]:
        assert isinstance(command, Receive)
        where = [command.engine_id, command.bootstrap, command.transfer_id]
        return ["receive", command.request_id, *where, command.blocks]

    def state(self, now: float) -> dict[str, Any]:
        connector: Any = self.connector
        return {"transfers": {name: one.blocks for name, one in sorted(connector.transfers.items())}}


class Transfers(Comparison):
    """vLLM's side. What its worker makes of the metadata is `record_send_reqs`."""

    connector = "MooncakeConnector"
    scheduler = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector:MooncakeConnectorScheduler"

    def __init__(self, role: Role) -> None:
        self.role = role
        super().__init__(lambda: SimulatedMooncake(Facts(connector="mooncake", kv_role=role)))
        self.transfers: dict[str, list[int]] = {}

    def asked(self, meta: dict[str, Any]) -> list[Any] | None:
        found = []
        for engine_id, requests in meta["reqs_to_recv"].items():
            for request_id, one in requests.items():
                blocks = one["local_block_ids"][0] if one["local_block_ids"] else []
                where = [str(engine_id), str(one["remote_bootstrap_addr"]), str(one["transfer_id"])]
                found.append(["receive", request_id, *where, len(blocks)])
        return found

    def state(self, meta: dict[str, Any], now: float) -> dict[str, Any]:
        for transfer_id, blocks in meta["reqs_to_send"].values():
            if blocks:
                self.transfers[str(transfer_id)] = blocks[0]
            else:
                self.transfers.setdefault(str(transfer_id), [])
        for transfer_id in meta["reqs_not_processed"]:
            self.transfers.pop(str(transfer_id), None)
        return {"transfers": dict(sorted(self.transfers.items()))}

    def run(self, scripts: Any) -> list[str]:
        """Follow scripts one by one: what the worker knows begins anew with each."""
        found = []
        real = self._real(scripts)
        for one, answers in zip(scripts, real, strict=True):
            self.transfers = {}
            self._real = lambda _, answers=answers: [answers]  # type: ignore[method-assign, misc]
            found += super().run([one])
        return found


def params_of(chance: random.Random) -> Params:
    """Return what requests to P and to D carry, each transfer under an id of its own."""
    transfer_id = f"xfer-{chance.getrandbits(64):016x}"
    to_decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": f"p{chance.randrange(3)}",
        "transfer_id": transfer_id,
    }
    to_prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return chance.choice(
        [
            None,
            {},
            {"do_remote_decode": False, "do_remote_prefill": False, "transfer_id": transfer_id},
            to_prefill,
            spoiled(chance, to_prefill),
            to_decode,
            spoiled(chance, to_decode),
            spoiled(chance, to_decode, 0.9),
        ]
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_the_simulator_decides_as_vllm_s_scheduler(role: Role) -> None:
    found = Transfers(role).run([script(number, params_of) for number in range(SCRIPTS)])
    assert not found, "\n\n".join([f"{len(found)} scripts differ:", *found[:3]])
