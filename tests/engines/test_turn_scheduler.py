"""vLLM's own scheduler class and the simulator, on the same requests with KV that goes both ways:
both decide the same.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import Attention, BlockPool
from pdproxy_lab.sim.nixl import Nixl, PeerNotice, Pull, peer_of
from pdproxy_lab.sim.request import EngineRequest, SamplingParams
from pdproxy_lab.sim.stats import Stats

from .build import EnginesUnavailable, ensure

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120, func_only=True)]

SCRIPT = Path(__file__).with_name("schedulers_nixl.py")
SIZE = 16
KEYS = {
    "remote_engine_id": "other",
    "remote_request_id": "their-1",
    "remote_host": "127.0.0.1",
    "remote_port": 2,
}
ASK = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    (*KEYS, "remote_block_ids")
)


def _kept(tokens: int, **more: Any) -> dict[str, Any]:
    blocks = [list(range(1, -(-tokens // SIZE) + 1))]
    given = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": blocks,
        "tp_size": 1,
    }
    return given | KEYS | {"remote_num_tokens": tokens} | more


PARAMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "empty": {},
    "a prefill": ASK,
    "a prefill's handle": _kept(96, do_remote_prefill=True, do_remote_decode=False),
    "the turn before": _kept(75),
    "a turn of few tokens": _kept(63),
    "a turn of just enough": _kept(64),
    "a turn that is longer than the prompt": _kept(140),
    "no tokens": _kept(0, remote_block_ids=[[1]]),
    "no number of tokens": _kept(75, remote_num_tokens=None),
    "no blocks": _kept(75, remote_block_ids=[]),
    "no engine": {name: value for name, value in _kept(75).items() if name != "remote_engine_id"},
    "trimmed": _kept(64),
}
CASES: list[dict[str, Any]] = [
    {
        "params": PARAMS[name],
        "name": name,
        "bidirectional": bidirectional,
        "local": local,
        "threshold": threshold,
        "end": end,
        "prompt": 96,
        "generated": 1 if name == "a prefill" else 5,
        "block_size": SIZE,
    }
    for name, bidirectional, local, threshold, end in itertools.product(
        PARAMS, (False, True), (0, 32, 80), (0, 64), ("length", "stop", "abort")
    )
]


def _simulated(case: dict[str, Any]) -> dict[str, Any]:
    facts = SimFacts(
        bidirectional_kv_xfer=case["bidirectional"],
        kv_recompute_threshold=case["threshold"],
        block_size=SIZE,
    )
    pool = BlockPool(64, SIZE)
    nixl = Nixl(facts, "engine", 1, pool, Stats())
    params = None if case["params"] is None else dict(case["params"])
    request = EngineRequest(
        id="request", prompt=tuple(range(case["prompt"])), sampling=SamplingParams(max_tokens=9)
    )
    one = ActiveRequest(request, Attention(pool, 0), 0.0, list(request.prompt), 0, params, None)
    if params and (peer := peer_of(params)) is not None:
        nixl._known.add(peer)
    one.computed = one.local = case["local"]
    wants, later = nixl.wanted(one)
    local = case["local"] // SIZE
    new = -(-(case["local"] + wants) // SIZE) - local
    nixl.allocated(one, new if wants else 0, wants)
    asked = [command for command in nixl.outbox if isinstance(command, Pull | PeerNotice)]
    one.computed = case["prompt"] + case["generated"] - 1
    one.blocks = list(range(-(-one.computed // SIZE)))
    one.generated = [1] * case["generated"]
    kept, handle = nixl.ended(one, case["end"], 100.0)
    # the scheduler adds the second one
    hidden = {"remote_blocks_expiry_time", "remote_prefill_cached_tokens"}
    return {
        "wants": wants,
        "later": later,
        "asks": "nothing" if not asked else "pull" if isinstance(asked[0], Pull) else "release",
        "blocks": len(asked[0].blocks) if asked and isinstance(asked[0], Pull) else 0,
        "kept": kept,
        "params": handle and {name: value for name, value in handle.items() if name not in hidden},
        "expires": bool(handle and handle["remote_blocks_expiry_time"]),
    }


def test_the_simulator_decides_as_vllms_scheduler() -> None:
    """For each kind of params, with and without the option, whatever is cached, and however the
    request ends.
    """
    try:
        built = ensure()
    except EnginesUnavailable as error:
        if os.environ.get("PDPROXY_REQUIRE_ENGINES") == "1":
            raise
        pytest.skip(str(error))
    command, env = [str(built.python), str(SCRIPT)], os.environ | built.environment()
    done = subprocess.run(
        command,
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    real = json.loads(done.stdout[done.stdout.index("[{") :])
    for case, theirs in zip(CASES, real, strict=True):
        ours = json.loads(json.dumps(_simulated(case)))
        assert ours == theirs, case
