"""What an engine answers as vLLM 0.32.0 and as 0.33.0, which differ."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pdproxy_lab.sim import since
from pdproxy_lab.sim.server import SimServer
from tests.sim.moments import FAST
from tests.sim.raw import ask, chat, completion, post

OLD, NEW = "0.32.0", "0.33.0"
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "one two"}],
    "max_tokens": 3,
    "temperature": 0,
}


@pytest.fixture(params=[OLD, NEW])
async def sim(request: pytest.FixtureRequest) -> AsyncIterator[SimServer]:
    async with SimServer(msgspec.structs.replace(FAST, version=request.param), chance=7) as made:
        yield made
        assert not made.crashes


def is_new(sim: SimServer) -> bool:
    return sim.engine.facts.version == NEW


@pytest.mark.parametrize(
    ("version", "new"),
    [("0.26.0", False), (OLD, False), (NEW, True), ("0.33.1rc1", True), ("1.0", True)],
)
def test_a_version_is_read_by_its_numbers(version: str, new: bool) -> None:
    assert since.v033(version) is new


@pytest.mark.parametrize("body", [chat(), completion()], ids=["chat", "completion"])
async def test_choices_say_which_weights_sampled_them(sim: SimServer, body: bytes) -> None:
    (choice,) = (await ask(sim.port, body)).answer.json["choices"]
    assert ("weight_versions" in choice) is is_new(sim)
    assert choice.get("weight_versions") is None


async def test_handles_count_registrations_of_memory() -> None:
    for version in (OLD, NEW):
        facts = msgspec.structs.replace(FAST, role="prefill", version=version)
        async with SimServer(facts) as made:
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            answer = (
                await ask(made.port, completion(max_tokens=1, kv_transfer_params=asked))
            ).answer
            handle: dict[str, Any] = answer.json["kv_transfer_params"]
            assert handle.get("remote_registration_generation") == (1 if version == NEW else None)


async def test_a_response_that_is_cut_ends_as_incomplete(sim: SimServer) -> None:
    body: dict[str, Any] = {
        "input": "one two",
        "max_output_tokens": 3,
        "temperature": 0,
        "stream": True,
    }
    text = (await ask(sim.port, post("/v1/responses", **body))).answer.body.decode()
    last = "incomplete" if is_new(sim) else "completed"
    assert text.rpartition("event: ")[2].startswith(f"response.{last}\n")
    assert text.count('"status":"completed"') == (0 if is_new(sim) else 2)


async def test_an_empty_list_of_prompts_names_its_parameter(sim: SimServer) -> None:
    error = (await ask(sim.port, completion(prompt=[]))).answer.json["error"]
    assert error["message"] == "You must pass at least one prompt" + (
        " (parameter=prompt)" if is_new(sim) else ""
    )


async def test_errors_of_messages_have_types(sim: SimServer) -> None:
    error = (await ask(sim.port, post("/v1/messages", **{**MESSAGE, "model": "nope"}))).answer.json[
        "error"
    ]
    assert error["type"] == ("not_found_error" if is_new(sim) else "NotFoundError")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_core_is_told_of(sim: SimServer, stream: bool) -> None:
    sim.faults.add("dead_core@mid_stream" if stream else "dead_core@queued")
    body = (await ask(sim.port, completion(stream=stream, max_tokens=12))).answer.body.decode()
    assert ("EngineCore encountered an issue" in body) is not is_new(sim)
    assert ("The server had an error while processing your request." in body) is is_new(sim)
