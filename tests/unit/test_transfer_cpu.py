"""The contract cpu: its legs, the handles that it takes, and the request that loads what nobody
needs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.settings.crosscheck import checked_node
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.settings.transfer import check_pairs
from pdproxy.transfer.contract import Dispatch, Handle, HeldByDecode
from pdproxy.transfer.cpu import ENTRY, release_leg
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone
from tests.fakes.prompts import read

CPU = ENTRY.contract(Settings(pools=(Pool(connector=ENTRY.name),)))
DISPATCH = Dispatch("0a" * 16)
PROMPT = (
    b'{"model":"m","prompt":"hello","max_tokens":9,"stream":true,"kv_transfer_params":'
    b'{"prefill_request_id":"evil"}}'
)


def answered(params: Any, tokens: int = 40) -> Any:
    """Read a prefill answer with these params."""
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
    choice = {"index": 0, "text": "x", "finish_reason": "length"}
    return read({"choices": [choice], "usage": usage, "kv_transfer_params": params})


def handle(params: Any, tokens: int = 40) -> Handle | str:
    return CPU.handle(parse(Route.COMPLETIONS, PROMPT), answered(params, tokens), DISPATCH)


def test_the_prefill_leg_is_one_token_and_carries_no_params() -> None:
    parsed = parse(Route.COMPLETIONS, PROMPT)
    leg = CPU.prefill(parsed, parsed.prompts[0], DISPATCH)
    body = json.loads(leg.body)
    assert (leg.route, body["max_tokens"], body["stream"]) == (Route.COMPLETIONS, 1, False)
    assert "kv_transfer_params" not in body


def test_the_decode_leg_has_the_answer_verbatim() -> None:
    parsed = parse(Route.COMPLETIONS, PROMPT)
    params = {"prefill_request_id": "cmpl-a-0", "more": [1, None]}
    found = handle(params)
    assert isinstance(found, Handle)
    assert (found.remote_request_id, found.prompt_tokens, found.alone) == (
        DISPATCH.leg_id,
        40,
        None,
    )
    body = json.loads(CPU.decode(parsed, parsed.prompts[0], found, DISPATCH).body)
    assert body["kv_transfer_params"] == params
    assert (body["max_tokens"], body["stream"]) == (9, True)
    assert CPU.needs_leg_id
    assert CPU.decode_has_leg_id


@pytest.mark.parametrize(
    "params", [None, {}, {"prefill_request_id": None}, {"prefill_request_id": 7}, [], "x", 1]
)
def test_answers_without_the_id(params: Any) -> None:
    found = handle(params)
    assert isinstance(found, str)
    assert "CPUConnector" in found


def test_an_empty_id() -> None:
    assert handle({"prefill_request_id": ""}) == "its prefill_request_id is empty"


@pytest.mark.parametrize(("tokens", "alone"), [(15, Alone.SHORT_PROMPT), (16, None), (17, None)])
def test_a_prompt_under_a_block_is_served_alone(tokens: int, alone: Alone | None) -> None:
    found = handle({"prefill_request_id": "cmpl-a-0"}, tokens)
    assert isinstance(found, Handle)
    assert found.alone is alone


@pytest.mark.parametrize(
    ("name", "route", "field"),
    [("cmpl-a-0", Route.COMPLETIONS, "prompt"), ("chatcmpl-a", Route.CHAT, "messages")],
)
def test_the_request_that_loads_is_on_the_legs_route_and_has_their_id(
    name: str, route: Route, field: str
) -> None:
    found = handle({"prefill_request_id": name})
    assert isinstance(found, Handle)
    leg = release_leg('m"', found)
    body = json.loads(leg.body)
    assert leg.route is route
    assert leg.headers == ((b"x-request-id", DISPATCH.leg_id.encode()),)  # type: ignore[union-attr]
    assert (body["max_tokens"], body["stream"], body["model"]) == (1, False, 'm"')
    assert body["kv_transfer_params"] == {"prefill_request_id": name}
    assert body["cache_salt"] == DISPATCH.leg_id
    assert len(json.dumps(body[field])) > 500
    assert "model" not in json.loads(release_leg(None, found).body)
    assert isinstance(CPU.holder, HeldByDecode)


PREFILLS = ("http://p1:8000", "http://p2:8000")
DECODES = ("http://d1:8000", "http://d2:8000")


def nodes(*sources: tuple[str, ...]) -> list[ConfiguredEngine]:
    prefills = [ConfiguredEngine(url=url, role="prefill") for url in PREFILLS[: len(sources)]]
    return [
        *prefills,
        *(
            ConfiguredEngine(url=DECODES[at], role="decode", sources=given)
            for at, given in enumerate(sources)
        ),
    ]


def mistakes(connector: str, *sources: tuple[str, ...]) -> tuple[str, ...]:
    found = Mistakes()
    check_pairs(Pool(connector=connector), nodes(*sources), ("pools", 0), found)
    try:
        found.raise_any()
    except SettingsError as error:
        return error.mistakes
    return ()


def test_each_prefill_engine_has_one_decode_engine() -> None:
    assert mistakes(ENTRY.name, ()) == ()
    assert mistakes(ENTRY.name, PREFILLS[:1], PREFILLS[1:]) == ()
    assert mistakes("nixl", (), ()) == ()
    both = mistakes(ENTRY.name, (), ())
    assert len(both) == 2
    assert (
        "pools[0].nodes[0]: with connector cpu http://p1:8000 pushes KV to one decode engine, but"
        in both[0]
    )
    assert len(mistakes(ENTRY.name, PREFILLS, PREFILLS[1:])) == 1


def test_an_engine_that_comes_later_is_checked_too() -> None:
    pool = Pool(connector=ENTRY.name)
    others = nodes(())
    with pytest.raises(SettingsError, match="pushes KV to one decode engine"):
        checked_node(ConfiguredEngine(url=DECODES[1], role="decode"), pool, others)
