"""Which engine, and which data-parallel rank of it, a prompt goes to: each equally often, on both
sides.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.fleet.peers import Peers
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.transfer.contract import Contract
from pdproxy.transfer.moriio import MORIIO
from pdproxy.transfer.nixl_push import CONTRACT as PUSH
from pdproxy.transfer.peers import Peer
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route

ADDRESS = "host:10.0.0.1,handshake:6301,notify:61005"
SHAPES = [(1, 1), (2, 1), (4, 1), (1, 8), (2, 8), (3, 8)]
"""Engines of a role, and ranks of each: those that engines of eight GPUs have."""
FLEETS = [((1, 1), (1, 1)), ((2, 1), (1, 8)), ((2, 1), (2, 1)), ((2, 8), (3, 8)), ((2, 8), (4, 1))]
"""Both roles' shapes."""
Slot = tuple[int, str | None]
"""An engine's number, and the rank in a leg's header."""


class Fleet:
    """Engines of two roles, and prompts that are dispatched to them one after the other."""

    def __init__(
        self, prefill: tuple[int, int], decode: tuple[int, int], contract: Contract = PUSH
    ) -> None:
        shapes = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.contract, self.numbers, known, specs = contract, dict[str, int](), {}, []
        for role, (engines, ranks) in shapes.items():
            for number in range(engines):
                url = f"http://{role.value}-{number}"
                peers = Peers(ranks)
                for rank in range(ranks):
                    peers.learn(
                        Peer(rank, ranks, f"{url}_dp{rank}", "10.0.0.1", 1, ADDRESS, 1, 1, "WRITE")
                    )
                known[url] = SimpleNamespace(run=SimpleNamespace(peers=peers), receiver=None)
                self.numbers[url] = number
                specs.append(EngineSpec(url, role))
        self.ledger = Ledger(specs, LedgerOptions(breaker_failures=3, breaker_cooldown=1))
        for url in known:
            self.ledger.mark_up(url, Evidence(frozenset({"m"}), "1", 16, (), 0, 1.0))
        self.resources = SimpleNamespace(
            transfer=SimpleNamespace(contract=contract),
            engines=SimpleNamespace(known=known),
            now=lambda: 0.0,
        )
        headers = SimpleNamespace(shown_id=lambda _: "mine")
        self.request = SimpleNamespace(ids=None, key=None, parsed=None, headers=headers)
        self.parsed = parse(Route.COMPLETIONS, b'{"model":"m","prompt":"a b"}')

    def dispatch(self) -> tuple[Slot, Slot]:
        """Dispatch a prompt: where its two legs go."""
        assignment = self.ledger.assign((Role.PREFILL, Role.DECODE), Ask("m", 1, 0.0))
        assert assignment is not None
        attempt = Attempt(cast("Any", self.resources), cast("Any", self.request), assignment)
        prompt, dispatch = self.parsed.prompts[0], attempt.dispatch
        handle = (
            self.contract.promise(self.parsed, dispatch)
            if self.contract.promise is not None
            else None
        )
        assert handle is not None
        legs = (
            self.contract.prefill(self.parsed, prompt, dispatch),
            self.contract.decode(self.parsed, prompt, handle, dispatch),
        )
        urls = [lease.engine.url for lease in assignment.leases]
        for lease in assignment.leases:
            self.ledger.close(lease, Verdict.GOOD, 0.0)
        ranks = [dict(leg.headers).get(b"x-data-parallel-rank") for leg in legs]
        first, second = (
            (self.numbers[url], None if rank is None else rank.decode())
            for url, rank in zip(urls, ranks, strict=True)
        )
        return first, second

    def slots(self, count: int) -> tuple[list[Slot], list[Slot]]:
        """Dispatch so many prompts: where their prefill legs went, and their decode legs."""
        pairs = [self.dispatch() for _ in range(count)]
        return [one for one, _ in pairs], [other for _, other in pairs]


def every(shape: tuple[int, int]) -> set[Slot]:
    """All places that engines of a shape have."""
    engines, ranks = shape
    return {
        (engine, str(rank) if ranks > 1 else None)
        for engine in range(engines)
        for rank in range(ranks)
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("contract", "side"), [(PUSH, 0), (PUSH, 1), (MORIIO, 0)])
def test_every_rank_of_every_engine_is_used_equally_often(
    contract: Contract, side: int, shape: tuple[int, int]
) -> None:
    """Not a part of the ranks, which is what comes of one counter for both. MoRIIO's decode engines
    choose a rank themselves.
    """
    prefill, decode = (shape, (1, 1)) if side == 0 else ((1, 1), shape)
    places = shape[0] * shape[1]
    hits = Counter(Fleet(prefill, decode, contract).slots(3 * places)[side])
    assert set(hits) == every(shape)
    assert set(hits.values()) == {3}


@pytest.mark.parametrize(("prefill", "decode"), FLEETS, ids=str)
def test_both_sides_at_once(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    """Engines equally often, and each engine's ranks too, whatever the other side has."""
    sides = (prefill, decode)
    for slots, shape in zip(Fleet(prefill, decode).slots(8 * 24), sides, strict=True):
        hits = Counter(slots)
        assert set(hits) == every(shape)
        assert max(hits.values()) - min(hits.values()) <= 1
        engines = Counter(engine for engine, _ in slots)
        assert max(engines.values()) == min(engines.values())


@pytest.mark.parametrize("engines", [1, 2, 3, 4])
def test_one_prompt_after_the_other_goes_to_the_next_engine(engines: int) -> None:
    for side in (0, 1):
        shape = (engines, 8)
        prefill, decode = (shape, (1, 1)) if side == 0 else ((1, 1), shape)
        order = [engine for engine, _ in Fleet(prefill, decode).slots(3 * engines)[side]]
        first = order[:engines]
        assert sorted(first) == list(range(engines))
        assert order == first * 3


def test_an_engine_without_data_parallelism_is_sent_no_rank() -> None:
    """Engines refuse a rank that they do not have."""
    assert {rank for side in Fleet((2, 1), (2, 1)).slots(8) for _, rank in side} == {None}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_busy_engines_ranks_go_on_where_they_were(ranks: int) -> None:
    """Prompts for the other engine in between skip none of them."""
    fleet = Fleet((2, ranks), (1, 1))
    one = [rank for engine, rank in fleet.slots(2 * ranks)[0] if engine == 0]
    assert one == [str(rank) for rank in range(ranks)]
