"""Policy `prefix` with several workers: what one has sent to an engine draws the others' requests
there.
"""

# Workers in one event loop; the last test has processes.

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes import several
from tests.fakes.books import Books
from tests.fakes.engine import FakeEngine
from tests.fakes.served_workers import nodes, serving
from tests.fakes.world import COMPLETIONS, PROMPT, completion, world


def by_prefix(settings: Settings) -> Settings:
    """Prefill engines are chosen by their caches."""
    (pool,) = settings.pools
    policy = PoolPolicy(prefill="prefix", decode="prefix")
    return msgspec.structs.replace(settings, pools=(msgspec.structs.replace(pool, policy=policy),))


async def test_requests_of_all_workers_go_where_one_has_sent_their_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, each worker would choose engines in turn: after a few requests all four would have
    computed the prompt.
    """
    monkeypatch.setattr(several, "WORKERS", 3)
    async with world(prefill=4, adjust=by_prefix, leaves=True) as w:
        assert (await w.ask(COMPLETIONS, completion(prompt=4 * PROMPT))).status == 200
        for _ in range(16):  # new connections: the system spreads them over the workers
            assert (await w.ask(COMPLETIONS, completion(prompt=4 * PROMPT))).status == 200
        assert sorted(len(engine.requests) for engine in w.prefill) == [0, 0, 0, 17]
        assert w.proxy.prefixes is not None
        assert w.metric("pdproxy_prefix_skipped_total") == 0
        known = len(w.proxy.prefixes.knowledge.routing)
        assert w.metric("pdproxy_prefix_blocks", **{"from": "routing"}) == known > 0
        await w.quiet()


async def test_knowledge_outlives_each_worker(tmp_path: Path) -> None:
    """As processes: both are killed, one after the other. The scheduler process knows what was sent
    before.
    """
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", "decode")]

    def settings(port: int, admin: int) -> str:
        return (
            f"listen: {{port: {port}, workers: 2}}\ndeadlines: {{drain: 5}}\n"
            f"pools:\n- connector: nixl\n  policy: prefix\n{nodes(engines)}"
        )

    async with serving(tmp_path, engines, settings) as run:
        for number in range(8):
            answer = await run.proxy.ask(
                "POST", COMPLETIONS, completion(prompt=f"{number} {4 * PROMPT}")
            )
            assert answer.status == 200
            if number == 0:
                of_one = await run.proxy.metric("pdproxy_prefix_blocks", **{"from": "routing"})
        assert of_one > 0

        for pid in run.proxy.workers():
            await run.kill(pid)
        await run.proxy.ask("POST", COMPLETIONS, completion())
        metric = await run.proxy.metric("pdproxy_prefix_blocks", **{"from": "routing"})
        assert metric >= 8 * of_one
