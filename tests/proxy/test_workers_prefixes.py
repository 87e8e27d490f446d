"""Policy `prefix` with several workers: what one has sent to an engine draws the others' requests there."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pdproxy.settings.policy import PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes import several
from tests.fakes.world import COMPLETIONS, PROMPT, completion, until, world


def by_prefix(settings: Settings) -> Settings:
    """Prefill engines are chosen by their caches."""
    (pool,) = settings.pools
    policy = PoolPolicy(prefill="prefix", decode="prefix")
    return msgspec.structs.replace(settings, pools=(msgspec.structs.replace(pool, policy=policy),))


async def test_requests_of_all_workers_go_where_one_has_sent_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, each worker would choose engines in turn: after a few requests all four would have computed the prompt."""
    monkeypatch.setattr(several, "WORKERS", 3)
    async with world(prefill=4, adjust=by_prefix, leaves=True) as w:
        knows = [one.prefixes.knowledge for one in w.workers if one.prefixes is not None]
        assert len(knows) == 3
        assert (await w.ask(COMPLETIONS, completion(prompt=4 * PROMPT))).status == 200
        await until(lambda: len({len(one.routing) for one in knows}) == 1 and len(knows[0].routing))
        for _ in range(16):  # new connections: the system spreads them over the workers
            assert (await w.ask(COMPLETIONS, completion(prompt=4 * PROMPT))).status == 200
        assert sorted(len(engine.requests) for engine in w.prefill) == [0, 0, 0, 17]
        await until(lambda: w.metric("pdproxy_prefix_shared_age_seconds") > 0)
        assert w.metric("pdproxy_prefix_skipped_total") == 0
        assert w.metric("pdproxy_prefix_blocks", **{"from": "routing"}) == len(knows[0].routing)
        await w.quiet()


async def test_a_worker_that_ends_tells_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timer is gone with it."""
    monkeypatch.setattr(several, "WORKERS", 2)
    async with world(adjust=by_prefix, leaves=True) as w:
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        for one in w.workers:
            assert one.prefixes is not None
            one.prefixes.stop()
        before = [len(one.prefixes.knowledge.routing) for one in w.workers if one.prefixes is not None]
        await asyncio.sleep(0.05)
        assert [len(one.prefixes.knowledge.routing) for one in w.workers if one.prefixes is not None] == before
