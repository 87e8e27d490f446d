"""The Mooncake contract: what each leg is sent, and what becomes of a prefill answer."""

# The cases are those of vLLM's own tests of its connector (which params make it send, keep, hang or
# die) and of vllm-omni's tests of its orchestrator, seen from the proxy.

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.bodies import until_length
from pdproxy.transfer.contract import Dispatch, Handle
from pdproxy.transfer.mooncake import (
    CAPABILITIES,
    LEASE,
    MOONCAKE,
    decode_params,
    prefill_params,
    promise,
)
from pdproxy.transfer.peers import Peer, PeerSource
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt
from tests.fakes.prompts import parsed, read

KNOWN = Peer(engine_id="mc-p", address="http://10.0.0.1:8998", tp_size=1, pp_size=1)
ID = "0" * 31 + "7"
DISPATCH = Dispatch(ID, prefill_peer=KNOWN, decode_peer=Peer())
IDS = TokenIds(b"[5,6,7]", 3)
TO_D = {
    "transfer_id": f"xfer-{ID}",
    "remote_engine_id": "mc-p",
    "remote_bootstrap_addr": "http://10.0.0.1:8998",
    "do_remote_decode": False,
    "do_remote_prefill": True,
}


def prompt(of: Parsed) -> Prompt:
    return of.prompts[0]


def answer(
    route: Route = Route.COMPLETIONS, finish: str | None = "length", params: Any = None
) -> PrefillAnswer:
    """A prefill engine's answer, as recorded: without params."""
    ids = {"prompt_token_ids": [5, 6, 7]}
    choice = {
        "index": 0,
        "finish_reason": finish,
        "text": "x",
        **(ids if route is Route.COMPLETIONS else {}),
    }
    more = ids if route is Route.CHAT else {}
    usage = {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}
    return read({"choices": [choice], "usage": usage, "kv_transfer_params": params, **more})


def sent(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body)
    return found


def handle_of(given: PrefillAnswer, dispatch: Dispatch = DISPATCH) -> Handle:
    found = MOONCAKE.handle(parsed(), given, dispatch)
    assert isinstance(found, Handle)
    return found


# -- the prefill leg


def test_the_prefill_leg_ends_by_length() -> None:
    one = parsed(
        stop=["x"],
        stop_token_ids=[1],
        min_tokens=0,
        include_stop_str_in_output=True,
        ignore_eos=False,
        stream=True,
    )
    leg = MOONCAKE.prefill(one, prompt(one), DISPATCH)
    body = sent(leg.body)
    assert body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": f"xfer-{ID}",
    }
    found = {
        name: body[name]
        for name in ("stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens")
    }
    assert found == {
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "min_tokens": 1,
    }
    assert (body["max_tokens"], body["stream"], leg.headers) == (1, False, ())


@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT])
def test_each_leg_names_its_rank(route: Route) -> None:
    one = parsed(route)
    dispatch = msgspec.structs.replace(
        DISPATCH, prefill_peer=msgspec.structs.replace(KNOWN, rank=2, ranks=4)
    )
    dispatch = msgspec.structs.replace(dispatch, decode_peer=Peer(rank=1, ranks=2))
    assert MOONCAKE.prefill(one, prompt(one), dispatch).headers == (
        (b"x-data-parallel-rank", b"2"),
    )
    given = promise(one, dispatch)
    assert given is not None
    assert MOONCAKE.decode(one, prompt(one), given, dispatch).headers == (
        (b"x-data-parallel-rank", b"1"),
    )


# -- the handle


def test_a_promise_is_what_the_answer_gives() -> None:
    promised, made = promise(parsed(), DISPATCH), handle_of(answer())
    assert promised is not None
    assert json.loads(promised.params) == json.loads(made.params) == TO_D
    assert promised.remote_request_id == made.remote_request_id == f"xfer-{ID}"
    assert (made.prompt_tokens, json.loads(made.token_ids or b"")) == (3, [5, 6, 7])


@pytest.mark.parametrize(
    "peer",
    [
        None,
        Peer(),
        msgspec.structs.replace(KNOWN, engine_id=None),
        msgspec.structs.replace(KNOWN, address=None),
        msgspec.structs.replace(KNOWN, engine_id=""),
    ],
)
def test_without_a_complete_peer_nothing_is_promised_and_no_answer_is_used(
    peer: Peer | None,
) -> None:
    """A decode engine that lacks one param waits for ever."""
    dispatch = msgspec.structs.replace(DISPATCH, prefill_peer=peer)
    assert promise(parsed(), dispatch) is None
    assert (
        MOONCAKE.handle(parsed(), answer(), dispatch)
        == "its bootstrap server has not named its engine id"
    )


@pytest.mark.parametrize("finish", ["stop", "abort", "error", "tool_calls", None])
def test_without_an_end_by_length_there_is_no_kv(finish: str | None) -> None:
    found = MOONCAKE.handle(parsed(), answer(finish=finish), DISPATCH)
    assert found == f"the prefill ended by {finish}, not by length: such KV is not kept"


@pytest.mark.parametrize("params", ["text", 5, [], [1]])
def test_params_that_are_no_object_are_an_error(params: Any) -> None:
    found = MOONCAKE.handle(parsed(), answer(params=params), DISPATCH)
    assert isinstance(found, str)
    assert found.startswith("kv_transfer_params can't be read")


def test_an_answer_changes_no_param_that_the_proxy_knows() -> None:
    """The decode engine connects to that address: an engine that has been taken over must not
    choose it.
    """
    known = {
        "remote_engine_id": "other",
        "remote_bootstrap_addr": "http://169.254.169.254:80",
        "transfer_id": "xfer-other",
    }
    given = {**known, "do_remote_prefill": False, "do_remote_decode": True, "more": [1]}
    assert json.loads(handle_of(answer(params=given)).params) == {**TO_D, "more": [1]}


@given(
    st.dictionaries(
        st.sampled_from([*TO_D, "more"]),
        st.none() | st.booleans() | st.text(max_size=3) | st.just({}),
    )
)
def test_whatever_is_answered_the_decode_engine_can_begin(params: dict[str, Any]) -> None:
    """Its three keys are there, and not empty; the flags are its own."""
    found = json.loads(handle_of(answer(params=params)).params)
    assert all(found[name] for name in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr"))
    assert (found["do_remote_prefill"], found["do_remote_decode"]) == (True, False)


# -- the decode leg


def test_the_decode_leg_is_the_clients_request_with_params() -> None:
    one = parsed(stop=["x"], max_tokens=9, stream=True)
    given = promise(one, DISPATCH)
    assert given is not None
    body = sent(MOONCAKE.decode(one, prompt(one), given, DISPATCH).body)
    assert body.pop("kv_transfer_params") == TO_D
    assert (body["stop"], body["max_tokens"], body["stream"], body["prompt"]) == (
        ["x"],
        9,
        True,
        "p" * 50,
    )


def test_a_chat_gets_the_ids_that_the_prefill_engine_returned() -> None:
    """Prefill engines do not compare prompts: another template would give wrong answers."""
    one = parsed(Route.CHAT)
    body = sent(MOONCAKE.decode(one, prompt(one), handle_of(answer(Route.CHAT)), DISPATCH).body)
    assert body["kv_transfer_params"] == {**TO_D, "prompt_token_ids": [5, 6, 7]}


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT])
def test_both_legs_have_the_proxys_ids_or_neither(route: Route, takes: bool) -> None:
    one = parsed(route)
    dispatch = msgspec.structs.replace(DISPATCH, ids=IDS, prefill_takes_ids=takes)
    given = promise(one, dispatch)
    assert given is not None
    bodies = [
        sent(MOONCAKE.prefill(one, prompt(one), dispatch).body),
        sent(MOONCAKE.decode(one, prompt(one), given, dispatch).body),
    ]
    for body in bodies:
        found = (
            body["prompt"]
            if route is Route.COMPLETIONS
            else body["kv_transfer_params"].get("prompt_token_ids")
        )
        assert (found == [5, 6, 7]) is takes


def test_a_release_is_refused_behind_the_schema_with_the_transfers_params() -> None:
    """`max_tokens` 0 passes the schema; the handler refuses it, and the connector then asks for no
    blocks.
    """
    release = MOONCAKE.holder.release_body("tiny", handle_of(answer()))  # type: ignore[attr-defined]
    body = sent(release)
    assert (body["max_tokens"], body["stream"], body["model"]) == (0, False, "tiny")
    assert body["kv_transfer_params"] == TO_D


# -- params, by the rules of vllm-omni


def test_a_prefill_engine_is_asked_to_keep_the_kv() -> None:
    assert prefill_params("r") == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "xfer-r",
    }


def test_the_one_token_ends_by_length() -> None:
    """No stop list of the client's ends P's token, whatever it is; the client's fields stay as they
    are.
    """
    fields = {
        "stop": msgspec.Raw(b'["x"]'),
        "stop_token_ids": msgspec.Raw(b"[5]"),
        "seed": msgspec.Raw(b"3"),
    }
    before = dict(fields)
    wanted: dict[str, object] = {
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "min_tokens": 1,
        "seed": 3,
    }

    def changed(route: Route, fields: Fields) -> dict[str, object]:
        found = until_length(fields, route.form)
        return {name: msgspec.json.decode(value) for name, value in found.items()}

    assert changed(Route.COMPLETIONS, fields) == wanted
    inner = {"sampling_params": msgspec.Raw(msgspec.json.encode(fields))}
    assert changed(Route.GENERATE, inner) == {"sampling_params": wanted}
    assert changed(Route.MESSAGES, {"seed": fields["seed"]}) == {"stop_sequences": [], "seed": 3}
    assert fields == before


FETCH = {"do_remote_decode": False, "do_remote_prefill": True}
RANK = ("r", "e", "http://p:8998")


def test_a_decode_engine_is_asked_to_fetch_the_kv() -> None:
    named = {
        "transfer_id": "xfer-r",
        "remote_engine_id": "e",
        "remote_bootstrap_addr": "http://p:8998",
    }
    assert decode_params(*RANK) == {**FETCH, **named}


# -- what it declares


def test_what_follows_for_the_legs() -> None:
    holder = MOONCAKE.holder
    assert holder.decode_waits
    assert [holder.prefill_again(status) for status in (None, 400, 429, 500, 502, 503, 504)] == [
        *(False, False, True, False, False, True, False)
    ]
    assert holder.stuck_for == LEASE == 480  # type: ignore[attr-defined]
    assert not holder.handshakes  # type: ignore[attr-defined]
    assert CAPABILITIES.orders == ("concurrent", "sequential")
    assert CAPABILITIES.peers_from is PeerSource.BOOTSTRAP
