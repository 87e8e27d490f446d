"""vLLM's MooncakeConnectorScheduler and the simulator's `mooncake`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdproxy_lab.sim.facts import KVRole, SimFacts
from pdproxy_lab.sim.mooncake import Mooncake, Receive
from tests.schedulers.compare import SCRIPTS, Comparison
from tests.schedulers.scripts import Params, script, spoiled
from tests.schedulers.simulated import Simulated, stats


class SimulatedMooncake(Simulated):
    """The simulator's side."""

    def made(self, facts: SimFacts) -> Any:
        return Mooncake(facts, self.pool, stats())

    def asked(self, command: Any) -> list[Any]:
        assert isinstance(command, Receive)
        where = [command.transfer_id, command.engine_id, command.bootstrap]
        return ["receive", command.request_id, *where, command.blocks]

    def state(self, now: float) -> dict[str, Any]:
        transfers: dict[str, Any] = self.connector.transfers  # type: ignore[attr-defined]
        return {
            "transfers": {
                name: list(one.blocks) if one.ready else None for name, one in transfers.items()
            }
        }


class Moves(Comparison):
    """vLLM's side."""

    connector = "MooncakeConnector"
    scheduler = (
        "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector:"
        "MooncakeConnectorScheduler"
    )

    def __init__(self, role: KVRole) -> None:
        super().__init__(
            lambda: SimulatedMooncake(SimFacts(connector="mooncake", role="prefill", kv_role=role))
        )
        self.role = role
        self._transfers: dict[str, list[int] | None] = {}

    def begin(self) -> None:
        super().begin()
        self._transfers = {}

    def asked(self, meta: dict[str, Any]) -> list[Any] | None:
        found: list[Any] = []
        for requests in meta["reqs_to_recv"].values():
            for request_id, one in requests.items():
                blocks = one["local_block_ids"][0] if one["local_block_ids"] else []
                where = [
                    str(one["transfer_id"]),
                    str(one["remote_engine_id"]),
                    str(one["remote_bootstrap_addr"]),
                ]
                found.append(["receive", request_id, *where, len(blocks)])
        return found

    def state(self, meta: dict[str, Any], now: float) -> dict[str, Any]:
        """What P's worker is told of transfers: expected, ready with blocks, over."""
        for transfer_id, blocks in meta["reqs_to_send"].values():
            if blocks:
                self._transfers[transfer_id] = blocks[0]
            else:
                self._transfers.setdefault(transfer_id, None)
        for transfer_id in meta["reqs_not_processed"]:
            self._transfers.pop(transfer_id, None)
        return {"transfers": dict(self._transfers)}


def params_of(chance: random.Random) -> Params:
    """Return what requests to P and to D carry."""
    transfer = f"xfer-{chance.getrandbits(32):08x}"
    to_prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    to_decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": f"p{chance.randrange(3)}",
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "transfer_id": transfer,
    }
    return chance.choice(
        [
            None,
            {},
            to_prefill,
            to_prefill,
            spoiled(chance, to_prefill, 1.0),
            to_decode,
            spoiled(chance, to_decode),
            spoiled(chance, to_decode, 1.0),
        ]
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_the_simulator_decides_as_vllm_s_scheduler(role: KVRole) -> None:
    found = Moves(role).run([script(number, params_of) for number in range(SCRIPTS)])
    assert not found, "\n\n".join([f"{len(found)} scripts differ:", *found[:3]])
