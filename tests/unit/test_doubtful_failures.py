"""Which failures count that a request may have caused: the whole rule, from what its engines
did.
"""

from __future__ import annotations

import pytest

from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import EngineSpec, LedgerEngine, Role
from pdproxy.serving.dispatch.doubtful_failures import DoubtfulFailures, FailedTransfer


def doubtful(*failed: str) -> DoubtfulFailures:
    """Failures in order: an encoder engine "e1"; a prefill engine "p1"; an engine alone, "d1"; or
    an engine with another one's KV, "p1>d1".
    """
    made = DoubtfulFailures()
    for number, one in enumerate(failed):
        prefill, _, decode = one.rpartition(">")
        role = {"e": Role.ENCODE, "p": Role.PREFILL, "d": Role.DECODE}[decode[0]]
        lease = Lease(LedgerEngine(EngineSpec(decode, role)), role, 0)
        if role is Role.ENCODE:
            made.encode_failed(lease)
            continue
        if role is Role.PREFILL:
            made.prefill_failed(lease)
            continue
        made.answer_failed(lease, with_kv=bool(prefill))
        if prefill:
            made.transfer_failed(FailedTransfer(prefill, decode, float(number), not number))
    return made


def names(counted: tuple[list[Lease], list[FailedTransfer]]) -> list[str]:
    leases, transfers = counted
    return [lease.engine.url for lease in leases] + [
        f"{one.prefill}>{one.decode}" for one in transfers
    ]


@pytest.mark.parametrize(
    ("failed", "follows", "answered", "unanswered"),
    [
        ("d1", False, "d1", "d1"),
        ("d1 d1", False, "d1 d1", "d1 d1"),  # there is no other engine
        ("d1 d2", True, "d1 d2", ""),
        ("p1", False, "p1", "p1"),
        ("p1 d1", False, "p1 d1", ""),  # each fails in another way: the next engine may serve
        ("p1 p2", True, "p1 p2", ""),
        ("p1>d1", False, "p1>d1", "p1>d1"),
        ("p1>d1 p1>d1", False, "p1>d1 p1>d1", "p1>d1 p1>d1"),
        ("p1>d1 p2>d1", False, "p1>d1 p2>d1", "p1>d1 p2>d1"),  # the only decode engine
        ("p1>d1 p1>d2", True, "p1>d1 p1>d2", ""),
        ("p1>d1 d1", False, "d1 p1>d1", "d1"),  # it fails without KV, too
        ("p1>d1 d2", True, "d2 p1>d1", ""),
        ("e1", False, "e1", "e1"),
        ("e1 e2", False, "e1 e2", ""),  # others encode
        ("e1 p1", False, "e1 p1", ""),
        ("e1 p1 p2", True, "e1 p1 p2", ""),
    ],
)
def test_what_counts(failed: str, follows: bool, answered: str, unanswered: str) -> None:
    """`failed`: what has failed in order; `follows`: at a second engine in the same way."""
    made = doubtful(*failed.split())
    assert (made.follow(prefill=True) or made.follow(prefill=False)) is follows
    assert names(made.answered()) == answered.split()
    assert names(made.unanswered()) == unanswered.split()
