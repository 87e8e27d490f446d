"""A real proxy's page says whether KV moves, and the runtimes' conditions say so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdproxy.settings.schema import Settings
from pdproxy_operator import figures as read_here
from pdproxy_operator.conditions import runtime_conditions
from pdproxy_operator.pools import selected_pools
from pdproxy_operator.rollout import Step
from tests.fakes import answers
from tests.fakes.engine import Reply
from tests.fakes.world import COMPLETIONS, PROMPT, World, completion, world
from tests.operator.pods import NOW, pod
from tests.operator.resources import proxy, runtime
from tests.operator.test_figures import figures_of

METRICS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
(POOL,) = selected_pools(proxy(), [runtime("p", "prefill"), runtime("d", "decode")])


def as_pods(settings: Settings) -> Settings:
    """Settings as the operator writes them: engines have the names of their pods."""
    replace = msgspec.structs.replace
    (pool,) = settings.pools
    nodes = tuple(replace(one, labels={"pod": f"{one.role[0]}-1"}) for one in pool.nodes)
    return replace(settings, pools=(replace(pool, name=POOL.name, nodes=nodes),))


async def looks(w: World) -> dict[str, tuple[str, str]]:
    """The status and the reason of KVTransferring, by runtime."""
    figures = figures_of({"x": (await w.get("/metrics")).body})
    found: dict[str, tuple[str, str]] = {}
    for one in POOL.runtimes:
        name = one.metadata.name
        conditions = runtime_conditions(
            one,
            POOL,
            pools=[POOL],
            selected_by=["x"],
            parts=[],
            pods=[pod(f"{name}-1", ready=True)],
            figures=figures,
            step=Step({}, None, stuck=False),
            decision=None,
            refused=None,
            now=NOW,
            before=(),
        )
        (kv,) = (one for one in conditions if one.type == "KVTransferring")
        found[name] = (kv.status, kv.reason)
    return found


async def served(w: World) -> None:
    """Have prompts answered, and counters read as often as a proxy does in 15 s."""
    for number in range(4):
        assert (await w.ask(COMPLETIONS, completion(prompt=f"{number} {PROMPT}"))).status == 200
    await w.quiet()
    for _ in range(3):
        await w.probe()


async def without_kv(reply: Reply) -> None:
    """A prefill answer of an engine that moves no KV."""
    ids = reply.engine.ids(reply.request)
    await reply.whole(answers.whole(reply.request.chat, ids, "x", 1, ids=True))


async def test_kv_that_moves() -> None:
    async with world(adjust=as_pods) as w:
        assert set((await looks(w)).values()) == {("Unknown", "NoTraffic")}
        await served(w)
        assert set((await looks(w)).values()) == {("True", "Moving")}


async def test_prefill_engines_without_a_kv_configuration() -> None:
    """They answer without a handle: no prompt is split, and the engine is said to be at fault."""
    async with world(adjust=as_pods) as w:
        w.prefill[0].default = without_kv
        await served(w)
        assert await looks(w) == {"p": ("False", "NotMoving"), "d": ("False", "NotSplit")}


async def test_decode_engines_without_a_kv_configuration() -> None:
    """They answer, and compute each prompt again: only their counters show it."""
    async with world(adjust=as_pods) as w:
        w.decode[0].moves_kv = False
        await w.probe()
        await served(w)
        assert set((await looks(w)).values()) == {("False", "Recomputing")}


@pytest.mark.parametrize("name", read_here._READ)
def test_what_is_read_is_what_proxies_show(name: bytes) -> None:
    """With the labels that are read: the reference of metrics is made from the proxy's code."""
    (row,) = (
        line for line in METRICS.read_text().splitlines() if line.startswith(f"| `{name.decode()}`")
    )
    labels = {
        "pdproxy_node_info": {"node", "role", "pool", "engine_pod"},
        "pdproxy_demand_replicas": {"pool", "role"},
        "pdproxy_pool_splits": {"pool"},
        "pdproxy_state": {"state"},
        "pdproxy_settings_refused": set(),
        "pdproxy_source_left_out": {"source"},
    }.get(name.decode(), {"node"})
    assert all(f"`{label}`" in row for label in labels)
