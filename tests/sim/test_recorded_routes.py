"""`/v1/responses`, `/v1/messages` and `/inference/v1/generate` move KV and fail as recorded engines
do.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.sim.raw import ask
from tests.sim.recordings import reading
from tests.sim.recordings.acts import freed, still_held
from tests.sim.recordings.reading import FOLDER, Exchange, raw, read
from tests.sim.recordings.split import Pair
from tests.sim.recordings.stage import BLOCK, Stage, seen
from tests.sim.shape import differences

NAMES = sorted(path.stem for path in (FOLDER / "routes").glob("*.txt"))
FLAGS: dict[str, Any] = {
    "enable_prompt_tokens_details": True,
    "enable_auto_tool_choice": True,
    "enable_scale_out": True,
    "enable_cohere_api": True,
    "max_num_seqs": 16,
}


def remarks(name: str) -> set[str]:
    """What a recording's first line says. warm: P had the prompt in its cache; known: D had.
    nobody: the handle leads nowhere. freed, kept: P's KV, behind it. cut: the body had no end.
    """
    first = raw(name).partition(b"\n")[0].decode()
    return set(first.removeprefix("# ").split(", ")) if first.startswith("# ") else set()


def prefill_of(recorded: Exchange) -> reading.Sent:
    """P's leg for a request to D: of the same route, with the usual prompt."""
    return read(f"routes/P_{recorded.sent.path.rpartition('/')[2]}").sent


@pytest.mark.parametrize("name", NAMES)
async def test_as_recorded(name: str) -> None:
    """Status, headers, fields in their order and events are the real engine's, and P's KV is as
    free behind a request to D.
    """
    recorded, found = read(f"routes/{name}"), remarks(f"routes/{name}")
    async with AsyncExitStack() as stack:
        stage = Stage(stack)
        p, d = [await stage.engine(role, **FLAGS) for role in ("prefill", "decode")]
        if name.startswith("D"):
            await stage.meet(p, d)
        sent, leg = recorded.sent, prefill_of(recorded)
        if "warm" in found:
            free = {key: leg.json[key] for key in leg.json if key != "kv_transfer_params"}
            await stage.ask(p, leg.saying(free))
        engine = p if name.startswith("P") else d
        pair = Pair(stage, p, d, sent, {})
        given = sent.json.get("kv_transfer_params")
        if engine is d and isinstance(given, dict) and given.get("do_remote_prefill"):
            pair.handle = await stage.prefill(p, leg)
            mine = dict(pair.handle)
            if "prompt_token_ids" in given:
                mine["prompt_token_ids"] = given["prompt_token_ids"]
            if "nobody" in found:
                mine |= {"remote_engine_id": "nobody", "remote_port": stage.closed_port()}
            sent = sent.saying({**sent.json, "kv_transfer_params": mine})
        if "known" in found:
            await stage.ask(d, sent)
        client = await ask(engine.port, sent.raw)
        assert client.answer.complete is ("cut" not in found)
        assert client.ended == ("eof" if "cut" in found else "")
        assert recorded.answer is not None
        unlike = differences(recorded.answer, seen(client), block_size=BLOCK)
        assert not unlike, "\n".join(["unlike the recording:", *unlike])
        if "freed" in found:
            await freed(pair)
        elif "kept" in found:
            await still_held(pair)
