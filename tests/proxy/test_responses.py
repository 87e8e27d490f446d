"""Responses: what needs the memory of an engine, and what openai-python makes of the answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pdproxy_lab.sim.error_body import error_body
from tests.fakes.engine import Reply
from tests.fakes.passed import (
    RESPONSES,
    everyone,
    fine,
    responses,
    shape,
)
from tests.fakes.world import PROMPT, world

# -- memory


def _error(message: str, kind: str, status: int) -> bytes:
    return json.dumps(error_body(message, kind, status)).encode()


_NEEDS_MEMORY: list[dict[str, Any]] = [
    {"store": True},
    {"store": "on"},
    {"store": None},
    {"store": 0},
    {"store": "perhaps"},
    {"store": [True]},
    {"store": "x" * 200},
    {"previous_response_id": "resp_1"},
    {"previous_response_id": "resp_1", "store": True, "stream": True},
    {"previous_response_id": None, "conversation": None, "background": False},
    {"previous_response_id": 7},
    {
        "previous_response_id": "resp_1",
        "previous_input_messages": [{"role": "user", "content": "x"}],
    },
    {"background": True},
    {"background": True, "stream": True},
    {"background": "yes", "store": True, "previous_response_id": "resp_1"},
    {"background": True, "store": False},
    {"background": True, "model": "nope"},
    {"background": True, "temperature": "hot"},
    {"background": "perhaps"},
    {"background": "no", "stream": True},
    {"background": 0},
    {"background": "off", "store": False},
    {"background": [], "store": True},
    {"background": "N", "input": ...},
    {"input": ...},
    {"input": ..., "store": True},
    {"input": ..., "background": True},
    {"temperature": "hot", "max_output_tokens": "x"},
    {"metadata": 1, "store": "yes"},
]


@pytest.mark.parametrize("given", _NEEDS_MEMORY, ids=str)
async def test_what_needs_memory_is_answered_as_by_an_engine_without_a_store(
    given: dict[str, Any],
) -> None:
    """Status, type, parameter and text are the engine's, and nothing that pdproxy changed in the
    body shows in them.
    """
    body = {name: value for name, value in responses(**given).items() if value is not ...}
    async with world() as w:
        ours = await w.ask(RESPONSES, body)
        w.port, port = w.decode[0].port, w.port
        plain = await w.ask(RESPONSES, body)
        w.port = port
        assert ours.status == plain.status
        if "error" in (plain.json if plain.status != 200 else {}):
            assert ours.body == plain.body
        else:
            assert [shape(part) for part in ours.events] == [shape(part) for part in plain.events]


@pytest.mark.parametrize(
    "given",
    [{}, {"store": True}, {"store": 1}, {"store": "ON"}, {"store": 1.0}, {"store": "\u0074"}],
)
async def test_no_engine_is_asked_to_store(given: dict[str, object]) -> None:
    """An engine with a store gets `store: false`, for all that it would read as true, and for
    nothing at all.
    """
    async with world() as w:
        seen = everyone(w, RESPONSES, fine)
        assert (await w.ask(RESPONSES, responses(**given))).status == 200
        assert seen[0].json == responses(store=False)


@pytest.mark.parametrize("number", ["1." + "0" * 70, "1" + "0" * 70 + "e-70", "0." + "9" * 70])
async def test_a_long_number_is_no_way_to_a_store(number: str) -> None:
    """An engine reads these as true."""
    data = json.dumps(responses(store="?")).replace('"?"', number)
    assert json.loads(data)["store"] == 1
    async with world() as w:
        seen = everyone(w, RESPONSES, fine)
        assert (
            await w.ask(RESPONSES, data.encode(), [("content-type", "application/json")])
        ).status == 200
        assert seen[0].json == responses(store=False)
        answer = await w.ask(
            RESPONSES,
            data.replace("store", "background").encode(),
            [("content-type", "application/json")],
        )
        assert answer.status == 200
        assert "previous_response_id" in seen[1].json, "no engine runs it in the background"


@pytest.mark.parametrize(
    "given", [{"background": True}, {"background": "Y", "previous_response_id": "resp_known"}]
)
async def test_no_engine_runs_a_request_in_the_background(given: dict[str, object]) -> None:
    """An engine with a store is asked for a response that it can't have; its 404 becomes an error
    that names the field.
    """

    async def unknown(reply: Reply) -> None:
        name = reply.request.json["previous_response_id"]
        await reply.whole(
            _error(f"Response with id '{name}' not found.", "invalid_request_error", 404), 404
        )

    async with world() as w:
        seen = everyone(w, RESPONSES, unknown)
        answer = await w.ask(RESPONSES, responses(**given))
        assert (answer.status, answer.json["error"]["param"]) == (400, "background")
        assert len(seen) == 1
        assert re.fullmatch("resp_[0-9a-f]{32}", seen[0].json["previous_response_id"])


async def test_a_stored_conversation_is_refused_by_name() -> None:
    """vLLM would ignore the field, and answer without the conversation."""
    async with world() as w:
        seen = everyone(w, RESPONSES, fine)
        answer = await w.ask(RESPONSES, responses(conversation={"id": "c"}))
        assert (answer.status, answer.json["error"]["param"]) == (400, "conversation")
        assert not seen


async def test_a_body_that_is_asked_again_must_be_refused_again() -> None:
    """The client's own body goes to an engine only for the text of its refusal: any other answer is
    not passed on.
    """

    async def once(reply: Reply) -> None:
        if reply.request.json.get("store") is False:
            await reply.whole(_error("<dict of 5 items>", "Bad Request", 400), 400)
        else:
            await fine(reply)

    async with world() as w:
        seen = everyone(w, RESPONSES, once)
        answer = await w.ask(RESPONSES, responses())
        assert (answer.status, answer.json["error"]["message"]) == (400, "<dict of 5 items>")
        assert [one.json.get("store") for one in seen] == [False, None]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/responses/r1"), ("POST", "/v1/responses/r1/cancel")]
)
async def test_stored_responses_do_not_exist(method: str, path: str) -> None:
    """Asking for one is vLLM's 404, with the reason."""
    async with world() as w:
        answer = await w.ask(path, b"", method=method)
        error = answer.json["error"]
        assert (answer.status, error["type"], error["param"]) == (
            404,
            "invalid_request_error",
            "response_id",
        )
        assert error["message"].startswith("Response with id 'r1' not found")


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_client_responses(stream: bool) -> None:
    """The official client's plain `responses.create` works, whole and streamed, with the same
    result both ways.
    """
    import openai  # a second, which each process that collects tests would take

    given: Any = {"model": "tiny", "input": PROMPT, "max_output_tokens": 8}
    async with world() as w:
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{w.port}/v1", api_key="x", max_retries=0
        )
        async with client:
            if stream:
                answered = await client.responses.create(**given, stream=True)
                events = [event async for event in answered]
                assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
                assert [e.sequence_number for e in events] == list(range(len(events)))
                last = events[-1]
                assert last.type == "response.completed"
                text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
                assert text
                assert text == last.response.output_text
            else:
                made = await client.responses.create(**given)
                assert made.output_text
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(made.id)
