"""vLLM's MoRIIOConnectorScheduler and the simulator's `moriio` decide the same, READ and WRITE, P
and D.
"""

# vLLM's worker needs `mori` and a GPU. Without them, these are not compared: handshakes, reads and
# writes themselves, what the KV is afterwards, and how long the whole engine waits for them. Which
# of the worker's methods run without them is in `long_moriio_reports`. The simulator knows nothing
# of `remote_hosts` (ranks of one engine on several machines), of hybrid models, and of a
# `transfer_id` that is null (vLLM makes one up and uses it in some places only).

from __future__ import annotations

import random
from functools import partial
from math import inf
from typing import Any, Literal

import pytest

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.moriio import Moriio, Read, Report
from pdproxy_lab.sim.moriio_params import MessageAddress
from tests.schedulers.compare import SCRIPTS, Comparison
from tests.schedulers.scripts import Params, script, spoiled
from tests.schedulers.simulated import Simulated

ADDRESSES = ("remote_engine_id", "remote_host", "remote_handshake_port", "remote_notify_port")
"""What an answer says of the engine's own place."""


SILENT = ("send_notify_block", "_send_transfer_release")
"""What the scheduler would send."""


def of_moriio(role: str, mode: Literal["READ", "WRITE"], **more: Any) -> SimFacts:
    """Return the facts of an engine."""
    return SimFacts(
        connector="moriio",
        role="decode" if role == "kv_consumer" else "prefill",
        transfer_mode=mode,
        **more,
    )


class SimulatedMoriio(Simulated):
    """The simulator's side."""

    connector: Any

    def made(self, facts: SimFacts) -> Any:
        made = Moriio(facts, self.pool)
        made.address = MessageAddress("10.0.0.9", 1)
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
            found["handle"] = {
                key: value for key, value in found["handle"].items() if key not in ADDRESSES
            }
        return found

    def state(self, now: float) -> dict[str, Any]:
        new = {
            name: one for name, one in self.connector._to_write.items() if name not in self._written
        }
        self._written |= new.keys()
        saves = {name: [one.place.host, one.place.port, one.blocks] for name, one in new.items()}
        held = {name: round(left, 3) for name, left in self.connector.leases(now).items()}
        return {"saves": saves, "held": held}


class Moves(Comparison):
    """vLLM's side."""

    connector = "MoRIIOConnector"
    scheduler = (
        "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector:"
        "MoRIIOConnectorScheduler"
    )
    silent = SILENT

    def __init__(self, role: str, mode: Literal["READ", "WRITE"]) -> None:
        facts = of_moriio(role, mode)
        super().__init__(lambda: SimulatedMoriio(facts))
        self.role = role
        ports = {
            "proxy_port": "1",
            "proxy_ping_port": "2",
            "http_port": "3",
            "handshake_port": "4",
            "notify_port": "5",
        }
        self.extra = {"proxy_ip": "127.0.0.1", **ports, "read_mode": mode == "READ"}  # type: ignore[misc]

    def asked(self, meta: dict[str, Any]) -> list[Any] | None:
        found: list[Any] = []
        # a producer's workers don't look at it
        received = {} if self.role == "kv_producer" else meta["reqs_to_recv"]
        for request_id, one in received.items():
            try:
                where = [
                    one["remote_host"],
                    one["remote_notify_port"] + int(one["remote_dp_rank"]) * one["tp_size"],
                ]
            except TypeError:  # `_read_blocks`
                return None
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
        # a consumer's workers don't
        saves = meta["reqs_to_save"].values() if self.role == "kv_producer" else ()
        return {
            "saves": {
                one["transfer_id"]: [
                    one["remote_host"],
                    one["remote_notify_port"],
                    one["local_block_ids"][0],
                ]
                for one in saves
            },
            "held": {
                name: round(left, 3) if self.role == "kv_producer" else inf
                for name, left in meta["deferred"].items()
            },
        }

    def _read(self, step: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
        found = super()._read(step, seen)
        if found.get("handle"):
            found["handle"] = {
                key: value for key, value in found["handle"].items() if key not in ADDRESSES
            }
        return found


def name_of(chance: random.Random) -> str:
    """Return what a proxy puts into a request's id, and sometimes nothing."""
    digits = f"{chance.getrandbits(128):032x}"
    where = [f"host:10.0.0.{n},handshake:630{n},notify:6100{n}" for n in (1, 2)]
    named = f"-___prefill_addr_{where[0]}___decode_addr_{where[1]}_{digits}"
    return chance.choice([named, named, named, ""])


def named(params: Params) -> Params:
    """Return parameters without a `transfer_id` of None, for which vLLM makes one up and then does
    not use it everywhere.
    """
    return (
        {k: v for k, v in params.items() if k != "transfer_id" or v is not None}
        if params
        else params
    )


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
    if chance.random() < 0.2:
        to_prefill |= {
            "remote_host": "10.0.0.8",
            "remote_notify_port": 61008,
            "remote_handshake_port": 6308,
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
    own = {"remote_host": "10.0.0.7", "remote_notify_port": 61007, "remote_handshake_port": "6307"}
    answered = own | {
        "remote_dp_rank": 0,
        "remote_dp_rank_override": True,
        "remote_dp_size_local": 1,
    }
    ranks = {
        "remote_dp_rank": chance.randrange(3),
        "remote_dp_size": 4,
        "remote_dp_size_local": chance.choice([0, 2, 4]),
    }
    others = [
        to_decode,
        to_decode,
        to_decode | {"remote_block_ids": None},
        to_decode | own,
        to_decode | answered,
    ]
    others += [
        to_decode | ranks,
        to_decode | ranks | {"remote_dp_rank_override": chance.random() < 0.5},
    ]
    others += [to_decode | ranks | {"is_request_leader": chance.random() < 0.5}]
    others += [
        to_decode | {"remote_block_ids": chance.choice([[], [[]], [[101], [201]], [[101, 102]]])}
    ]
    wrong = [spoiled(chance, to_decode, 1.0), spoiled(chance, to_decode | answered, 1.0)]
    for_decode, for_prefill = (
        [*others, *wrong],
        [to_prefill, to_prefill, spoiled(chance, to_prefill, 1.0)],
    )
    if role == "kv_producer":
        return named(
            chance.choice([None, {}, *for_prefill, *for_prefill, chance.choice(for_decode)])
        )
    return named(chance.choice([None, {}, *for_decode, *for_decode, chance.choice(for_prefill)]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["READ", "WRITE"])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_the_simulator_decides_as_vllm_s_scheduler(
    role: str, mode: Literal["READ", "WRITE"]
) -> None:
    scripts = [script(number, partial(params_of, role=role), name_of) for number in range(SCRIPTS)]
    found = Moves(role, mode).run(scripts)
    assert not found, "\n\n".join([f"{len(found)} scripts differ:", *found[:3]])
