"""What a client gets is what the decode engine said, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy_lab.sim.tokenizer import BuiltInTokenizer
from tests.fakes import answers
from tests.fakes.engine import Reply
from tests.fakes.world import CHAT, CHAT_TEXT, COMPLETIONS, PROMPT, TEXT, chat, completion, world

ROUTES = pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, completion()), (CHAT, chat())], ids=["completions", "chat"]
)


@ROUTES
async def test_a_whole_answer_passes_through_unchanged(path: str, body: dict[str, Any]) -> None:
    """An unstreamed answer has the engine's own bytes, status and content type, and the KV is
    counted as loaded.
    """
    said = answers.whole(path == CHAT, [0, 1, 2], 'a "quoted" 🦊\n', 4)

    async def script(reply: Reply) -> None:
        reply.engine.loaded(reply.request)
        await reply.whole(said)

    async with world() as w:
        w.decode[0].script(script)
        answer = await w.ask(path, body)
        assert (answer.status, answer.body) == (200, said)
        assert answer.header("content-type") == "application/json"
        assert answer.header("content-length") == str(len(said))
        assert len(w.prefill[0].requests) == len(w.decode[0].requests) == 1
        await w.quiet()
        assert w.books.endings == {"loaded": 1}
        assert w.metric("pdproxy_kv_handles_ended_total", end="loaded") == 1


@ROUTES
@pytest.mark.parametrize("asked", [True, False])
async def test_a_stream_passes_through_and_the_usage_event_only_if_asked(
    path: str, body: dict[str, Any], asked: bool
) -> None:
    """A stream's bytes are the engine's; of the usage event that the proxy asks for itself only the
    fingerprint goes on.
    """
    is_chat = path == CHAT
    events = answers.stream(is_chat, 61, [" a", "b", "\\n\\n"], with_usage=True)

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*events)
        await reply.finish()

    async with world() as w:
        w.decode[0].script(script)
        options = {"stream_options": {"include_usage": True}} if asked else {}
        answer = await w.ask(path, {**body, "stream": True, **options})
        assert answer.body == b"".join(events if asked else answers.without_usage(events))
        assert answer.ended
        assert answer.header("content-type") == "text/event-stream; charset=utf-8"
        assert answer.header("transfer-encoding") == "chunked"
        assert w.decode[0].requests[0].json["stream_options"]["include_usage"] is True
        report = await w.ended()
        assert (report.outcome, report.prompt_tokens, report.completion_tokens) == ("ok", 61, 3)


@ROUTES
async def test_each_choice_of_a_stream_keeps_its_fingerprint(
    path: str, body: dict[str, Any]
) -> None:
    """Of several choices no usage event is asked: it would take the fingerprint from each choice's
    last event.
    """
    async with world() as w:
        answer = await w.ask(path, {**body, "stream": True, "n": 3, "seed": 7, "temperature": 0.9})
        chunks = [
            json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: {")
        ]
        last = [
            chunk for chunk in chunks if any(choice["finish_reason"] for choice in chunk["choices"])
        ]
        assert len(last) == 3
        assert all(chunk["system_fingerprint"] for chunk in last)
        assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_default_engines_answer_both_routes(stream: bool) -> None:
    """On both routes the text is what one engine alone says, and every handle is loaded."""
    async with world(prefill=2, decode=2) as w:
        for path, body, text in ((COMPLETIONS, completion(), TEXT), (CHAT, chat(), CHAT_TEXT)) * 2:
            answer = await w.ask(path, {**body, "stream": stream})
            assert answer.status == 200
            assert answer.text == text
        await w.quiet()
        assert w.books.endings == {"loaded": 4}
        assert [len(engine.requests) for engine in w.engines] == [2, 2, 2, 2], "ties go round"


async def test_events_in_one_write_or_a_byte_at_a_time() -> None:
    """How the engine's bytes are cut into TCP reads changes nothing of what the client gets."""
    said = answers.stream(False, 61, [" a", "é🦊", "c"], with_usage=True)
    events = b"".join(said)

    async def at_once(reply: Reply) -> None:
        await reply.start()
        await reply.piece(events)
        await reply.finish()

    async def by_bytes(reply: Reply) -> None:
        await reply.start()
        for at in range(len(events)):
            await reply.piece(events[at : at + 1])
            if at % 40 == 0:
                await __import__("asyncio").sleep(0)
        await reply.finish()

    async with world() as w:
        w.decode[0].script(at_once, by_bytes)
        for _ in range(2):
            answer = await w.ask(COMPLETIONS, completion(stream=True))
            assert answer.body == b"".join(answers.without_usage(said))


async def test_an_engine_that_ends_its_stream_by_closing() -> None:
    """A body without chunks or a length ends with the connection; after [DONE] that is a proper
    end.
    """
    events = answers.stream(False, 61, [" a", "b"], with_usage=False)

    async def script(reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        reply.engine.loaded(reply.request)
        await reply.raw(b"".join(events))
        reply.eof()

    async with world() as w:
        w.decode[0].script(script)
        answer = await w.ask(COMPLETIONS, completion(stream=True))
        assert answer.body == b"".join(events)
        assert answer.ended


async def test_bytes_of_a_client_reach_the_engines_field_by_field() -> None:
    """Fields the proxy does not know, odd numbers and escapes go to both engines as the client
    wrote them.
    """
    odd = (
        b'{"model":"tiny", '
        b'"prompt":"%s","max_tokens":4,"x":{"big":12345678901234567890.10e+2,"u":"\\u00e9\\/"},'
        b'"y": [1 ,2]}'
    )
    body = odd % (b"p" * 100)
    async with world() as w:
        answer = await w.ask(COMPLETIONS, body)
        assert answer.status == 200
        for leg in (w.prefill[0].requests[0], w.decode[0].requests[0]):
            assert b'"x":{"big":12345678901234567890.10e+2,"u":"\\u00e9\\/"}' in leg.body
            assert b'"y":[1 ,2]' in leg.body
            assert leg.json["prompt"] == "p" * 100


async def test_the_decode_leg_carries_the_handle_verbatim_with_a_chats_ids() -> None:
    """The decode engine gets what the prefill engine answered, and the ids that it has made of a
    chat. Of a text both make the same ids, so nobody is asked for them.
    """
    async with world() as w:
        for number, (path, body) in enumerate([(COMPLETIONS, completion()), (CHAT, chat())]):
            await w.ask(path, body)
            sent = dict(w.decode[0].requests[number].kv or {})
            asked = w.prefill[0].requests[number]
            ids = sent.pop("prompt_token_ids", None)
            assert sent == list(w.books.params.values())[number]
            assert asked.json.get("return_token_ids") is (True if path == CHAT else None)
            assert ids == (w.prefill[0].ids(asked) if path == CHAT else None)
            assert ids is None or PROMPT in BuiltInTokenizer().decode(ids)


async def test_the_prefill_leg_is_cleaned() -> None:
    """One token, no stream, ids asked for, and nothing that the engine would refuse or work on in
    vain.
    """
    fields = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 9,
        "min_tokens": 3,
        "n": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "structured_outputs": {"json": {}},
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "stop": ["x"],
        "seed": 7,
    }
    async with world() as w:
        await w.ask(CHAT, chat(**fields))
        sent = w.prefill[0].requests[0].json
        assert {
            name: sent[name] for name in ("max_tokens", "max_completion_tokens", "min_tokens", "n")
        } == {
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "min_tokens": 1,
            "n": 1,
        }
        assert sent["stream"] is False
        assert sent["return_token_ids"] is True
        assert not {"stream_options", "logprobs", "top_logprobs", "structured_outputs"} & set(sent)
        assert sent["tools"] == fields["tools"]
        assert sent["tool_choice"] == "auto"
        assert (sent["stop"], sent["seed"]) == (["x"], 7)
        assert sent["kv_transfer_params"] == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        kept = w.decode[0].requests[0].json
        del kept["kv_transfer_params"]
        assert kept == json.loads(json.dumps(chat(**fields))), (
            "the decode leg is the client's own request"
        )


async def test_return_token_ids_is_the_clients_choice_on_the_decode_leg() -> None:
    """The proxy asks the prefill engine for ids; the client's answer has them only if the client
    asked.
    """
    async with world() as w:
        await w.ask(COMPLETIONS, completion())
        await w.ask(COMPLETIONS, completion(return_token_ids=True))
        assert "return_token_ids" not in w.decode[0].requests[0].json
        assert w.decode[0].requests[1].json["return_token_ids"] is True
