"""How many engines a proxy says that its load needs: the same with one process and with two
workers, and in words for operators once it is clear.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pdproxy.app.engines import Profiles
from pdproxy.cli.main import main
from pdproxy.engine_model.profile import load
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.scheduling.wanted_engines import BUSY, EngineSize
from pdproxy.settings.engines import ConfiguredEngine, Facts
from pdproxy.settings.pools import PoolPolicy, PoolSlo
from pdproxy.settings.schema import Settings
from tests.fakes import several
from tests.fakes.admin import admin
from tests.fakes.clock import ManualClock
from tests.fakes.world import COMPLETIONS, World, completion, world

NAME = "pdproxy_demand_replicas"


def with_profile(settings: Settings) -> Settings:
    """The engines are as in a profile, but run 40 sequences, and each answer is to be slow."""
    nodes = tuple(
        msgspec.structs.replace(node, facts=Facts(max_num_seqs=40)) for node in settings.pool.nodes
    )
    pool = msgspec.structs.replace(
        settings.pool,
        profile="h200-8b",
        nodes=nodes,
        slo=PoolSlo(tpot=0.0045),
        name="llama",
        policy=PoolPolicy(placement="split"),
    )
    return msgspec.structs.replace(settings, pools=(pool,))


async def serve(w: World, clock: ManualClock, requests: int, *, cached: bool = False) -> None:
    """A request in each five seconds, and now and then a look at the engines' metrics."""
    for number in range(requests):
        prompt = [*range(200), int(clock.now()) % 1000]
        prompt = prompt if cached else prompt[::-1]
        body = completion(prompt=prompt, stream=bool(number % 2), max_tokens=50)
        assert (await w.ask(COMPLETIONS, body)).status == 200
        await w.told()
        await clock.advance(5.0)
        if number % 5 == 0:
            await w.probe()


def shown(w: World) -> dict[str, float]:
    """The gauge by the roles that it has."""
    lines = w.page().decode().splitlines()
    found = [line for line in lines if line.startswith(NAME + "{")]
    return {
        role.value: w.metric(NAME, pool="llama", role=role.value)
        for role in Role
        if any(f'role="{role.value}"' in line for line in found)
    }


async def values(workers: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    monkeypatch.setattr(several, "WORKERS", workers)
    clock, found = ManualClock(), []
    async with world(1, 1, clock=clock, adjust=with_profile) as w:
        assert len(w.workers) == workers
        for requests in (11, 10, 40):
            await serve(w, clock, requests)
            await w.quiet()
            found.append(shown(w))
        wanted = w.proxy.ledger.wanted
        assert wanted is not None
        # each prompt was counted by an engine, and none by another process
        assert wanted._split_tokens.count == 61
        assert [one.ledger.wanted for one in w.workers[1:]] == [None] * (workers - 1)
        for _ in range(15):
            await clock.advance(80.0)
            await w.probe()
        found.append(shown(w))
    return found


async def test_two_workers_show_what_one_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = await values(1, monkeypatch), await values(2, monkeypatch)
    assert two == [pytest.approx(part, rel=0.01) for part in one]
    first, _, last, later = one
    assert first == {}  # too little time has passed
    # per second, a fifth of a prompt of 7.6 ms
    assert last["prefill"] == pytest.approx(0.2 * 0.0076 / BUSY, rel=0.05)
    # 50 tokens with 15 us each and a pull of 1 ms, in 70 % of what 4.38 of 4.5 ms leave
    assert last["decode"] == pytest.approx(0.2 * 0.0017 / (1 - 4.38 / 4.464), rel=0.05)
    assert later == {"prefill": 0.0, "decode": 0.0}


async def test_engines_that_are_missing_are_told_and_change_no_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By /ready, and by `pdproxy engines list`."""
    clock = ManualClock()
    async with world(1, 1, clock=clock, adjust=with_profile) as w, admin(w) as api:
        wanted = w.proxy.ledger.wanted
        assert wanted is not None
        await serve(w, clock, 20)
        before = (await w.get("/ready")).json
        # so many sequences of other clients
        wanted._work[Role.DECODE].open += 100
        for _ in range(20):
            await clock.advance(5.0)
            await w.probe()
        assert (await w.get("/ready")).json["details"] == before["details"]
        for _ in range(20):
            await clock.advance(5.0)
            await w.probe()
        after = (await w.get("/ready")).json
        words = ["engines", "list", "--admin", f"127.0.0.1:{api.port}"]
        assert await asyncio.to_thread(main, words) == 0
        wanted._work[Role.DECODE].open -= 100
        told = "the load needs 3 more decode engines: sequences need 3.1 engines, there is 1"
        assert set(after["details"]) - set(before["details"]) == {told}
        assert f"! {told}\n" in capsys.readouterr().out
        assert {**after, "details": before["details"]} == before


async def test_what_engines_have_cached_is_no_work() -> None:
    """By their own metrics: nothing of it is in an answer."""
    clock, found = ManualClock(), []
    async with world(1, 1, clock=clock, adjust=with_profile) as w:
        for cached in (False, True):
            await serve(w, clock, 60, cached=cached)
            found.append(shown(w)["prefill"])
    new, cached_ones = found
    # 192 tokens of 201 take nothing any more; that a prompt begins takes 3.3 of 7.6 ms
    assert 0.45 * new < cached_ones < 0.75 * new


def test_what_an_engine_can_do() -> None:
    """As it reports itself, or as the settings or its profile say."""
    profiles = Profiles("h200-8b")
    limits = load("h200-8b").engine
    engine = LedgerEngine(EngineSpec("http://127.0.0.1:1", Role.DECODE))
    size = profiles.size(engine)
    assert size.times is not None
    assert size.times.chunk == limits.max_num_batched_tokens
    assert (size.max_num_seqs, size.kv_tokens) == (
        limits.max_num_seqs,
        limits.num_gpu_blocks * limits.block_size,
    )
    facts = Facts(max_num_seqs=40, data_parallel_size=2, max_num_batched_tokens=512)
    profiles.set(ConfiguredEngine(url=engine.url, role="decode", facts=facts))
    engine.evidence = Evidence(frozenset(), "", 16, (), 0, 1.0, kv_blocks=1000)
    size = profiles.size(engine)
    assert size.times is not None
    assert (size.times.chunk, size.max_num_seqs, size.kv_tokens) == (512, 40, 2 * 16_000)
    profiles.forget(engine.url)
    engine.evidence = None
    assert Profiles(None).size(engine) == EngineSize()
