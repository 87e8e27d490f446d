"""vLLM's NixlPullConnectorScheduler and the simulator's `nixl`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.nixl import Nixl, PeerNotice, Pull, peer_of
from tests.schedulers.compare import SCRIPTS, Comparison
from tests.schedulers.scripts import Params, script, spoiled
from tests.schedulers.simulated import Simulated, stats


class SimulatedPull(Simulated):
    """The simulator's side."""

    def made(self, facts: SimFacts) -> Nixl:
        return Nixl(facts, "engine", 5600, self.pool, stats())

    def meet(self, params: dict[str, Any]) -> None:
        peer = peer_of(params)
        if peer is not None:
            self.connector._known.add(peer)

    def asked(self, command: Any) -> list[Any]:
        match command:
            case Pull():
                peer = command.peer
                where = [peer.engine_id, peer.host, peer.port]
                return [
                    "pull",
                    command.request_id,
                    *where,
                    command.remote_request_id,
                    list(command.blocks),
                ]
            case PeerNotice(kind="heartbeat"):
                return ["heartbeat", command.peer.engine_id, sorted(command.request_ids)]
            case PeerNotice():
                peer = command.peer
                return ["release", peer.engine_id, peer.host, peer.port, *command.request_ids]
        raise AssertionError(command)


class Pulls(Comparison):
    """vLLM's side."""

    connector = "NixlConnector"
    scheduler = (
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler:"
        "NixlPullConnectorScheduler"
    )

    def asked(self, meta: dict[str, Any]) -> list[Any] | None:
        """A worker with more blocks than the handle dies (`_apply_prefix_caching`); it reads the
        end of the handle's.
        """
        found: list[Any] = []
        for request_id, one in meta["reqs_to_recv"].items():
            remote = one["remote"]
            where = [str(remote["engine_id"]), str(remote["host"]), int(remote["port"] or 0)]
            blocks = one["local_block_ids"][0] if one["local_block_ids"] else []
            if not blocks:
                found.append(["release", *where, str(remote["request_id"])])
                continue
            theirs = remote["block_ids"][0]
            if len(blocks) > len(theirs):
                return None
            found.append(
                ["pull", request_id, *where, str(remote["request_id"]), theirs[-len(blocks) :]]
            )
        found += [
            ["heartbeat", name, one["req_ids"]] for name, one in meta["heartbeat_by_engine"].items()
        ]
        return found


def handle(chance: random.Random) -> dict[str, Any]:
    """Return what P has answered, of one of three engines."""
    engine = chance.randrange(3)
    count = chance.choice([1, 4, 7, 19])
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, count + 1))],
        "remote_engine_id": f"p{engine}",
        "remote_request_id": f"cmpl-p-{chance.getrandbits(32):08x}",
        "remote_host": "10.0.0.1",
        "remote_port": 5600 + engine,
        "tp_size": 1,
    }


def params_of(chance: random.Random) -> Params:
    """Return what requests to P and to D carry. A handle of D for P is another connector's: both
    transfer both ways.
    """
    return chance.choice(
        [
            None,
            {"do_remote_decode": True, "do_remote_prefill": False},
            {
                "do_remote_decode": True,
                "remote_block_ids": None,
                "remote_engine_id": None,
                "remote_host": None,
            },
            {"do_remote_decode": False, "do_remote_prefill": False},
            {},
            spoiled(chance, handle(chance)),
            spoiled(chance, handle(chance)),
            spoiled(chance, handle(chance), 0.9),
            handle(chance) | {"remote_block_ids": chance.choice([[], [[]], None])},
        ]
    )


@pytest.mark.timeout(300)
def test_the_simulator_decides_as_vllm_s_scheduler() -> None:
    found = Pulls(lambda: SimulatedPull(SimFacts())).run(
        [script(number, params_of) for number in range(SCRIPTS)]
    )
    assert not found, "\n\n".join([f"{len(found)} scripts differ:", *found[:3]])
