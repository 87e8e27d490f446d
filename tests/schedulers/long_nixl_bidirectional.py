"""vLLM's NixlPullConnectorScheduler with `bidirectional_kv_xfer`, and without it on requests of
engines with it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdproxy_lab.sim.facts import SimFacts
from tests.schedulers.compare import SCRIPTS
from tests.schedulers.long_nixl_pull import Pulls, SimulatedPull, params_of
from tests.schedulers.scripts import Params, script, spoiled

TTL = 60


class BothWays(Pulls):
    """vLLM's side."""

    def __init__(self, *, threshold: int, both: bool) -> None:
        facts = SimFacts(
            bidirectional_kv_xfer=both,
            decoder_kv_blocks_ttl=float(TTL),
            kv_recompute_threshold=threshold,
        )
        super().__init__(lambda: SimulatedPull(facts))
        self.extra = {  # type: ignore[misc]
            "bidirectional_kv_xfer": both,
            "decoder_kv_blocks_ttl": TTL,
            "kv_recompute_threshold": threshold,
        }


def of_decode(chance: random.Random) -> dict[str, Any]:
    """Return what D has answered, as P gets it with the next turn."""
    engine, tokens = chance.randrange(3), chance.choice([1, 16, 63, 64, 100, 400])
    blocks = chance.choice([-(-tokens // 16), chance.randint(1, 30)])
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(1, blocks + 1))],
        "remote_engine_id": f"d{engine}",
        "remote_request_id": f"cmpl-d-{chance.getrandbits(32):08x}",
        "remote_host": "10.0.0.2",
        "remote_port": 5700 + engine,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 1020.0,
    }


def turns(chance: random.Random) -> Params:
    """Return what requests to P and to D carry."""
    return chance.choice(
        [
            params_of(chance),
            params_of(chance),
            of_decode(chance),
            of_decode(chance),
            spoiled(chance, of_decode(chance), 1.0),
            of_decode(chance) | {"remote_block_ids": chance.choice([[], [[]], None])},
            of_decode(chance) | {"do_remote_prefill": True},
        ]
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("threshold", "both"), [(64, True), (0, True), (64, False)])
def test_the_simulator_decides_as_vllm_s_scheduler(threshold: int, both: bool) -> None:
    comparison = BothWays(threshold=threshold, both=both)
    found = comparison.run([script(number, turns) for number in range(SCRIPTS)])
    assert not found, "\n\n".join([f"{len(found)} scripts differ:", *found[:3]])
