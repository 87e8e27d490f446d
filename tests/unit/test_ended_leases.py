"""When an answer behind the lease of its KV is not used."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdproxy.kit.errors import EngineUnreachableError
from pdproxy.serving.kv.ended_leases import EndedLeases
from pdproxy.upstream.metrics_page import NO_METRICS, Scrape, read_metrics

P = "http://p:1"


@pytest.mark.parametrize(
    ("before", "now", "run", "ended"),
    [
        (0.0, 1.0, 3, True),
        (4.0, 4.0, 3, False),
        (4.0, None, 3, False),  # it is not reported any more
        (4.0, 5.0, 2, False),  # the engine was started again
        (4.0, EngineUnreachableError("gone"), 3, False),
    ],
)
async def test_an_answer_is_used_unless_a_lease_has_ended(
    before: Any, now: Any, run: int, ended: bool
) -> None:
    async def scrape(url: str) -> Scrape:
        assert url == P
        if isinstance(now, Exception):
            raise now
        return replace(NO_METRICS, expired=now)

    engine: Any = SimpleNamespace(in_ledger=SimpleNamespace(run_number=3))
    custody: Any = SimpleNamespace(prefill=P, prefill_run=run, expired_before=before)
    assert await EndedLeases({P: engine}, scrape).may_have(custody) is ended
    assert await EndedLeases({}, scrape).may_have(custody) is False


def test_all_ranks_are_counted() -> None:
    name = "vllm:nixl_num_kv_expired_reqs_total"
    assert (
        read_metrics(f'{name}{{engine="0"}} 2.0\n{name}{{engine="1"}} 3.0\n'.encode()).expired
        == 5.0
    )
    assert read_metrics(b"vllm:num_requests_running 0.0\n").expired is None
