"""Policy `prefix` with several workers: what one has sent to an engine draws the others' requests
there.
"""

# Workers in one event loop; the last test has processes.

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.app.worker_prefixes import SEND_EVERY, SharingPrefixes
from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from pdproxy.workers.share import WorkerShare
from tests.fakes import several
from tests.fakes.books import Books
from tests.fakes.engine import FakeEngine
from tests.fakes.process import PATIENCE
from tests.fakes.served_workers import nodes, serving
from tests.fakes.tokenizer import Shelf
from tests.fakes.world import COMPLETIONS, PROMPT, completion, until, world


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
    """Its timer is gone with it. (That a worker which starts asks others for what they know is put
    aside here.)
    """

    async def alone(*_: object) -> None:
        """Ask nobody."""

    monkeypatch.setattr(SharingPrefixes, "catch_up", alone)
    monkeypatch.setattr(several, "WORKERS", 2)
    async with world(adjust=by_prefix, leaves=True) as w:
        all_of = [one.prefixes for one in w.workers if one.prefixes is not None]
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        await until(lambda: len({len(one.knowledge.routing) for one in all_of}) == 1)
        known = len(all_of[0].knowledge.routing)
        for one in all_of:
            one.stop()
        assert (await w.ask(COMPLETIONS, completion(prompt=4 * PROMPT))).status == 200
        await asyncio.sleep(5 * SEND_EVERY)
        served, other = sorted((len(one.knowledge.routing) for one in all_of), reverse=True)
        assert served > known > 0
        assert other == known


async def test_a_worker_that_starts_gets_what_the_leader_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all engines, in the order of their use."""
    monkeypatch.setattr(several, "WORKERS", 2)
    async with world(prefill=2, adjust=by_prefix, leaves=True) as w:
        leader, late = (one.prefixes for one in w.workers)
        assert leader is not None
        assert late is not None
        for number in range(6):
            assert (
                await w.ask(COMPLETIONS, completion(prompt=f"{number} {4 * PROMPT}"))
            ).status == 200
            if number == 0:
                of_one = max(len(one.knowledge.routing) for one in (leader, late))
        await until(lambda: all(len(one.knowledge.routing) == 6 * of_one for one in (leader, late)))
        before = {url: leader.knowledge.part(url, 0) for url in w.proxy.engines}  # type: ignore[attr-defined]
        for url in w.proxy.engines:
            late.knowledge.restarted(url)
        assert len(late.knowledge.routing) == 0
        assert late.catch_up is not None
        await late.catch_up()
        assert {url: late.knowledge.part(url, 0) for url in w.proxy.engines} == before  # type: ignore[attr-defined]
        assert any(part.keys for part in before.values())


async def test_who_leads_in_place_of_a_dead_one_gets_what_workers_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a worker that starts behind it would get nothing."""
    monkeypatch.setattr(several, "WORKERS", 2)
    async with world(prefill=2, adjust=by_prefix, leaves=True) as w:
        share, known = w.proxy.share.several, w.others[0].prefixes
        assert isinstance(share, WorkerShare)
        assert known is not None
        assert (await w.ask(COMPLETIONS, completion(prompt=4 * PROMPT))).status == 200
        await until(lambda: len(known.knowledge.routing))
        share._shared.clear(0)
        share.findings.clear()
        share.succeeds = True
        again = Proxy.build(w.proxy.settings, Shelf(), share=share)
        share.start(again.tasks)
        try:
            assert again.prefixes is not None
            assert again.prefixes.catch_up is not None
            await again.prefixes.catch_up()
            assert len(again.prefixes.knowledge.routing) == len(known.knowledge.routing)
        finally:
            await again.stop()


def _successor_knows(log: Path, pid: int) -> bool:
    """Return whether the worker that follows a killed one has said that it knows what others
    know.
    """
    text = log.read_text()
    killed = re.search(rf"worker (\d+) \(process {pid}\) was killed", text)
    return killed is not None and bool(
        re.search(
            rf"knows what another worker knew .* worker={killed[1]}$",
            text[killed.end() :],
            re.MULTILINE,
        )
    )


async def test_knowledge_outlives_each_worker(tmp_path: Path) -> None:
    """As processes: both are killed, one after the other. Their successors know what was sent
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

        async def all_known() -> None:
            async with asyncio.timeout(PATIENCE):
                while (
                    await run.proxy.metric("pdproxy_prefix_blocks", **{"from": "routing"})
                    != 8 * of_one
                ):
                    await asyncio.sleep(0.05)

        # by one of them at least: what the other has sent is known a moment later
        await all_known()
        await asyncio.sleep(50 * SEND_EVERY)
        for pid in run.proxy.workers():
            await run.kill(pid)
            await until(lambda: _successor_knows(tmp_path / "log", pid), PATIENCE)  # noqa: B023
        await all_known()
