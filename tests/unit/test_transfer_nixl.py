"""The NIXL contract against recorded answers of vLLM 0.32.0."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import alone_body
from pdproxy.transfer.contract import NO_DISPATCH, Dispatch, Handle
from pdproxy.transfer.handles import holds_blocks
from pdproxy.transfer.nixl import NIXL, at_host
from pdproxy.transfer.refusal import release_body
from pdproxy.wire.engine import PrefillAnswer, prefill_answer
from pdproxy.wire.route import Route
from pdproxy.wire.sent_body import joined
from tests.fakes.prompts import parsed, read

DATA = Path(__file__).parents[1] / "data"


def recorded(name: str) -> bytes:
    """The body of a recorded answer."""
    return (DATA / name).read_bytes().partition(b"<<<")[2].partition(b"\n\n")[2].strip()


def handle_in(answer: PrefillAnswer) -> Handle | str:
    """What the contract finds in an answer."""
    return NIXL.handle(parsed(), answer, NO_DISPATCH)


def given(name: str) -> Handle:
    """The handle of a recorded answer."""
    handle = handle_in(read(recorded(name)))
    assert isinstance(handle, Handle)
    return handle


@pytest.mark.parametrize(
    ("name", "tokens", "ident"),
    [
        ("prefill_completion.txt", 61, "cmpl-a20c7aad6961e7b4-0-a96861aa"),
        ("prefill_chat.txt", 81, "chatcmpl-b4c1bd17855cce6a-8caf4112"),
    ],
)
def test_recorded_handles(name: str, tokens: int, ident: str) -> None:
    """A recorded answer gives a handle: the engine's bytes, the prompt's ids and length."""
    handle = given(name)
    assert handle.prompt_tokens == tokens
    assert handle.remote_request_id == ident
    assert handle.token_ids is not None
    assert len(json.loads(handle.token_ids)) == tokens
    assert handle.params in recorded(name), "verbatim"


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": None},
        {"remote_engine_id": None},
        {"remote_host": 5},
        {"remote_port": "x"},
        {"remote_request_id": None},
        {"do_remote_prefill": False},
    ],
)
def test_a_handle_that_would_kill_an_engine_is_none(change: dict[str, Any]) -> None:
    """Incomplete or empty handles are refused with a reason; so is a key that is missing."""
    body = json.loads(recorded("prefill_completion.txt"))
    body["kv_transfer_params"] |= change
    assert isinstance(handle_in(read(json.dumps(body).encode())), str)
    for name in change:
        del body["kv_transfer_params"][name]
    assert isinstance(handle_in(read(json.dumps(body).encode())), str)


def test_an_answer_without_params() -> None:
    """The reason names the engine's option, which is what an operator has to look at."""
    params: dict[str, Any] | None
    for params in (None, {}):
        body = json.loads(recorded("prefill_completion.txt")) | {"kv_transfer_params": params}
        reason = handle_in(read(json.dumps(body).encode()))
        assert isinstance(reason, str)
    assert prefill_answer(b"[]") is None
    assert prefill_answer(b"\xff") is None


@pytest.mark.parametrize("name", ["prefill_completion.txt", "prefill_chat.txt"])
def test_the_ids_of_a_long_prompt_are_cut_out_of_an_answer(name: str) -> None:
    """The handle is the same as if they were parsed, and what is no list of ids goes to no
    engine.
    """
    short = recorded(name)
    ids = b"[%b]" % b",".join(b"%d" % one for one in range(5000))
    found = re.search(rb'"prompt_token_ids":(\[[0-9,]*\])', short)
    assert found is not None
    before, after = short[: found.start(1)], short[found.end(1) :]
    handle, plain = handle_in(read(before + ids + after)), handle_in(read(short))
    assert isinstance(handle, Handle)
    assert isinstance(plain, Handle)
    assert handle == msgspec.structs.replace(plain, token_ids=ids)
    for odd in (b'"x":1,', b'"},{', b"{},"):
        assert prefill_answer(before + b"[" + odd + ids[1:] + after) is None


@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT])
def test_the_decode_body(route: Route) -> None:
    """The client's request, the handle verbatim and a chat's ids beside it: a text is the same at
    both engines.
    """
    request = parsed(route, stream=True, temperature=0.5)
    handle = given("prefill_completion.txt" if route is Route.COMPLETIONS else "prefill_chat.txt")
    body = json.loads(NIXL.decode(request, request.prompts[0], handle, NO_DISPATCH).body)
    kv = body.pop("kv_transfer_params")
    assert handle.token_ids is not None
    sent = kv.pop("prompt_token_ids", None)
    assert sent == (None if route is Route.COMPLETIONS else json.loads(handle.token_ids))
    assert kv == json.loads(handle.params)
    assert body.pop("stream_options") == {"include_usage": True, "continuous_usage_stats": False}
    assert body.pop("return_token_ids") is True
    assert body == {name: json.loads(bytes(value)) for name, value in request.fields.items()}
    alone = json.loads(joined(alone_body(request, request.prompts[0])))
    assert "kv_transfer_params" not in alone


def test_a_completion_whose_ids_were_made_here_is_decoded_from_the_prefills() -> None:
    """Never from ours: a prompt that is not the handle's kills a decode engine."""
    request, handle = parsed(), given("prefill_completion.txt")
    assert handle.token_ids is not None
    dispatch = Dispatch(ids=TokenIds(b"[1,2]", 2))
    body = json.loads(NIXL.decode(request, request.prompts[0], handle, dispatch).body)
    assert body["prompt"] == json.loads(handle.token_ids)
    assert "prompt_token_ids" not in body["kv_transfer_params"]


@pytest.mark.parametrize(("spares", "prompt"), [(True, [1, 2]), (False, "p" * 50)])
def test_ids_for_the_prefill_engine(spares: bool, prompt: object) -> None:
    """They take the prompt's place where it may be spared; its answer is to say its own in any
    case.
    """
    request = parsed()
    dispatch = Dispatch(ids=TokenIds(b"[1,2]", 2), prefill_takes_ids=spares)
    body = json.loads(NIXL.prefill(request, request.prompts[0], dispatch).body)
    assert (body["prompt"], body["return_token_ids"]) == (prompt, True)


@pytest.mark.parametrize(
    ("route", "dispatch", "asked"),
    [
        (Route.CHAT, NO_DISPATCH, True),
        (Route.COMPLETIONS, NO_DISPATCH, None),
        (Route.COMPLETIONS, Dispatch(compares_ids=True), True),
    ],
)
def test_the_prefill_engine_is_asked_for_ids_that_something_uses(
    route: Route, dispatch: Dispatch, asked: bool | None
) -> None:
    """A client's own wish is the decode engine's to answer."""
    request = parsed(route, return_token_ids=True)
    body = json.loads(NIXL.prefill(request, request.prompts[0], dispatch).body)
    assert body.get("return_token_ids") is asked


@pytest.mark.parametrize(("least", "sent"), [(0, 0), (1, 1), (3, 1), (None, None)])
def test_the_prefill_bodys_min_tokens(least: int | None, sent: int | None) -> None:
    """More than one token at the least is a 400 for one token at the most; none stays none."""
    request = parsed(min_tokens=least)
    assert (
        json.loads(NIXL.prefill(request, request.prompts[0], NO_DISPATCH).body)["min_tokens"]
        == sent
    )


def test_the_prefill_body_leaves_the_clients_object_alone() -> None:
    """Both legs start from the same fields."""
    request = parsed(
        Route.CHAT, max_completion_tokens=9, logprobs=True, response_format={"type": "text"}
    )
    before = dict(request.fields)
    body = json.loads(NIXL.prefill(request, request.prompts[0], NO_DISPATCH).body)
    assert body["response_format"] == {"type": "text"}, "some chat templates print it"
    assert "logprobs" not in body
    assert request.fields == before
    completion = parsed(response_format={"type": "text"})
    assert "response_format" not in json.loads(
        NIXL.prefill(completion, completion.prompts[0], NO_DISPATCH).body
    )


def test_the_release_body() -> None:
    """It passes the schema and fails in the handler."""
    handle = given("prefill_chat.txt")
    raw = release_body('na"me', handle)
    body = json.loads(raw)
    assert body.pop("kv_transfer_params") == json.loads(handle.params)
    assert body == {"model": 'na"me', "prompt": "x", "max_tokens": 0, "stream": False}
    assert "model" not in json.loads(release_body(None, handle))


@pytest.mark.parametrize(
    ("kind", "param", "released"),
    [
        ("BadRequestError", "temperature", True),
        ("BadRequestError", "max_tokens", True),
        ("BadRequestError", "input_tokens", True),
        ("Bad Request", "body.max_tokens", False),
        ("BadRequestError", "stream_options", False),
        ("BadRequestError", "logprobs", False),
        ("BadRequestError", None, False),
        ("", None, False),
    ],
)
def test_who_released_after_a_refusal(kind: str, param: str | None, released: bool) -> None:
    """The handler has, the schema has not, and in doubt nobody has."""
    assert NIXL.holder.refusal_released(kind, param) is released


def test_a_handle_at_another_host() -> None:
    """Nothing else of it changes, in whatever order its fields are."""
    params = {
        "remote_block_ids": [[1, 2]],
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "more": {"a": [None]},
    }
    given = Handle(json.dumps(params).encode(), b"[1]", 1, "r")
    placed = at_host(given, "p.example")
    assert json.loads(placed.params) == params | {"remote_host": "p.example"}
    assert (placed.token_ids, placed.prompt_tokens, placed.remote_request_id) == (b"[1]", 1, "r")
    assert json.loads(at_host(given, 'a"b').params)["remote_host"] == 'a"b'


@pytest.mark.parametrize("groups", [1, 2, 40])
def test_blocks_are_found_in_each_group(groups: int) -> None:
    """However many groups there are, and also where the engine writes spaces."""
    full = [[1, 2]] * groups
    for blocks, holds in ((full, True), ([*full, []], False), ([[], *full], False), (None, False)):
        text = json.dumps(blocks)
        assert holds_blocks(text.encode()) == holds
        assert holds_blocks(text.replace(" ", "").encode()) == holds
    assert not holds_blocks(b"[[1],null]")
