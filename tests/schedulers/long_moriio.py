"""vLLM's MoRIIOConnectorScheduler and the simulator's `moriio`, READ and WRITE, P and D."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from pdproxy.sim.active import ActiveRequest
from pdproxy.sim.facts import Facts
from pdproxy.sim.moriio import Moriio, Place, Read, Report
from tests.schedulers.compare import SCRIPTS, Comparison
from tests.schedulers.scripts import Params, script, spoiled
from tests.schedulers.simulated import Simulated

ADDRESSES = ("remote_engine_id", "remote_host", "remote_handshake_port", "remote_notify_port")
"""What an answer says of the engine's own place."""


class SimulatedMoriio(Simulated):
    """The simulator's side."""

    connector: Any

    def made(self, facts: Facts) -> Any:
        made = Moriio(facts, self.pool)
        made.address = Place("10.0.0.9", 1)
        self._written: set[str] = set()
        return made

    def unblock(self, one: ActiveRequest) -> None:
        self.connector.was_read(one.request.id, ())

    def asked(self, command: Any) -> list[Any]:
        match command:
            case Read():
                one = self._requests[command.request_id]
                pairs = [list(pair) for pair in zip(one.blocks, command.blocks, strict=False)]
                where = [command.place.host, command.place.port]
                return ["read", command.request_id, command.transfer_id, *where, pairs]
            case Report(kind="release"):
                return ["release", command.transfer_id, command.place.host, command.place.port]
            case Report():
                where = [command.place.host, command.place.port]
                return ["blocks", command.transfer_id, *where, list(command.blocks)]
        raise AssertionError(command)

    def finish(self, step: dict[str, Any]) -> dict[str, Any]:
        found = super().finish(step)
        if found["handle"] is not None:
            found["handle"] = {key: value for key, value in found["handle"].items() if key not in ADDRESSES}
        return found

    def state(self, now: float) -> dict[str, Any]:
        new = {name: list(blocks) for name, blocks in self.connector._to_write.items() if name not in self._written}
        self._written |= new.keys()
        return {"saves": new}


class Moves(Comparison):
    """vLLM's side."""

    connector = "MoRIIOConnector"
    scheduler = "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector:MoRIIOConnectorScheduler"
    silent = ("send_notify_block", "_send_transfer_release")

    def __init__(self, role: str, mode: str) -> None:
        facts = Facts(connector="moriio", role="decode" if role == "kv_consumer" else "prefill", transfer_mode=mode)  # type: ignore[arg-type]
        super().__init__(lambda: SimulatedMoriio(facts))
        self.role = role
        ports = {"proxy_port": "1", "proxy_ping_port": "2", "http_port": "3", "handshake_port": "4", "notify_port": "5"}
        self.extra = {"proxy_ip": "127.0.0.1", **ports, "read_mode": mode == "READ"}  # type: ignore[misc]

    def asked(self, meta: dict[str, Any]) -> list[Any] | None:
        found: list[Any] = []
        for request_id, one in meta["reqs_to_recv"].items():
            where = [one["remote_host"], one["remote_notify_port"]]
            blocks = one["local_block_ids"][0]
            if not blocks:
                found.append(["release", one["transfer_id"], *where])
                continue
            pairs = [list(pair) for pair in zip(blocks, one["remote_block_ids"][0], strict=False)]
            found.append(["read", request_id, one["transfer_id"], *where, pairs])
        for name, *args, named in meta["calls"]:
            if name == "send_notify_block":
                where = [named["host"], named["port"]]
                found.append(["blocks", named["transfer_id"], *where, named["block_notify_list"]])
            else:
                found.append(["release", *args])
        return found

    def state(self, meta: dict[str, Any], now: float) -> dict[str, Any]:
        return {"saves": {one["transfer_id"]: one["local_block_ids"][0] for one in meta["reqs_to_save"].values()}}

    def _read(self, step: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
        found = super()._read(step, seen)
        if found.get("handle"):
            found["handle"] = {key: value for key, value in found["handle"].items() if key not in ADDRESSES}
        return found


def name_of(chance: random.Random) -> str:
    """Return what a proxy puts into a request's id, and sometimes nothing."""
    digits = f"{chance.getrandbits(128):032x}"
    where = [f"host:10.0.0.{n},handshake:630{n},notify:6100{n}" for n in (1, 2)]
    named = f"-___prefill_addr_{where[0]}___decode_addr_{where[1]}_{digits}"
    return chance.choice([named, named, named, ""])


def named(params: Params) -> Params:
    """Return parameters without a `transfer_id` of None, for which vLLM makes one up and then does not use it everywhere."""
    return {k: v for k, v in params.items() if k != "transfer_id" or v is not None} if params else params


def params_of(chance: random.Random, role: str) -> Params:
    """Return what requests to P or to D carry."""
    transfer = f"tx-{chance.getrandbits(32):08x}"
    to_prefill = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_dp_size": 1,
        "remote_tp_size": 1,
    }
    count = chance.choice([1, 4, 7, 19, 20])
    to_decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": "10.0.0.1:6301",
        "remote_block_ids": [list(range(101, 101 + count))],
        "remote_dp_size": 1,
        "remote_tp_size": 1,
        "tp_size": 1,
    }
    if role == "kv_producer":
        return named(chance.choice([None, {}, to_prefill, to_prefill, spoiled(chance, to_prefill, 1.0)]))
    own = {"remote_host": "10.0.0.7", "remote_notify_port": 61007, "remote_handshake_port": 6307}
    others = [to_decode, to_decode, to_decode | {"remote_block_ids": None}, to_decode | own]
    wrong = [spoiled(chance, to_decode, 1.0), spoiled(chance, to_decode | own, 1.0)]
    return named(chance.choice([None, {}, *others, *wrong]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["READ", "WRITE"])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_the_simulator_decides_as_vllm_s_scheduler(role: str, mode: str) -> None:
    scripts = [script(number, partial(params_of, role=role), name_of) for number in range(SCRIPTS)]
    found = Moves(role, mode).run(scripts)
    assert not found, "\n\n".join([f"{len(found)} scripts differ:", *found[:3]])
