"""Engines with several ranks and workers: which sizes go together, and which numbers each engine is
sent of the other one.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdproxy.fleet.peers import Peers
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.settings.engines import ConfiguredEngine, Facts
from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.pools import Pool
from pdproxy.settings.transfer import check_pairs
from pdproxy.transfer import moriio, nixl, nixl_push
from pdproxy.transfer.contract import Dispatch, Handle
from pdproxy.transfer.moriio import MORIIO
from pdproxy.transfer.peers import Peer
from pdproxy.wire.engine import PrefillAnswer
from pdproxy.wire.registrations import Registration
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from tests.fakes.prompts import answered, moriio_params, nixl_params
from tests.unit.test_registration import TIMEOUT, D, P, Stage, beat

MINTED = "0123456789abcdef" * 2
P_ADDRESS = "host:10.0.0.1,handshake:6301,notify:61005"
D_ADDRESS = "host:10.0.0.2,handshake:6301,notify:61005"
COMPLETION = parse(Route.COMPLETIONS, b'{"prompt":"a b","model":"m"}')
TP8, DP8 = (1, 8), (8, 1)
"""Ranks of an engine, workers of each: what eight GPUs are used for."""
PAIRS = [(TP8, TP8), (TP8, DP8), (DP8, DP8), (DP8, TP8)]
TOPOLOGIES = [(1, 1, 1), (4, 1, 1), (4, 4, 1), (1, 1, 2), (4, 4, 2), (1, 2, 1)]
"""`tp_size`, `dcp_size` and `pp_size` of a prefill engine's answer."""


def of_nixl(tp: int, dcp: int, pp: int, mode: str) -> PrefillAnswer:
    """The answer of a prefill engine with NIXL."""
    return answered(nixl_params(tp_size=tp, dcp_size=dcp, pp_size=pp, transfer_mode=mode))


def of_moriio(rank: int, ranks: int, local: int) -> dict[str, Any]:
    """The params of a rank of a prefill engine with MoRIIO."""
    own = {
        "remote_dp_rank": rank,
        "remote_dp_size": ranks,
        "remote_dp_size_local": local,
        "tp_size": 1,
    }
    return moriio_params(remote_handshake_port=6301, **own)


def between(
    prefill: tuple[int, int], decode: tuple[int, int], mode: str, rank: int = 0
) -> Dispatch:
    """A dispatch of MoRIIO to a rank of P. Sides: ranks, workers of each."""
    p = Peer(rank, prefill[0], address=P_ADDRESS, tp_size=prefill[1], mode=mode)
    d = Peer(0, decode[0], address=D_ADDRESS, tp_size=decode[1], mode=mode)
    return Dispatch(
        f"___prefill_addr_{P_ADDRESS}___decode_addr_{D_ADDRESS}_{MINTED}",
        prefill_peer=p,
        decode_peer=d,
    )


def params_of(body: bytes) -> dict[str, Any]:
    """A leg's `kv_transfer_params`."""
    return dict(json.loads(body)["kv_transfer_params"])


# -- what is sent of the other engine


@pytest.mark.parametrize(("tp", "dcp", "pp"), TOPOLOGIES)
def test_where_p_is_read_its_sizes_go_on_unchanged(tp: int, dcp: int, pp: int) -> None:
    handle = nixl.handle(COMPLETION, of_nixl(tp, dcp, pp, "pull"), Dispatch())
    assert isinstance(handle, Handle)
    sent = params_of(nixl.decode(COMPLETION, COMPLETION.prompts[0], handle, Dispatch()).body)
    assert (sent["tp_size"], sent["dcp_size"], sent["pp_size"], sent["transfer_mode"]) == (
        tp,
        dcp,
        pp,
        "pull",
    )


@pytest.mark.parametrize(("tp", "dcp", "pp"), TOPOLOGIES)
@pytest.mark.parametrize("first", [True, False])
def test_where_p_pushes_d_waits_for_each_of_its_workers(
    first: bool, tp: int, dcp: int, pp: int
) -> None:
    """A write for each stage, from each worker: in the promise as behind the answer from which it
    was learnt.
    """
    dispatch = Dispatch("leg", prefill_peer=Peer(1, 2))
    got = of_nixl(tp, dcp, pp, "push")
    if first:
        handle: Any = nixl_push.handle(COMPLETION, got, dispatch)
    else:
        peers = Peers(2)
        learnt = nixl_push.peer_in(got, dispatch)
        assert learnt is not None
        peers.learn(learnt)
        dispatch = Dispatch("leg", prefill_peer=peers.get(1))
        handle = nixl_push.promise(COMPLETION, dispatch)
    assert isinstance(handle, Handle)
    sent = params_of(nixl_push.decode(COMPLETION, COMPLETION.prompts[0], handle, dispatch).body)
    assert (sent["tp_size"], sent["pp_size"], sent["remote_engine_id"]) == (tp, pp, "p")


def test_an_engine_without_a_pipeline_does_not_say_so() -> None:
    """vLLM's default is one stage."""
    params = nixl_params(tp_size=2, transfer_mode="push")
    del params["pp_size"]
    learnt = nixl_push.peer_in(answered(params), Dispatch("leg"))
    assert learnt is not None
    assert (learnt.tp_size, learnt.pp_size) == (2, 1)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_moriio_s_p_is_sent_d_s_sizes(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    for mode in ("READ", "WRITE"):
        dispatch = between(prefill, decode, mode)
        sent = params_of(MORIIO.prefill(COMPLETION, COMPLETION.prompts[0], dispatch).body)
        assert (sent["remote_dp_size"], sent["remote_tp_size"]) == decode


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_moriio_s_d_is_sent_p_s_sizes_and_rank(
    prefill: tuple[int, int], decode: tuple[int, int], rank: int
) -> None:
    dispatch = between(prefill, decode, "WRITE", rank % prefill[0])
    handle = moriio.promise(COMPLETION, dispatch)
    assert handle is not None
    sent = params_of(MORIIO.decode(COMPLETION, COMPLETION.prompts[0], handle, dispatch).body)
    assert (sent["remote_dp_size"], sent["remote_tp_size"]) == prefill
    assert sent["remote_dp_rank"] == rank % prefill[0]
    headers = MORIIO.prefill(COMPLETION, COMPLETION.prompts[0], dispatch).headers
    assert headers == (((b"x-data-parallel-rank", b"%d" % rank),) if prefill[0] > 1 else ())


@pytest.mark.parametrize(
    ("rank", "ranks", "local"), [(11, 16, 8), (4, 8, 8), (0, 1, 1), (0, 16, 8)]
)
def test_the_rank_that_worked_is_the_one_that_d_reads(rank: int, ranks: int, local: int) -> None:
    """As P has said it. If it is not the rank that the leg was sent to, the answer is not used."""
    said = of_moriio(rank, ranks, local)
    dispatch = between((ranks, 1), TP8, "READ", rank)
    handle = MORIIO.handle(COMPLETION, answered(said), dispatch)
    assert isinstance(handle, Handle)
    sent = params_of(MORIIO.decode(COMPLETION, COMPLETION.prompts[0], handle, dispatch).body)
    assert sent == said
    other = between((ranks + 1, 1), TP8, "READ", rank + 1)
    assert MORIIO.handle(COMPLETION, answered(said), other) == (
        f"data-parallel rank {rank} served a leg to rank {rank + 1}"
    )


@pytest.mark.parametrize(
    ("given", "ranks", "tp"),
    [((None, None), 1, 1), ((1, 8), 1, 8), ((8, 1), 8, 1), ((16, 4), 16, 4)],
)
def test_a_registration_s_sizes(given: tuple[int | None, int | None], ranks: int, tp: int) -> None:
    beat = Registration(role="P", http_address="p:1", zmq_address=P_ADDRESS, transfer_mode="READ")
    found = moriio.registered(msgspec.structs.replace(beat, dp_size=given[0], tp_size=given[1]))
    assert not isinstance(found, str)
    assert [(peer.rank, peer.ranks, peer.tp_size) for peer in found] == [
        (rank, ranks, tp) for rank in range(ranks)
    ]


# -- which sizes go together

SIZES = [(1, 1), (2, 2), (1, 2), (2, 1), (4, 4), (8, 4), (4, 8), (1, 8), (8, 1)]
NO_SIZES = [(6, 4), (4, 6), (3, 2), (8, 3)]


def in_settings(connector: str, prefill: int, decode: int) -> str | None:
    """What is wrong with the settings of a pair."""
    engines = (
        ConfiguredEngine(
            url="http://p:1", role="prefill", facts=Facts(tensor_parallel_size=prefill)
        ),
        ConfiguredEngine(url="http://d:1", role="decode", facts=Facts(tensor_parallel_size=decode)),
    )
    found = Mistakes()
    check_pairs(Pool(connector=connector, nodes=engines), engines, ("pools", 0), found)
    try:
        found.raise_any()
    except SettingsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake", "moriio"])
def test_sizes_of_which_one_is_a_multiple(connector: str) -> None:
    for pair in SIZES:
        assert in_settings(connector, *pair) is None, pair
    for pair in NO_SIZES:
        assert "one must be a multiple of the other" in (in_settings(connector, *pair) or ""), pair


@pytest.mark.parametrize("connector", ["p2p-nccl", "cpu", "shared", "lmcache-pd"])
def test_workers_that_are_paired_by_their_numbers(connector: str) -> None:
    for prefill, decode in (*SIZES, *NO_SIZES):
        said = in_settings(connector, prefill, decode) or ""
        assert (f"{connector} needs the same" in said) == (prefill != decode), (prefill, decode)


@pytest.mark.parametrize("pair", [*SIZES, *NO_SIZES], ids=str)
def test_engines_that_report_their_sizes_are_paired_by_them(pair: tuple[int, int]) -> None:
    """The workers of sizes that don't fit raise an error at their first transfer, and the engine
    dies.
    """
    urls = ("http://p", "http://d")
    ledger = Ledger(
        [EngineSpec(urls[0], Role.PREFILL), EngineSpec(urls[1], Role.DECODE)],
        LedgerOptions(breaker_failures=3, breaker_cooldown=1),
    )
    for url, size in zip(urls, pair, strict=True):
        ledger.mark_up(url, Evidence(frozenset({"m"}), "1", 16, (), 0, 1.0))
        assert ledger.mark_kv(url, None, "READ", size)
        assert not ledger.mark_kv(url, None, "READ", size)
    said = f"tensor-parallel sizes {pair[0]} / {pair[1]}: one must be a multiple of the other"
    expected = [f"http://p and http://d are not paired: {said}"] if pair in NO_SIZES else []
    assert ledger.shortcomings(0.0) == expected
    ledger.mark_kv(urls[1], None, "READ", pair[0])
    assert ledger.shortcomings(0.0) == []


@pytest.mark.parametrize(
    ("sizes", "fit"), [((8, 4), True), ((4, 8), True), ((6, 4), False), ((4, 6), False)]
)
async def test_engines_that_register_with_sizes_that_do_not_fit(
    sizes: tuple[int, int], fit: bool
) -> None:
    """They are named in `/ready`, and paired as soon as one of them comes back with another
    size.
    """
    stage = Stage(moriio.registered)

    def beats(url: str, role: str, size: int, connection: bytes) -> None:
        one = beat(url, role, P_ADDRESS, dp_size=1, tp_size=size, transfer_mode="READ")
        stage.known.receive(one, connection, "10.0.0.1")

    beats(P, "P", sizes[0], b"1")
    beats(D, "D", sizes[1], b"2")
    said = (
        f"{P} and {D} are not paired: tensor-parallel sizes {sizes[0]} / {sizes[1]}: one must be "
        f"a multiple of the other"
    )
    assert stage.ledger.shortcomings(0.0) == ([] if fit else [said])
    await stage.clock.advance(TIMEOUT + 1)
    beats(P, "P", sizes[1], b"1")
    beats(D, "D", sizes[1], b"2")
    assert stage.ledger.shortcomings(0.0) == []
