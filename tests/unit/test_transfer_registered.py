"""The contracts of engines that register: ids that vLLM's own expressions read, what each leg is
sent, and what is released.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.tokens.ids import from_numbers
from pdproxy.transfer import moriio, p2p_nccl
from pdproxy.transfer.contract import (
    Contract,
    Dispatch,
    Handle,
    HeldByDecode,
    LegRequest,
    PushedToDecode,
)
from pdproxy.transfer.moriio import MORIIO
from pdproxy.transfer.p2p_nccl import P2P_NCCL
from pdproxy.transfer.peers import Peer
from pdproxy.wire.registrations import Registration
from pdproxy.wire.route import Route
from tests.fakes.prompts import answered, moriio_params, parsed

MINTED = "0123456789abcdef" * 2
P_MORIIO = "host:10.0.0.1,handshake:6301,notify:61005"
D_MORIIO = "host:10.0.0.2,handshake:6302,notify:61006"
ROUTES = pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT])

# The expressions of vLLM 0.32.0 `moriio_common.py` and of its `p2p_nccl_connector.py`.
MORIIO_PREFILL = re.compile(r"___prefill_addr_(.+?)___decode_addr_")
MORIIO_DECODE = re.compile(r"___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$")
P2P_PREFILL = re.compile(r"___prefill_addr_(.*):(\d+)___")
P2P_DECODE = re.compile(r"___decode_addr_(.*):(\d+)")


def named(contract: Contract, prefill: Peer, decode: Peer, **more: Any) -> Dispatch:
    """A dispatch with the id that the contract makes."""
    bare = Dispatch(MINTED, prefill_peer=prefill, decode_peer=decode, **more)
    return Dispatch(contract.leg_id(MINTED, bare), prefill_peer=prefill, decode_peer=decode, **more)


def of_p2p() -> Dispatch:
    """A dispatch of P2P NCCL."""
    return named(P2P_NCCL, Peer(address="10.0.0.1:21001"), Peer(address="10.0.0.2:22001"))


def of_moriio(mode: str = "READ", rank: int = 0, **more: Any) -> Dispatch:
    """A dispatch of MoRIIO: P has two ranks, D one."""
    prefill = Peer(rank, 2, address=P_MORIIO, tp_size=8, mode=mode)
    return named(MORIIO, prefill, Peer(address=D_MORIIO, tp_size=4, mode=mode), **more)


def body_of(leg: LegRequest) -> Any:
    """A leg's body."""
    return json.loads(leg.body)


# -- ids


@pytest.mark.parametrize("internal", ["cmpl-{}-0-1a2b3c4d", "chatcmpl-{}-1a2b3c4d", "cmpl-{}-0"])
def test_engines_find_each_other_in_their_internal_ids(internal: str) -> None:
    name = internal.format(of_p2p().leg_id)
    found_p, found_d = P2P_PREFILL.search(name), P2P_DECODE.search(name)
    assert found_p is not None
    assert found_p.groups() == ("10.0.0.1", "21001")
    assert found_d is not None
    assert found_d.groups() == ("10.0.0.2", "22001")
    name = internal.format(of_moriio().leg_id)
    one, other = MORIIO_PREFILL.search(name), MORIIO_DECODE.search(name)
    assert one is not None
    assert other is not None
    assert (one[1], other[1]) == (P_MORIIO, D_MORIIO)


_WILD = st.text(alphabet="ab:._-,0123456789hostndiyk", min_size=1, max_size=60)


@given(p=_WILD, d=_WILD)
def test_no_address_that_is_accepted_leads_engines_astray(p: str, d: str) -> None:
    """Whatever an engine registers, the other one finds just that in the id, or the registration is
    refused.
    """
    peers = [
        p2p_nccl.registered(Registration(role="P", http_address="a:1", zmq_address=one))
        for one in (p, f"{d}:22")
    ]
    if any(isinstance(one, str) for one in peers):
        return
    prefill, decode = (one[0] for one in peers if not isinstance(one, str))
    name = f"cmpl-{named(P2P_NCCL, prefill, decode).leg_id}-0"
    one, other = P2P_PREFILL.search(name), P2P_DECODE.search(name)
    assert one is not None
    assert ":".join(one.groups()) == p
    assert other is not None
    assert ":".join(other.groups()) == f"{d}:22"


@given(host=st.text(alphabet="ab:._-0123456789", min_size=1, max_size=40))
def test_no_host_that_is_accepted_leads_moriio_astray(host: str) -> None:
    address = f"host:{host},handshake:1,notify:2"
    found = moriio.registered(
        Registration(role="P", http_address="a:1", zmq_address=address, transfer_mode="READ")
    )
    if isinstance(found, str):
        return
    name = f"cmpl-{named(MORIIO, found[0], found[0]).leg_id}-0-1a2b3c4d"
    one, other = MORIIO_PREFILL.search(name), MORIIO_DECODE.search(name)
    assert one is not None
    assert other is not None
    assert (one[1], other[1]) == (address, address)


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "a:b", "a:1:", "a___b:1", "_a:1", "a:123456", P_MORIIO]
)
def test_addresses_that_are_not_p2p_nccl_s(address: str) -> None:
    found = p2p_nccl.registered(Registration(role="P", http_address="a:1", zmq_address=address))
    assert isinstance(found, str)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:1",
        "host:a,notify:1,handshake:2",
        "host:a,handshake:x,notify:1",
        "host:___,handshake:1,notify:2",
    ],
)
def test_addresses_that_are_not_moriio_s(address: str) -> None:
    found = moriio.registered(
        Registration(role="P", http_address="a:1", zmq_address=address, transfer_mode="READ")
    )
    assert isinstance(found, str)


# -- P2P NCCL


@ROUTES
def test_p2p_nccl_s_legs_are_the_clients_requests(route: Route) -> None:
    request = parsed(route, max_tokens=9, stream=True)
    p = body_of(P2P_NCCL.prefill(request, request.prompts[0], of_p2p()))
    given = P2P_NCCL.handle(request, answered(None), of_p2p())
    assert isinstance(given, Handle)
    d = body_of(P2P_NCCL.decode(request, request.prompts[0], given, of_p2p()))
    assert (p["max_tokens"], p["stream"], d["max_tokens"], d["stream"]) == (1, False, 9, True)
    assert "kv_transfer_params" not in p
    assert "kv_transfer_params" not in d
    assert P2P_NCCL.decode_has_leg_id


@ROUTES
def test_p2p_nccl_s_kv_is_dropped_by_a_prompt_of_one_token_with_the_same_id(route: Route) -> None:
    """On the same route: vLLM's internal id begins with it."""
    given = P2P_NCCL.handle(parsed(route), answered(None), of_p2p())
    assert isinstance(given, Handle)
    assert given.release is not None
    assert given.release.route is route
    assert given.release.headers == ((b"x-request-id", (of_p2p().leg_id or "").encode()),)
    body = body_of(given.release)
    assert (body["model"], body["max_tokens"], body["stream"]) == ("tiny", 1, False)
    assert (
        body["prompt"] == [0] if route is Route.COMPLETIONS else body["truncate_prompt_tokens"] == 1
    )
    holder = P2P_NCCL.holder
    assert isinstance(holder, HeldByDecode)
    assert holder.drops_aborted
    assert holder.pushed_to("http://d") == "http://d"


def test_p2p_nccl_s_engines_serve_nothing_alone() -> None:
    assert P2P_NCCL.capabilities.alone_on == ("aggregated",)
    assert MORIIO.capabilities.alone_on == ("aggregated", "prefill")


# -- MoRIIO


@ROUTES
def test_moriio_s_prefill_leg_names_d_and_ends_by_length(route: Route) -> None:
    request = parsed(route, max_tokens=9, stop=["x"], stop_token_ids=[5], min_tokens=3)
    leg = MORIIO.prefill(request, request.prompts[0], of_moriio(rank=1))
    body = body_of(leg)
    assert body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": f"tx-{MINTED}",
        "remote_dp_size": 1,
        "remote_tp_size": 4,
    }
    assert (body["stop"], body["stop_token_ids"], body["min_tokens"]) == ([], [], 1)
    assert leg.headers == ((b"x-data-parallel-rank", b"1"),)


@ROUTES
def test_moriio_reads_with_p_s_answer_unchanged(route: Route) -> None:
    request, dispatch = parsed(route), of_moriio("READ", 1)
    given = MORIIO.handle(request, answered(moriio_params()), dispatch)
    assert isinstance(given, Handle)
    leg = MORIIO.decode(request, request.prompts[0], given, dispatch)
    params = body_of(leg)["kv_transfer_params"]
    sent = params.pop("prompt_token_ids", None)
    assert sent == (None if route is Route.COMPLETIONS else [1, 2, 3, 4])
    assert params == moriio_params()
    assert leg.headers == ()


def test_moriio_writes_into_blocks_that_d_chooses() -> None:
    request, dispatch = parsed(Route.CHAT), of_moriio("WRITE", 1)
    given = MORIIO.handle(request, answered(moriio_params()), dispatch)
    assert isinstance(given, Handle)
    params = body_of(MORIIO.decode(request, request.prompts[0], given, dispatch))[
        "kv_transfer_params"
    ]
    assert params == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": f"tx-{MINTED}",
        "remote_dp_size": 2,
        "remote_dp_rank": 1,
        "remote_tp_size": 8,
        "prompt_token_ids": [1, 2, 3, 4],
    }


def test_moriio_s_ids_that_the_proxy_made() -> None:
    request, dispatch = parsed(), of_moriio(rank=1, ids=from_numbers([1, 2, 3, 4]))
    assert body_of(MORIIO.prefill(request, request.prompts[0], dispatch))["prompt"] == [1, 2, 3, 4]
    given = MORIIO.handle(request, answered(moriio_params()), dispatch)
    assert isinstance(given, Handle)
    body = body_of(MORIIO.decode(request, request.prompts[0], given, dispatch))
    assert body["prompt"] == [1, 2, 3, 4]
    assert "prompt_token_ids" not in body["kv_transfer_params"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"do_remote_prefill": False}, "another transfer"),
        ({"transfer_id": "tx-other"}, "another transfer"),
        ({"remote_dp_rank": 0}, "data-parallel rank 0 served a leg to rank 1"),
        ({"remote_block_ids": []}, "hold no blocks"),
        ({"remote_block_ids": [[1], []]}, "hold no blocks"),
        ({"remote_block_ids": None}, "hold no blocks"),
        ({"remote_host": ""}, "hold no blocks"),
        ({"remote_notify_port": None}, "incomplete"),
        ({"remote_engine_id": 3}, "incomplete"),
    ],
)
def test_answers_that_may_not_reach_d(changes: dict[str, Any], why: str) -> None:
    found = MORIIO.handle(parsed(), answered(moriio_params(**changes)), of_moriio(rank=1))
    assert isinstance(found, str)
    assert why in found


def test_an_answer_without_params_says_what_may_be_wrong() -> None:
    found = MORIIO.handle(parsed(), answered(None), of_moriio())
    assert isinstance(found, str)
    assert "kv_producer" in found


def test_moriio_s_blocks_are_released_by_a_refusal_with_p_s_answer() -> None:
    """Not where P writes: a decode engine may wait for just that."""
    holder = MORIIO.holder
    assert isinstance(holder, PushedToDecode)
    assert holder.release_body is not None
    given = MORIIO.handle(parsed(), answered(moriio_params()), of_moriio("READ", 1))
    assert isinstance(given, Handle)
    body = json.loads(holder.release_body("tiny", given) or b"")
    assert (body["max_tokens"], body["kv_transfer_params"]) == (0, moriio_params())
    given = MORIIO.handle(parsed(), answered(moriio_params()), of_moriio("WRITE", 1))
    assert isinstance(given, Handle)
    assert holder.release_body("tiny", given) is None


def test_moriio_asks_both_at_once_where_p_writes() -> None:
    request = parsed()
    assert MORIIO.promise is not None
    assert MORIIO.promise(request, of_moriio("READ")) is None
    ids = from_numbers([1, 2, 3, 4])
    for dispatch in (of_moriio("WRITE"), of_moriio("WRITE", ids=ids)):
        promised = MORIIO.promise(request, dispatch)
        assert promised is not None
        sent = body_of(MORIIO.decode(request, request.prompts[0], promised, dispatch))
        assert sent["kv_transfer_params"]["transfer_id"] == f"tx-{MINTED}"
        assert sent["prompt"] == ([1, 2, 3, 4] if dispatch.ids else "p" * 50)
