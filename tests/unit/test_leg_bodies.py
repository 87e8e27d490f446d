"""What both engines are sent of a client's fields, by every contract that moves KV between two
engines.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.transfer import registry
from pdproxy.transfer.contract import Contract, Dispatch, Handle
from pdproxy.transfer.peers import Peer
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route
from tests.fakes.prompts import answered

MINTED = "0123456789abcdef" * 2
KINDS = [
    "nixl",
    "nixl-push",
    "mooncake",
    "moriio READ",
    "moriio WRITE",
    "p2p-nccl",
    "cpu",
    "shared",
]
NO_PARAMS = ("p2p-nccl", "shared")
ADDRESS = "host:10.0.0.1,handshake:6301,notify:61005"
PROMPTS: dict[Route, dict[str, Any]] = {
    Route.COMPLETIONS: {"prompt": "word " * 60},
    Route.CHAT: {"messages": [{"role": "user", "content": "word " * 60}]},
}
EACH = pytest.mark.parametrize("kind", KINDS)
ROUTES = pytest.mark.parametrize("route", list(PROMPTS), ids=lambda route: route.name.lower())
ANSWERED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4, 5]],
    "remote_engine_id": "p",
    "remote_request_id": "cmpl-x-0-12345678",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_handshake_port": 6301,
    "remote_notify_port": 61005,
    "remote_dp_rank": 0,
    "remote_num_tokens": 70,
    "tp_size": 1,
    "transfer_id": f"tx-{MINTED}",
    "prefill_request_id": "cmpl-x",
}
"""What one of these prefill engines answers, with the fields of all."""


def contract_of(kind: str) -> tuple[Contract, Dispatch]:
    """A contract, and a dispatch of it."""
    name, _, mode = kind.partition(" ")
    entry = registry.entry_of(name)
    contract = entry.build(entry.options())
    address = {"p2p-nccl": "10.0.0.1:21001", "mooncake": "http://10.0.0.1:8998"}.get(name, ADDRESS)
    peer = Peer(
        engine_id="p",
        host="10.0.0.1",
        port=5600,
        address=address,
        tp_size=1,
        pp_size=1,
        mode=mode or None,
    )
    dispatch = Dispatch(MINTED, prefill_peer=peer, decode_peer=peer)
    return contract, Dispatch(
        contract.leg_id(MINTED, dispatch), prefill_peer=peer, decode_peer=peer
    )


def legs(kind: str, parsed: Parsed) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bodies of both legs."""
    contract, dispatch = contract_of(kind)
    (prompt,) = parsed.prompts
    p = json.loads(contract.prefill(parsed, prompt, dispatch).body)
    params = None if kind in (*NO_PARAMS, "mooncake") else ANSWERED
    given = contract.handle(parsed, answered(params, list(range(70))), dispatch)
    assert isinstance(given, Handle), given
    return p, json.loads(contract.decode(parsed, prompt, given, dispatch).body)


def asked(route: Route, **fields: Any) -> Parsed:
    """A client's request."""
    return parse(route, json.dumps({"model": "m", **PROMPTS[route], **fields}).encode())


@EACH
@ROUTES
def test_the_prefill_leg_makes_one_token_and_does_not_stream(kind: str, route: Route) -> None:
    fields = {
        "max_tokens": 30,
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 5,
        "seed": 42,
    }
    p, d = legs(kind, asked(route, **fields))
    assert (p["max_tokens"], p["stream"], p["min_tokens"], p["seed"]) == (1, False, 1, 42)
    assert "stream_options" not in p
    assert "max_completion_tokens" not in p
    assert {name: d[name] for name in fields} == fields


@EACH
@pytest.mark.parametrize("limit", [1, 30])
def test_a_chats_other_limit_is_one_too(kind: str, limit: int) -> None:
    p, d = legs(kind, asked(Route.CHAT, max_completion_tokens=limit))
    assert (p["max_tokens"], p["max_completion_tokens"]) == (1, 1)
    assert (d["max_completion_tokens"], "max_tokens" in d) == (limit, False)


@EACH
@ROUTES
def test_a_request_without_limits_gets_none_but_on_its_prefill_leg(kind: str, route: Route) -> None:
    p, d = legs(kind, asked(route))
    assert p["max_tokens"] == 1
    assert not {"max_completion_tokens", "min_tokens"} & p.keys() or kind.startswith(
        ("mooncake", "moriio")
    )
    assert not {"max_tokens", "max_completion_tokens", "min_tokens", "stop"} & d.keys()


@EACH
@ROUTES
def test_who_prefills_and_who_decodes(kind: str, route: Route) -> None:
    """And nothing that a client has sent under that name."""
    p, d = legs(
        kind,
        asked(route, kv_transfer_params={"do_remote_prefill": True, "remote_engine_id": "mine"}),
    )
    if kind in NO_PARAMS:
        assert not {"kv_transfer_params"} & (p.keys() | d.keys())
        return
    ours, theirs = p.get("kv_transfer_params"), d["kv_transfer_params"]
    assert "mine" not in json.dumps([ours, theirs])
    if kind == "cpu":
        assert ours is None
        assert theirs["prefill_request_id"] == "cmpl-x"
        return
    assert ours is not None
    assert (ours["do_remote_decode"], ours["do_remote_prefill"]) == (True, False)
    assert (theirs["do_remote_decode"], theirs["do_remote_prefill"]) == (False, True)


@EACH
@ROUTES
def test_the_request_itself_is_not_changed(kind: str, route: Route) -> None:
    """Further attempts are made of it."""
    parsed = asked(
        route, max_tokens=30, stop=["x"], stream=True, stream_options={"include_usage": True}
    )
    before = {name: bytes(value) for name, value in parsed.fields.items()}
    legs(kind, parsed)
    assert {name: bytes(value) for name, value in parsed.fields.items()} == before
