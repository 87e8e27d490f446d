"""vLLM's NixlPushConnectorScheduler, how NixlPushConnectorWorker matches requests, and the
simulator's `nixl-push`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.nixl import Nixl, PeerNotice, SideChannelPeer, peer_of
from pdproxy_lab.sim.nixl_push import NixlPush, Push, PushRegistration, Register, _Met
from tests.schedulers.compare import SCRIPTS, Comparison, followed
from tests.schedulers.scripts import Params, Script, script, spoiled
from tests.schedulers.simulated import Simulated, prefilled, stats


class SimulatedPush(Simulated):
    """The simulator's side."""

    connector: NixlPush

    def made(self, facts: SimFacts) -> Nixl:
        return NixlPush(facts, "engine", 5600, self.pool, stats())

    def meet(self, params: dict[str, Any]) -> None:
        peer = peer_of(params)
        if peer is not None:
            self.connector._met.setdefault(peer.engine_id, _Met(peer, "", 1))

    def asked(self, command: Any) -> list[Any]:
        match command:
            case Register():
                one = command.registration
                mine = [one.engine_id, one.host, one.port, one.tp_size, list(one.blocks)]
                return ["register", one.request_id, command.peer.engine_id, *mine]
            case PeerNotice(kind="heartbeat"):
                return ["heartbeat", command.peer.engine_id, sorted(command.request_ids)]
        raise AssertionError(command)

    def state(self, now: float) -> dict[str, Any]:
        return super().state(now) | {
            "finished": {
                name: list(blocks) for name, blocks in self.connector.finished_blocks.items()
            }
        }


class Pushes(Comparison):
    """vLLM's side."""

    connector = "NixlPushConnector"
    scheduler = (
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler:"
        "NixlPushConnectorScheduler"
    )

    def __init__(self, *, tensor_parallel_size: int) -> None:
        facts = SimFacts(connector="nixl-push", tensor_parallel_size=tensor_parallel_size)
        super().__init__(lambda: SimulatedPush(facts))
        self.tensor_parallel_size = tensor_parallel_size
        self._finished: dict[str, list[int]] = {}

    def asked(self, meta: dict[str, Any]) -> list[Any] | None:
        """Of what D waits for, only registrations reach P."""
        waits = {name for name, one in meta["reqs_to_recv"].items() if one["local_block_ids"]}
        assert waits == meta["push_registrations"].keys()
        found: list[Any] = []
        for request_id, one in meta["push_registrations"].items():
            mine = [
                one["decode_engine_id"],
                one["decode_host"],
                one["decode_port"],
                one["decode_tp_size"],
            ]
            found.append(
                [
                    "register",
                    request_id,
                    str(one["remote_engine_id"]),
                    *mine,
                    one["local_block_ids"][0],
                ],
            )
        found += [
            ["heartbeat", name, one["req_ids"]] for name, one in meta["heartbeat_by_engine"].items()
        ]
        return found

    def state(self, meta: dict[str, Any], now: float) -> dict[str, Any]:
        found = super().state(meta, now)
        self._finished |= {name: blocks[0] for name, blocks in meta["push_finished_blocks"].items()}
        self._finished = {
            name: blocks for name, blocks in self._finished.items() if name in self.leases
        }
        return found | {"finished": dict(self._finished)}


def promise(chance: random.Random) -> dict[str, Any]:
    """Return what D is sent while P computes."""
    engine = chance.randrange(3)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"p{engine}",
        "remote_request_id": f"leg-{chance.getrandbits(32):08x}",
        "remote_host": "10.0.0.1",
        "remote_port": 5600 + engine,
        "tp_size": 1,
        "pp_size": 1,
    }


def params_of(chance: random.Random) -> Params:
    """Return what requests to P and to D carry."""
    return chance.choice(
        [
            None,
            {"do_remote_decode": True, "do_remote_prefill": False},
            {"do_remote_decode": True, "do_remote_prefill": False},
            {
                "do_remote_decode": True,
                "remote_block_ids": None,
                "remote_engine_id": None,
                "remote_host": None,
            },
            {
                "do_remote_decode": True,
                **{k: v for k, v in promise(chance).items() if k.startswith("remote")},
            },
            {},
            spoiled(chance, promise(chance)),
            spoiled(chance, promise(chance)),
            spoiled(chance, promise(chance), 0.9),
            promise(chance) | {"remote_block_ids": [[1, 2, 3]], "remote_num_tokens": 40},
            promise(chance) | {"do_remote_decode": True},
        ]
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_simulator_decides_as_vllm_s_scheduler(workers: int) -> None:
    comparison = Pushes(tensor_parallel_size=workers)
    found = comparison.run([script(number, params_of) for number in range(SCRIPTS)])
    assert not found, "\n\n".join([f"{len(found)} scripts differ:", *found[:3]])


def meetings(number: int) -> Script:
    """Return finished prompts of P, registrations of D and ends of leases, of ids that are
    alike.
    """
    chance = random.Random(number)
    endings = [
        "-0-aaaaaaaa",
        "-0-bbbbbbbb",
        "-0-BBBBBBB1",
        "-1-aaaaaaaa",
        "-0-aaaaaaa",
        "",
        "-0",
        "-0-aaaaaaaa-bbbbbbbb",
    ]
    ids = [
        f"{kind}-{name}{end}" for kind in ("cmpl", "chatcmpl") for name in "ab" for end in endings
    ]
    steps: Script = [{"do": "finished", "id": name} for name in chance.sample(ids, 12)]
    steps += [{"do": "registered", "id": name} for name in chance.sample(ids, 12)]
    chance.shuffle(steps)
    for _ in range(4):
        place = chance.randint(1, len(steps))
        over = {step["id"] for step in steps if step["do"] == "expired"}
        finished = [
            step["id"]
            for step in steps[:place]
            if step["do"] == "finished" and step["id"] not in over
        ]
        if finished:
            steps.insert(place, {"do": "expired", "id": chance.choice(finished)})
    return steps


def met(steps: Script) -> list[dict[str, Any]]:
    """Say what the simulator pushes, and what waits after each step."""
    sim = SimulatedPush(SimFacts(connector="nixl-push"))
    sim.connector._met["d"] = _Met(SideChannelPeer("10.0.0.1", 5600, "d"), "", 1)
    found = []
    for place, step in enumerate(steps):
        name = step["id"]
        if step["do"] == "registered":
            sim.connector.take(PushRegistration(name, "10.0.0.1", 5600, "d", 1, (1,)), 1)
        elif step["do"] == "finished":
            sim.connector.ended(prefilled(sim.pool, name, [place + 1]), "length", 0.0)
        elif name in sim.connector.held:
            sim.connector.held[name].blocks.clear()
            sim.connector.held[name].expires = 1.0
            sim.connector.expire(1.0)
        pushes = [one for one in sim.connector.outbox if isinstance(one, Push)]
        sim.connector.outbox.clear()
        found.append(
            {
                "pushes": [
                    [one.request_id, list(one.blocks), one.remote_request_id] for one in pushes
                ],
                "finished": list(sim.connector.finished_blocks),
                "registered": list(sim.connector.registered),
            }
        )
    return found


@pytest.mark.timeout(300)
def test_the_simulator_matches_ids_as_vllm_s_worker() -> None:
    scripts = [meetings(number) for number in range(SCRIPTS)]
    real = followed("real_matching.py", scripts)
    assert sum(bool(one["pushes"]) for script in real for one in script) > SCRIPTS
    for steps, theirs in zip(scripts, real, strict=True):
        assert met(steps) == theirs, steps
