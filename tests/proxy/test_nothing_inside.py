"""Clients get no handles, no addresses of engines and no ids of legs, whichever route, form and
failure.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import TurnKept
from pdproxy.wire import inside
from tests.fakes import answers
from tests.fakes.client import exchange, request
from tests.fakes.engine import Reply
from tests.fakes.passed import BODIES, MESSAGES, RESPONSES, everyone
from tests.fakes.pool import pool
from tests.fakes.received import nothing_inside
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, world
from tests.proxy.test_turns import alike, talking, user

HANDLE = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_engine_id": "0d6e3f0c-engine",
    "remote_request_id": "cmpl-1-0-deadbeef",
    "remote_block_ids": [[101, 102, 103, 104]],
    "remote_host": "10.1.2.3",
    "remote_port": 5600,
}
NEW = {"version": "0.33.0"}
ROUTES = pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, completion()), (CHAT, chat())], ids=["completions", "chat"]
)
SLOW = Hardware(prefill_tokens_per_s=1e9, decode_step_s=0.01, transfer_latency_s=0.0)
"""Each event is a read of its own."""


def with_handle(event: bytes, name: str = "kv_transfer_params") -> bytes:
    """An event with a handle as its last field."""
    return event.replace(b"}\n\n", b',"%b":%b}\n\n' % (name.encode(), answers.compact(HANDLE)))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_handle_in_a_streams_last_event_is_the_turns_and_not_the_clients(
    path: str,
) -> None:
    """vLLM 0.33.0 sends it, of each turn that its engine keeps for the next one."""
    async with talking(everybody=NEW | {"hardware": SLOW}) as pair:
        body = (
            {"prompt": "a word " * 40}
            if path == COMPLETIONS
            else {"messages": user("a word " * 40)}
        )
        seen = []
        for more in ({}, {"stream_options": {"include_usage": True}}, {"return_token_ids": True}):
            before = len(pair.world.events(TurnKept))
            await alike(pair, path, {**body, "max_tokens": 8, "stream": True, **more})
            ours = await pair.ask(
                path, {"model": "tiny", **body, "max_tokens": 8, "stream": True, **more}
            )
            seen.append(ours.body)
            assert len(pair.world.events(TurnKept)) > before
        assert all(b'"kv_transfer_params":null' in one for one in seen), (
            "the field stays, as of an engine alone"
        )


async def test_the_order_of_fields_is_the_engines() -> None:
    async with pool("nixl", everybody=NEW) as pair:
        for path, body in ((COMPLETIONS, completion()), (CHAT, chat())):
            ours, theirs = [
                await ask(path, {**body, "stream": True}) for ask in (pair.ask, pair.asked_plain)
            ]
            assert [[*json.loads(one[6:])] for one in ours.events[:-1]] == [
                [*json.loads(one[6:])] for one in theirs.events[:-1]
            ]


async def counted(w: World, path: str, body: dict[str, Any]) -> int:
    """The tokens of a prompt: engines that count otherwise are no pair any more."""
    return int((await w.ask(path, body)).json["usage"]["prompt_tokens"])


async def whole(reply: Reply, said: object) -> None:
    """A whole answer, behind the transfer."""
    reply.engine.loaded(reply.request)
    await reply.whole(answers.compact(said))


@ROUTES
async def test_a_field_of_any_event_is_hidden(path: str, body: dict[str, Any]) -> None:
    """Whether the stream takes the fast path or not, whether one engine or two serve it."""
    is_chat = path == CHAT
    forms: list[dict[str, Any]] = [
        {},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
    ]
    async with world() as w:
        said = answers.stream(is_chat, await counted(w, path, body), [" a"] * 12, with_usage=True)
        for name in ("kv_transfer_params", "ec_transfer_params", "a_field_of_tomorrow"):
            for at in (int(is_chat), 7, len(said) - 3, len(said) - 2):

                async def script(reply: Reply, at: int = at, name: str = name) -> None:
                    await reply.start()
                    for number, event in enumerate(said):
                        await reply.piece(with_handle(event, name) if number == at else event)
                        await asyncio.sleep(0)
                    await reply.finish()

                w.decode[0].default = script
                for more in forms:
                    answer = await w.ask(path, {**body, "stream": True, **more})
                    assert answer.status == 200
                    assert b"10.1.2.3" not in answer.body
                    assert b"deadbeef" not in answer.body
                    assert answer.text == " a" * 12


@ROUTES
@pytest.mark.parametrize("alone", [False, True])
async def test_a_whole_answer_has_no_handle(path: str, body: dict[str, Any], alone: bool) -> None:
    async with world() as w:
        said = json.loads(
            answers.whole(path == CHAT, [0] * await counted(w, path, body), "text", 4)
        )
        handles = {
            "kv_transfer_params": HANDLE,
            "ec_transfer_params": {"b": HANDLE},
            "engine": HANDLE,
        }

        async def script(reply: Reply) -> None:
            await whole(reply, said | handles)

        w.decode[0].script(script)
        answer = await w.ask(path, {**body, **({"echo": True} if alone else {})})
        assert answer.json == said | dict.fromkeys(handles)


async def test_the_answers_of_lists_and_batches_have_no_handles() -> None:
    async def script(reply: Reply) -> None:
        said = json.loads(answers.whole("messages" in reply.request.json, [0] * 61, "text", 4))
        await whole(reply, said | {"kv_transfer_params": HANDLE, "ec_transfer_params": HANDLE})

    async with world() as w:
        w.decode[0].default = script
        several = completion(prompt=[completion()["prompt"], "another prompt " * 20])
        batch = chat(messages=[chat()["messages"]] * 2)
        for path, body in (
            (COMPLETIONS, several),
            ("/v1/chat/completions/batch", batch),
            ("/invocations", chat()),
        ):
            answer = await w.ask(path, body)
            assert answer.status == 200, answer.body
            assert answer.json["kv_transfer_params"] is None
            assert b"10.1.2.3" not in answer.body


def failure(status: int, w: World) -> bytes:
    """An engine's error with a handle, and with the addresses of other engines."""
    error = {
        "message": f"at 10.1.2.3:5600 for {w.prefill[0].url}",
        "type": "x",
        "param": None,
        "code": status,
    }
    return answers.compact({"error": error, "kv_transfer_params": HANDLE})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES, "/tokenize"])
@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_an_engines_error_has_no_handle_and_no_address(path: str, status: int) -> None:
    bodies = {**BODIES, COMPLETIONS: completion(), CHAT: chat(), "/tokenize": {"prompt": "a"}}
    async with world(limits={"attempts": 1}) as w:

        async def script(reply: Reply) -> None:
            await reply.whole(failure(status, w), status=status)

        everyone(w, path, script)
        w.decode[0].default = script
        answer = await w.ask(path, bodies[path])
        assert answer.status == status
        assert b"remote_" not in answer.body
        assert w.prefill[0].url.encode() not in answer.body
        assert (b"10.1.2.3" in answer.body) == (status < 500), (
            "a refusal is about the client's own words"
        )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("after", [0, 3])
async def test_an_error_event_has_no_handle_and_no_address(path: str, after: int) -> None:
    async with world(limits={"attempts": 1, "continuations": 0}) as w:

        async def script(reply: Reply) -> None:
            await reply.start()
            await reply.pieces(
                *answers.stream(path == CHAT, 61, [" a"] * 8, with_usage=False)[:after]
            )
            await reply.piece(b"data: " + failure(500, w) + b"\n\n")
            await reply.finish()

        w.decode[0].default = script
        answer = await w.ask(path, {**(chat() if path == CHAT else completion()), "stream": True})
        assert b'"error"' in answer.body
        assert b"10.1.2.3" not in answer.body
        assert b"remote_" not in answer.body
        assert w.prefill[0].url.encode() not in answer.body


async def test_events_of_passed_routes_have_no_handles() -> None:
    ended = {"type": "response.completed", "sequence_number": 3}
    response = {"id": "resp_1", "output": [], "kv_transfer_params": HANDLE}
    streams = {
        RESPONSES: [
            (
                b"event: response.created\ndata: "
                b'{"sequence_number":0,"type":"response.created","response":{}}\n\n'
            ),
            (
                b"event: response.in_progress\ndata: "
                b'{"sequence_number":1,"type":"response.in_progress"}\n\n'
            ),
            b'event: response.output_text.delta\ndata: {"delta":"a","sequence_number":2}\n\n',
            b"event: response.completed\ndata: "
            + answers.compact(ended | {"response": response})
            + b"\n\n",
        ],
        MESSAGES: [
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0}\n\n',
            b"event: message_stop\ndata: "
            + answers.compact({"type": "message_stop", "kv_transfer_params": HANDLE})
            + b"\n\n",
        ],
    }
    async with world() as w:
        for path, events in streams.items():

            async def streamed(reply: Reply, events: list[bytes] = events) -> None:
                await reply.start()
                await reply.pieces(*events)
                await reply.finish()

            everyone(w, path, streamed)
            answer = await w.ask(path, {**BODIES[path], "stream": True})
            assert answer.body == b"".join(events).replace(answers.compact(HANDLE), b"null")

            async def at_once(reply: Reply) -> None:
                await reply.whole(answers.compact(response))

            everyone(w, path, at_once)
            assert (await w.ask(path, BODIES[path])).json == response | {"kv_transfer_params": None}


async def test_the_last_event_of_a_passed_stream_may_be_an_error() -> None:
    async with world() as w:
        text = f"lost tcp://10.1.2.3:5600, {w.prefill[0].url}"
        for path in (RESPONSES, MESSAGES):
            first = [
                b'event: a\ndata: {"sequence_number":%d,"type":"content_block_delta"}\n\n' % number
                for number in range(3)
            ]
            data = answers.compact({"type": "error", "error": {"type": "x", "message": text}})

            async def script(
                reply: Reply,
                events: tuple[bytes, ...] = (*first, b"event: error\ndata: " + data + b"\n\n"),
            ) -> None:
                await reply.start()
                await reply.pieces(*events)
                await reply.finish()

            everyone(w, path, script)
            answer = await w.ask(path, {**BODIES[path], "stream": True})
            assert b"lost an address, an engine" in answer.body


async def test_only_listed_headers_of_an_engine_pass() -> None:
    async def script(reply: Reply) -> None:
        reply.engine.loaded(reply.request)
        body = answers.whole(False, [0] * 61, "text", 4)
        named = [
            ("x-engine-id", "e-1"),
            ("x-request-id", "leg"),
            ("server", "p1"),
            ("set-cookie", "a=b"),
            ("via", "p1"),
        ]
        lines = "".join(f"{name}: {value}\r\n" for name, value in named)
        head = (
            f"HTTP/1.1 200 OK\r\n{lines}content-type: application/json\r\ncontent-length: "
            f"{len(body)}\r\n\r\n"
        )
        await reply.raw(head.encode() + body)

    async with world() as w:
        w.decode[0].script(script)
        answer = await w.ask(COMPLETIONS, completion())
        assert {name for name, _ in answer.headers} <= {
            "content-type",
            "content-length",
            "x-request-id",
            "date",
            "vary",
        }
        assert answer.header("x-request-id") != "leg"


async def test_the_simulated_engine_of_a_new_version_has_handles_in_its_events() -> None:
    """As vLLM 0.33.0: the field in each event of data, the handle in that which ends a choice."""
    async with pool("nixl", everybody=NEW) as pair:
        ask = {
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
            "stream": True,
            "max_tokens": 3,
        }
        async with asyncio.timeout(60):
            answer = await exchange(pair.p.port, request("POST", COMPLETIONS, completion(**ask)))
        *events, last = [json.loads(event[6:]) for event in answer.events[:-1]]
        assert [event["kv_transfer_params"] for event in events] == [None] * len(events)
        assert last["kv_transfer_params"]["remote_block_ids"]
        assert [*last][-1] == "kv_transfer_params"


@pytest.mark.names_engines("the proxy is broken here on purpose")
@pytest.mark.parametrize("stream", [False, True])
async def test_what_looks_at_clients_sees_a_handle(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(reply: Reply) -> None:
        if not stream:
            said = json.loads(answers.whole(False, [0] * 61, "text", 4))
            await whole(reply, said | {"kv_transfer_params": HANDLE})
            return
        *events, last, done = answers.stream(False, 61, [" a"] * 4, with_usage=False)
        await reply.start()
        await reply.pieces(*events, with_handle(last), done)
        await reply.finish()

    async def ask() -> None:
        async with world() as w:
            w.decode[0].script(script)
            await w.ask(COMPLETIONS, completion(stream=stream))

    monkeypatch.setattr(inside, "without_inside", lambda body: (body, None))
    with (
        pytest.raises(pytest.fail.Exception, match=r"a handle.*kv_transfer_params"),
        nothing_inside(),
    ):
        await ask()


@pytest.mark.names_engines("the engine is named here on purpose")
async def test_what_looks_at_clients_sees_an_address() -> None:
    async def ask(sent: str) -> None:
        async with world() as w:
            url = w.decode[0].url

            async def script(reply: Reply) -> None:
                await whole(reply, json.loads(answers.whole(False, [0] * 61, url, 4)))

            w.decode[0].script(script)
            await w.ask(COMPLETIONS, completion(user=sent or url))

    with (
        pytest.raises(pytest.fail.Exception, match="the address of the decode engine"),
        nothing_inside(),
    ):
        await ask("somebody")
    with nothing_inside():
        await ask("")  # the client has sent it
