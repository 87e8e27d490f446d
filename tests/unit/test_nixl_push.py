"""The legs of a push."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.tokens.ids import TokenIds, from_numbers
from pdproxy.transfer import nixl_push
from pdproxy.transfer.contract import Dispatch, Handle
from pdproxy.transfer.peers import Peer
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from tests.fakes.prompts import answered, nixl_params

COMPLETION = parse(Route.COMPLETIONS, b'{"prompt":"a b","model":"m"}')
KNOWN = Peer(0, 1, engine_id="push-p", host="10.0.0.1", port=5600, tp_size=2, pp_size=1)
PARAMS = nixl_params(
    remote_engine_id="push-p", tp_size=2, transfer_mode="push", remote_prefill_cached_tokens=3
)


def answer(**changed: Any) -> PrefillAnswer:
    """A prefill answer; None leaves a field of the params out."""
    return answered(
        {name: value for name, value in {**PARAMS, **changed}.items() if value is not None}
    )


def sent(handle: Handle, dispatch: Dispatch) -> dict[str, Any]:
    """What the decode engine is sent."""
    return dict(
        json.loads(nixl_push.decode(COMPLETION, COMPLETION.prompts[0], handle, dispatch).body)
    )


def test_nothing_is_promised_before_the_prefill_engine_is_known() -> None:
    assert nixl_push.promise(COMPLETION, Dispatch("leg", prefill_peer=Peer(0, 1))) is None
    assert nixl_push.promise(COMPLETION, Dispatch("leg")) is None


def test_the_promise_names_the_prefill_engine_and_no_blocks() -> None:
    dispatch = Dispatch("leg", prefill_peer=KNOWN)
    handle = nixl_push.promise(COMPLETION, dispatch)
    assert handle is not None
    assert sent(handle, dispatch)["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "push-p",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 1,
        "remote_request_id": "leg",
    }


@pytest.mark.parametrize("takes", [True, False])
def test_both_engines_are_sent_ids_or_neither(takes: bool) -> None:
    """Whoever makes ids of a text by itself may make others."""
    dispatch = Dispatch("leg", from_numbers([5, 6, 7]), prefill_takes_ids=takes, prefill_peer=KNOWN)
    handle = nixl_push.promise(COMPLETION, dispatch)
    assert handle is not None
    prefill = json.loads(nixl_push.prefill(COMPLETION, COMPLETION.prompts[0], dispatch).body)
    wanted: Any = [5, 6, 7] if takes else "a b"
    assert prefill["prompt"] == sent(handle, dispatch)["prompt"] == wanted
    assert handle.prompt_tokens == (3 if takes else 0)


def test_an_answer_shows_where_the_engine_is() -> None:
    dispatch = Dispatch("leg", prefill_peer=Peer(2, 4))
    assert nixl_push.peer_in(answer(), dispatch) == Peer(
        2, 4, "push-p", "10.0.0.1", 5600, tp_size=2, pp_size=1
    )
    handle = nixl_push.handle(COMPLETION, answer(), dispatch)
    assert isinstance(handle, Handle)
    assert (handle.prompt_tokens, handle.cached_tokens, handle.token_ids) == (4, 3, b"[1, 2, 3, 4]")
    assert sent(handle, Dispatch("leg", TokenIds(b"[1]", 1), prefill_peer=KNOWN))["prompt"] == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_host", "remote_port", "tp_size"])
def test_what_would_kill_a_decode_engine_is_never_sent(name: str) -> None:
    """A missing key is a `KeyError` there, or a request that waits for ever."""
    why = nixl_push.handle(COMPLETION, answer(**{name: None}), Dispatch("leg"))
    assert isinstance(why, str)
    assert name in why
    assert nixl_push.peer_in(answer(**{name: None}), Dispatch("leg")) is None


def test_an_engine_that_is_pulled_from_is_named() -> None:
    why = nixl_push.handle(COMPLETION, answer(transfer_mode="pull"), Dispatch("leg"))
    assert (
        why
        == "kv_transfer_params are not those of a push: the engine runs NixlConnector, which is "
        "connector nixl"
    )


def test_older_engines_do_not_name_the_mode() -> None:
    """vLLM 0.26.0."""
    assert isinstance(
        nixl_push.handle(COMPLETION, answer(transfer_mode=None), Dispatch("leg")), Handle
    )


def test_legs_go_to_the_ranks_of_the_dispatch() -> None:
    peers = {"prefill_peer": Peer(1, 2, "e", "h", 1, tp_size=1), "decode_peer": Peer(3, 4)}
    dispatch = Dispatch("leg", prefill_peer=peers["prefill_peer"], decode_peer=peers["decode_peer"])
    assert nixl_push.prefill(COMPLETION, COMPLETION.prompts[0], dispatch).headers == (
        (b"x-data-parallel-rank", b"1"),
    )
    handle = nixl_push.promise(COMPLETION, dispatch)
    assert handle is not None
    leg = nixl_push.decode(COMPLETION, COMPLETION.prompts[0], handle, dispatch)
    assert leg.headers == ((b"x-data-parallel-rank", b"3"),)
