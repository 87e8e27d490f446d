"""Whose lease a decode engine's queue renews: that of a request with another engine's KV, and no
other's.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from tests.sim.engines import OTHER, PREFILL, PROMPT, Engines

LEASE = 30
FIELDS = ("remote_engine_id", "remote_host", "remote_port", "remote_request_id")


class Queue(Engines):
    """P, and a D that has met it and is busy for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.p = self.add(SimFacts(role="prefill"))
        slow = Hardware(decode_step_s=0.2)
        self.d = self.add(
            SimFacts(role="decode", max_num_seqs=1, hardware=slow, enable_prefix_caching=False)
        )
        self.answer(self.d, OTHER, 1, self.handle(self.p, OTHER))
        self.ask(self.d, OTHER, 500)
        self.run(self.now + 1)

    def waits(self, kv: dict[str, Any] | None) -> float:
        """Have a request wait in D's queue for twice the lease; return how many of P's leases have
        ended.
        """
        self.ask(self.d, PROMPT, 4, kv)
        before = self.p.stats.kv_expired
        self.run(self.now + 2 * LEASE)
        return self.p.stats.kv_expired - before


def test_a_request_with_p_s_kv_renews_its_lease() -> None:
    engines = Queue()
    assert engines.waits(engines.handle(engines.p)) == 0


@pytest.mark.parametrize("kv", [None, {}, dict(PREFILL)], ids=["plain", "empty", "prefill"])
def test_no_other_request_renews_one(kv: dict[str, Any] | None) -> None:
    engines = Queue()
    engines.handle(engines.p)
    assert engines.waits(kv) == 1


def test_each_request_renews_its_own() -> None:
    """Two wait, a third one's KV has nobody."""
    engines = Queue()
    handles = [
        engines.handle(engines.p, tuple(range(700 + 100 * n, 800 + 100 * n))) for n in range(3)
    ]
    engines.ask(engines.d, tuple(range(700, 800)), 4, handles[0])
    engines.ask(engines.d, tuple(range(800, 900)), 4, handles[1])
    engines.run(engines.now + 2 * LEASE)
    assert (engines.p.stats.kv_expired, len(engines.p.core.nixl.held)) == (1, 2)


def test_renewals_end_with_the_request() -> None:
    """One that is aborted in the queue gives P's blocks back; another one's lease goes on."""
    engines = Queue()
    kept, left = (
        engines.handle(engines.p, tuple(range(700 + 100 * n, 800 + 100 * n))) for n in range(2)
    )
    engines.ask(engines.d, tuple(range(700, 800)), 4, kept)
    engines.ask(engines.d, tuple(range(800, 900)), 4, left, id="left")
    engines.run(engines.now + 2 * LEASE)
    engines.abort(engines.d, "left")
    engines.run(engines.now + LEASE)
    assert (engines.p.stats.kv_expired, list(engines.p.core.nixl.held)) == (
        0,
        [kept["remote_request_id"]],
    )
