"""An engine that sleeps gets no requests until it is awake, and is called asleep."""

from __future__ import annotations

import json

import pytest

from pdproxy.observe.events import NodeChanged
from pdproxy.upstream.metrics_page import read_metrics
from tests.fakes import several
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.world import COMPLETIONS, World, completion, world


def page(level: int, ranks: int = 1) -> bytes:
    """What vLLM writes of its sleep; level 0: it is awake. The last of several ranks sleeps."""
    lines = ["# TYPE vllm:engine_sleep_state gauge"]
    for rank in range(ranks):
        of_rank = level if rank == ranks - 1 else 0
        for state, at in (("awake", 0), ("weights_offloaded", 1), ("discard_all", 2)):
            labels = f'engine="{rank}",model_name="tiny",sleep_state="{state}"'
            lines.append(f"vllm:engine_sleep_state{{{labels}}} {float(of_rank == at)}")
    return ("\n".join(lines) + "\n").encode()


@pytest.mark.parametrize(
    ("body", "asleep"),
    [
        (page(0), None),
        (page(1), "it sleeps (level 1): vllm:engine_sleep_state"),
        (page(2), "it sleeps (level 2): vllm:engine_sleep_state"),
        (page(1, ranks=4), "it sleeps (level 1): vllm:engine_sleep_state"),
        (page(0, ranks=4), None),
        (b"", None),
        (
            b'vllm:engine_sleep_state{sleep_state="awake"} 0\n',
            "it sleeps (its level is not known): vllm:engine_sleep_state",
        ),
    ],
)
def test_what_the_metrics_say(body: bytes, asleep: str | None) -> None:
    assert read_metrics(body).asleep == asleep


def sleeps(engine: FakeEngine, level: int) -> None:
    async def metrics(reply: Reply) -> None:
        await reply.whole(page(level))

    others = {path: script for path, script in engine.admin.items() if path != "/metrics"}
    engine.admin = {**others, "/metrics": metrics} if level else others


async def details(w: World) -> list[str]:
    return list(json.loads((await w.get("/ready")).body)["details"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_it_gets_no_requests_until_it_is_awake(role: str) -> None:
    async with world(2, 2) as w:
        engine = getattr(w, role)[0]
        ledger_engine = w.proxy.engines[engine.url].in_ledger
        sleeps(engine, 1)
        await w.probe()
        w.forget_events()
        before = len(engine.requests)
        for _ in range(6):
            assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert len(engine.requests) == before
        assert ledger_engine.state(0.0) == "asleep"
        assert w.metric("pdproxy_node_state", node=engine.url, state="asleep") == 1
        assert w.metric("pdproxy_node_up", node=engine.url) == 0
        assert (
            f"{role} {engine.url}: it sleeps (level 1): vllm:engine_sleep_state" in await details(w)
        )
        sleeps(engine, 0)
        await w.probe()
        assert [(event.node, event.up) for event in w.events(NodeChanged)][-1:] == [
            (engine.url, True)
        ]
        for _ in range(6):
            assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert len(engine.requests) > before
        assert not await details(w)


async def test_the_last_one_that_sleeps_is_named() -> None:
    async with world(1, 1) as w:
        sleeps(w.decode[0], 2)
        await w.probe()
        answer = await w.get("/ready")
        assert answer.status == 503
        assert "it sleeps (level 2)" in json.loads(answer.body)["reason"]
        assert (await w.ask(COMPLETIONS, completion())).status == 503


async def test_all_workers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "WORKERS", 2)
    async with world(1, 2, leaves=True) as w:
        sleeps(w.decode[0], 1)
        await w.probe()
        assert [one.engines[w.decode[0].url].in_ledger.state(0.0) for one in w.workers] == [
            "asleep"
        ] * 2
        (seen,) = [event for event in w.events(NodeChanged) if event.state == "asleep"]
        assert not seen.up
