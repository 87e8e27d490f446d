"""Ranks of an engine, as other engines reach them."""

from __future__ import annotations

from pdproxy.fleet.peers import Peers
from pdproxy.scheduling.compatibility import prefill_and_decode
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.transfer.peers import Peer


def test_ranks_take_turns_whether_they_are_known_or_not() -> None:
    peers = Peers(3)
    peers.learn(Peer(1, 3, engine_id="b"))
    taken = [peers.take_turn() for _ in range(4)]
    assert [(peer.rank, peer.engine_id) for peer in taken] == [
        (0, None),
        (1, "b"),
        (2, None),
        (0, None),
    ]
    assert peers.missing == (0, 2)


def test_a_rank_that_the_engine_does_not_have_is_ignored() -> None:
    peers = Peers(2)
    for rank in (-1, 2, 10**9):
        peers.learn(Peer(rank, engine_id="x"))
    assert peers.missing == (0, 1)


def test_forgetting_forgets_all_ranks() -> None:
    peers = Peers(1)
    peers.learn(Peer(engine_id="a"))
    peers.forget()
    assert peers.get(0) == Peer(0, 1)


def test_only_engines_with_several_ranks_get_the_header_of_a_rank() -> None:
    assert Peer(0, 1).headers == ()
    assert Peer(3, 4).headers == ((b"x-data-parallel-rank", b"3"),)


def test_engines_that_can_not_transfer_kv_yet_are_not_paired() -> None:
    ledger = Ledger(
        [EngineSpec("http://p", Role.PREFILL), EngineSpec("http://d", Role.DECODE)],
        LedgerOptions(breaker_failures=3, breaker_cooldown=1),
    )
    for url in ("http://p", "http://d"):
        ledger.mark_up(url, Evidence(frozenset({"m"}), "1", 16, (), 0, 1.0))
    ask, roles = Ask("m", 1, 0.0), (Role.PREFILL, Role.DECODE)
    assert ledger.assign(roles, ask) is not None
    assert ledger.mark_kv("http://p", "has not registered")
    assert not ledger.mark_kv("http://p", "has not registered"), "nothing has changed"
    assert ledger.assign(roles, ask) is None
    assert ledger.shortcomings(0.0) == [
        "http://p and http://d are not paired: http://p has not registered"
    ]
    assert ledger.mark_kv("http://p", None)
    assert ledger.assign(roles, ask) is not None
    assert prefill_and_decode(*ledger.engines) is None
    assert not ledger.mark_kv("http://removed", "x")


def test_a_full_engine_gets_no_more_prompts_with_pushed_kv() -> None:
    """It still serves prompts alone. A place that is given back counts at once."""
    urls = {"http://p": Role.PREFILL, "http://d": Role.DECODE, "http://e": Role.DECODE}
    specs = [
        EngineSpec(url, role, places=1 if role is Role.DECODE else None)
        for url, role in urls.items()
    ]
    ledger = Ledger(specs, LedgerOptions(breaker_failures=3, breaker_cooldown=1))
    for url in urls:
        ledger.mark_up(url, Evidence(frozenset({"m"}), "1", 16, (), 0, 1.0))
    ask, roles = Ask("m", 1, 0.0), (Role.PREFILL, Role.DECODE)
    pairs = [ledger.assign(roles, ask) for _ in range(3)]
    taken = [pair[Role.DECODE].engine.url for pair in pairs if pair is not None]
    assert sorted(taken) == ["http://d", "http://e"]
    assert pairs[2] is None
    alone = ledger.assign_alone(ask)
    assert alone is not None
    assert ledger.releasing.through("http://p", "m", 0.0) is not None, "a release is no load"
    assert pairs[0] is not None
    ledger.close(alone, Verdict.GOOD, 0.0)
    ledger.close(pairs[0][Role.DECODE], Verdict.GOOD, 0.0)
    again = ledger.assign(roles, ask, without=())
    assert again is not None
    assert again[Role.DECODE].engine.url == taken[0]
