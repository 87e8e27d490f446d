"""LoRA adapters that are loaded and unloaded while an engine runs, in vLLM's words."""

from __future__ import annotations

import msgspec
import pytest

from pdproxy_lab.sim.server import SimServer
from tests.sim.moments import FAST
from tests.sim.raw import ask, completion, get, post

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def names(sim: SimServer) -> list[str]:
    cards = (await ask(sim.port, get("/v1/models"))).answer.json["data"]
    return [card["id"] for card in cards]


async def test_an_adapter_is_served_while_it_is_loaded() -> None:
    """Its name is shown by answers; a restart forgets it."""
    async with SimServer(msgspec.structs.replace(FAST, runtime_lora=True)) as sim:
        (base,) = await names(sim)
        loaded = (await ask(sim.port, post(LOAD, lora_name="poet", lora_path="/a"))).answer
        assert (loaded.status, loaded.body) == (
            200,
            b"Success: LoRA adapter 'poet' added successfully.",
        )
        card = (await ask(sim.port, get("/v1/models"))).answer.json["data"][1]
        assert (card["id"], card["root"], card["parent"]) == ("poet", "/a", base)
        answer = (await ask(sim.port, completion(model="poet", max_tokens=2))).answer
        assert (answer.status, answer.json["model"]) == (200, "poet")
        removed = (await ask(sim.port, post(UNLOAD, lora_name="poet"))).answer
        assert (removed.status, removed.body) == (
            200,
            b"Success: LoRA adapter 'poet' removed successfully.",
        )
        assert (await ask(sim.port, completion(model="poet"))).answer.status == 404
        await ask(sim.port, post(LOAD, lora_name="poet", lora_path="/a"))
        await sim.engine.stop()
        await sim.engine.start()
        assert await names(sim) == [base]


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        (LOAD, {"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (
            LOAD,
            {"lora_name": "poet", "lora_path": "/a"},
            400,
            "The lora adapter 'poet' has already been loaded. If you want",
        ),
        (UNLOAD, {}, 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
        (UNLOAD, {"lora_name": "x"}, 404, "The lora adapter 'x' cannot be found."),
    ],
)
async def test_refusals(path: str, fields: dict[str, str], status: int, message: str) -> None:
    """As by `vllm.entrypoints.openai.models.serving`."""
    async with SimServer(msgspec.structs.replace(FAST, runtime_lora=True)) as sim:
        (base,) = await names(sim)
        await ask(sim.port, post(LOAD, lora_name="poet", lora_path="/a"))
        answer = (await ask(sim.port, post(path, **fields))).answer
        assert answer.status == status
        assert answer.json["error"]["message"].startswith(message)
        conflict = (await ask(sim.port, post(LOAD, lora_name=base, lora_path="/a"))).answer
        assert "conflicts with a served base model" in conflict.json["error"]["message"]


async def test_without_the_flag_there_are_no_such_routes(sim: SimServer) -> None:
    """As without vLLM's variable."""
    assert (await ask(sim.port, post(LOAD, lora_name="x", lora_path="y"))).answer.status == 404
