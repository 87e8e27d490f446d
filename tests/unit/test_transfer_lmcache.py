"""LMCache's PD contract: what each leg says, and whose token is the answer's first."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.tokens.ids import TokenIds, from_numbers
from pdproxy.transfer.contract import Contract, Dispatch, Handle, HeldByDecode, Receiver
from pdproxy.transfer.lmcache_pd import LMCacheOptions, lmcache_pd, may_begin_on_prefill
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone
from tests.fakes.prompts import parsed, read

PD = lmcache_pd()
IDS = TokenIds(b"[5,6,7]", 3)
DISPATCH = Dispatch("leg-1", IDS, receiver=Receiver("10.0.0.7", (7300, 7301), (7400, 7401)))


def answer(first: int | None = 42, **choice: Any) -> bytes:
    """A prefill engine's answer."""
    params = None if first is None else {"first_tok": first}
    choices = [{"index": 0, "text": " x", "finish_reason": "length", "stop_reason": None, **choice}]
    usage = {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}
    return json.dumps(
        {"id": "cmpl-1", "choices": choices, "usage": usage, "kv_transfer_params": params}
    ).encode()


def released_by(contract: Contract) -> Callable[[str | None, Handle], bytes]:
    """What makes the completion that releases a handle."""
    holder = contract.holder
    assert isinstance(holder, HeldByDecode)
    return lambda model, given: holder.release_leg(model, given).body


def handle(request: Parsed, body: bytes, contract: Any = PD) -> Handle:
    """The handle of an answer, which must hold one."""
    found = contract.handle(request, read(body), DISPATCH)
    assert isinstance(found, Handle), found
    return found


def decode_body(request: Parsed, body: bytes) -> dict[str, Any]:
    """What the decode engine is asked."""
    found: dict[str, Any] = json.loads(
        PD.decode(request, request.prompts[0], handle(request, body), DISPATCH).body
    )
    return found


def prefill_body(request: Parsed, contract: Any = PD) -> dict[str, Any]:
    """What the prefill engine is asked."""
    found: dict[str, Any] = json.loads(contract.prefill(request, request.prompts[0], DISPATCH).body)
    return found


@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT])
def test_the_prefill_leg(route: Route) -> None:
    """It is a completion of the ids, one token, unstreamed, with the receiver's place and the
    minted id.
    """
    request = parsed(
        route,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=9,
        top_k=3,
        min_tokens=4,
    )
    leg = PD.prefill(request, request.prompts[0], DISPATCH)
    assert leg.route is Route.COMPLETIONS
    body = json.loads(leg.body)
    assert body == {
        "model": "tiny",
        "top_k": 3,
        "min_tokens": 1,
        "prompt": [5, 6, 7],
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "ret_first_tok": True,
            "disagg_spec": {
                "req_id": "leg-1",
                "receiver_host": "10.0.0.7",
                "receiver_init_port": [7300, 7301],
                "receiver_alloc_port": [7400, 7401],
            },
        },
    }


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 9}, 8),
        ({}, 15),  # a completion's default is 16
    ],
)
def test_the_decode_leg_of_a_completion(fields: dict[str, Any], limit: int | None) -> None:
    """It goes on behind the first token, with one token less."""
    body = decode_body(parsed(**fields), answer())
    assert body["prompt"] == [5, 6, 7, 42]
    assert body["max_tokens"] == limit
    assert "kv_transfer_params" not in body


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 9}, 8),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 4),
        ({"max_completion_tokens": None, "max_tokens": 9}, 8),
    ],
)
def test_the_decode_leg_of_a_chat(fields: dict[str, Any], limit: int | None) -> None:
    """It is a completion too; nothing of the chat is left in it."""
    request = parsed(Route.CHAT, chat_template_kwargs={"a": 1}, **fields)
    leg = PD.decode(request, request.prompts[0], handle(request, answer()), DISPATCH)
    assert leg.route is Route.COMPLETIONS
    assert json.loads(leg.body) == {"model": "tiny", "max_tokens": limit, "prompt": [5, 6, 7, 42]}


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (Route.CHAT, {}),
        (Route.CHAT, {"max_tokens": None}),
        (Route.COMPLETIONS, {"max_tokens": None}),
    ],
)
def test_what_has_no_limit_is_decoded_from_the_first_token_on(
    route: Route, fields: dict[str, Any]
) -> None:
    """To the completion that goes on behind a first token, no limit is its default of sixteen
    tokens.
    """
    request = parsed(route, **fields)
    assert handle(request, answer()).first is None
    assert prefill_body(request)["prompt"] == [5, 6]


def test_min_tokens_counts_the_first_token() -> None:
    """The decode engine owes one less."""
    assert decode_body(parsed(min_tokens=3, max_tokens=9), answer())["min_tokens"] == 2
    assert decode_body(parsed(min_tokens=0, max_tokens=9), answer())["min_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "choice", "finish"),
    [
        ({"max_tokens": 1}, {}, "length"),
        ({"max_tokens": 9}, {"finish_reason": "stop", "text": "", "stop_reason": 7}, "stop"),
        ({"max_tokens": 9}, {}, None),
        ({"max_tokens": 2}, {}, None),
    ],
)
def test_whether_the_first_token_is_the_last(
    fields: dict[str, Any], choice: dict[str, Any], finish: str | None
) -> None:
    """It is where one was asked for, or where the engine stopped by itself."""
    first = handle(parsed(**fields), answer(**choice)).first
    assert first is not None
    assert (first.finish_reason, first.id) == (finish, 42)


@pytest.mark.parametrize("choice", [{"text": "\ufffd"}, {"text": ""}])
def test_a_token_without_a_whole_text_is_not_shown(choice: dict[str, Any]) -> None:
    """Half a letter is shown by the token behind it: one engine makes both."""
    given = handle(parsed(max_tokens=9), answer(**choice))
    assert given.first is None
    assert given.alone is Alone.FIRST_TOKEN


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"]},
        {"seed": 1},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logprobs": 1},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"bad_words": ["a b"]},
        {"include_reasoning": False},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_what_looks_back_is_decoded_from_the_first_token_on(fields: dict[str, Any]) -> None:
    """A request that could tell the engines apart gets its first token from the decode engine,
    untouched.
    """
    request = parsed(**fields)
    assert not may_begin_on_prefill(request)
    given = handle(request, answer())
    assert given.first is None
    assert given.alone is None
    sent = json.loads(PD.decode(request, request.prompts[0], given, DISPATCH).body)
    assert {name: sent[name] for name in fields if name != "stream_options"} == {
        name: value for name, value in fields.items() if name != "stream_options"
    }


@pytest.mark.parametrize(
    ("fields", "contract"),
    [
        ({"logprobs": 1}, PD),
        ({"seed": 1}, PD),
        ({}, lmcache_pd(LMCacheOptions(first_token="decode"))),
    ],
)
def test_nothing_is_pushed_that_the_decode_engine_will_not_look_for(
    fields: dict[str, Any], contract: Any
) -> None:
    """It looks for its prompt less the last token, and an unfull chunk is found by its very
    tokens.
    """
    request = parsed(max_tokens=9, **fields)
    assert prefill_body(request, contract)["prompt"] == [5, 6]
    seen = json.loads(answer())
    seen["usage"] |= {"prompt_tokens": 2}
    assert handle(request, json.dumps(seen).encode(), contract).prompt_tokens == 3


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": None},
        {"stop": []},
        {"frequency_penalty": 0},
        {"repetition_penalty": 1.0},
        {"echo": False},
        {"n": 1},
    ],
)
def test_what_says_nothing_is_no_reason(fields: dict[str, Any]) -> None:
    """Defaults that are spelled out change nothing."""
    assert may_begin_on_prefill(parsed(**fields))


def test_the_decode_engine_makes_the_first_token_where_the_operator_says_so() -> None:
    """With `first_token: decode` the chat goes on untouched."""
    request = parsed(Route.CHAT, max_tokens=4)
    contract = lmcache_pd(LMCacheOptions(first_token="decode"))
    given = handle(request, answer(), contract)
    assert given.first is None
    leg = contract.decode(request, request.prompts[0], given, DISPATCH)
    assert leg.route is Route.CHAT
    assert json.loads(leg.body) == {
        name: json.loads(bytes(value)) for name, value in request.fields.items()
    }


@pytest.mark.parametrize(
    ("options", "tokens", "notices"),
    [
        ({}, 256, 2),
        ({}, 255, 0),
        ({"save_unfull_chunk": True}, 3, 2),
        ({"first_rank_only": True}, 300, 1),
        ({"chunk_size": 32}, 32, 2),
    ],
)
def test_how_many_ranks_tell(options: dict[str, Any], tokens: int, notices: int) -> None:
    """One notice a receiving rank, one in all where the first stores alone, none where nothing is
    pushed.
    """
    dispatch = Dispatch("leg-1", TokenIds(b"[]", tokens), receiver=DISPATCH.receiver)
    assert lmcache_pd(LMCacheOptions(**options)).notices(dispatch) == notices


@pytest.mark.parametrize(
    "body", [answer(None), b'{"choices":[],"kv_transfer_params":{"first_tok":"x"}}']
)
def test_an_engine_without_lmcache_is_found_out(body: bytes) -> None:
    """No first token: the reason names what to look at."""
    assert "pd_role sender" in str(PD.handle(parsed(), read(body), DISPATCH))


def test_a_prompt_that_is_decoded_as_it_came_is_pushed_without_its_last_token() -> None:
    """The decode engine looks for what is before its last token: anything else would stay in its
    buffer for ever.
    """
    contract = lmcache_pd(LMCacheOptions(first_token="decode", chunk_size=32))
    request = parsed(max_tokens=4)
    dispatch = Dispatch("leg-1", from_numbers(list(range(40))), receiver=DISPATCH.receiver)
    body = json.loads(contract.prefill(request, request.prompts[0], dispatch).body)
    assert body["prompt"] == list(range(39))
    said = json.loads(answer(7))
    said["usage"]["prompt_tokens"] = 39
    given = contract.handle(request, read(said), dispatch)
    assert isinstance(given, Handle)
    assert given.prompt_tokens == 40
    assert contract.min_tokens(request) == 33
    body = json.loads(released_by(contract)("tiny", given))
    assert (body["prompt"], body["max_tokens"]) == ([*range(39), 7], 1)


def test_what_nobody_decodes_is_read_by_us() -> None:
    """With the first token behind it, as a decode leg would have."""
    given = handle(parsed(max_tokens=1), answer())
    body = json.loads(released_by(PD)(None, given))
    assert body == {"prompt": [5, 6, 7, 42], "max_tokens": 1, "stream": False, "temperature": 0}
    assert PD.holder.pushed_to("http://d") == "http://d"
    assert not PD.holder.late_kv_may_be_read
    assert not PD.holder.refusal_released("BadRequestError", "temperature")
