"""What the index knows of vLLM's own cache of KV blocks: all that is there, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pdproxy.scheduling.prefix import keys
from pdproxy.scheduling.prefix.block_index import BlockIndex

from .build import EnginesUnavailable, ensure

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120, func_only=True)]

SCRIPT = Path(__file__).with_name("cache_events.py")
SIZE = 16


def test_equal_blocks_of_two_loads_are_known_until_both_are_gone() -> None:
    """Two prompts of one beginning are loaded from another engine at the same time: each has blocks
    of its own. The first one's are evicted, and a third prompt finds the second one's.
    """
    try:
        built = ensure()
    except EnginesUnavailable as error:
        if os.environ.get("PDPROXY_REQUIRE_ENGINES") == "1":
            raise
        pytest.skip(str(error))
    done = subprocess.run(
        [str(built.python), str(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=os.environ | built.environment(),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["found"] == 20 * SIZE, "the third prompt finds the second one's blocks"
    index = BlockIndex(SIZE, 1000)
    place = index.add_place()
    for event in told["events"]:
        if event["type"] == "BlockStored":
            index.stored(
                place,
                event["block_hashes"],
                event["parent_block_hash"],
                event["token_ids"],
                event["block_size"],
                event["medium"],
                event["group_idx"],
                event["lora_name"],
                event.get("extra_keys"),
                counts=True,
            )
        else:
            index.removed(place, event["block_hashes"], event["medium"], event["group_idx"])
    counters = index.counters
    assert counters.repeated == 20
    assert (counters.unknown_parent, counters.unknown_block) == (0, 0)
    assert index.blocks(place) == len(told["cached"])
    prompt = [*range(20 * SIZE), *[3000] * (2 * SIZE)]
    assert index.lookup(keys.of_ids(prompt, SIZE, keys.root())).gpu == {place: 22}
