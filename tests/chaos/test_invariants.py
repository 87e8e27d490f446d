"""Each invariant is seen to be broken: a world in which something is wrong by hand gives its
finding, and no other.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdproxy.observe.events import Gaps, HandleEnded, RequestEnded
from pdproxy.serving.access.clients import Client
from pdproxy.serving.kv.custody import End
from pdproxy.serving.kv.orphans import PrefillRecord
from pdproxy.settings.schema import Settings
from pdproxy.transfer import registry
from pdproxy.transfer.contract import Handle
from tests.chaos import invariants
from tests.chaos.clients import Outcome
from tests.chaos.finding import Finding
from tests.chaos.options import Options
from tests.chaos.trace import Trace
from tests.chaos.virtual.network import VirtualNetwork
from tests.chaos.world import DEADLINES, World
from tests.fakes.virtual import run


def outcome(
    ident: str = "a", how: str = "right", detail: str = "", *, slow: bool = False
) -> Outcome:
    return Outcome(ident, 1, how, detail, 0.0, 1.0, slow=slow)


def report(ident: str = "a", outcome: str = "ok", total: float = 1.0) -> RequestEnded:
    return RequestEnded(
        ident, "/v1/completions", None, outcome, 200, (), 0.0, None, total, None, None, Gaps()
    )


def rules(found: list[Finding]) -> set[str]:
    return {one.rule for one in found}


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ("wrong", "an answer is wrong"),
        ("cut", "an answer was cut off without an error"),
        ("silent", "no answer in time"),
        ("refused", "the proxy took no connection"),
    ],
)
def test_how_a_client_must_not_be_served(how: str, rule: str) -> None:
    good = [outcome(), outcome(how="error", detail="502"), outcome(how="left")]
    assert invariants.answered(good) == []
    assert rules(invariants.answered([*good, outcome(how=how)])) == {rule}
    slow = invariants.answered([outcome(how=how, slow=True)])
    assert rules(slow) == ({rule} if how in ("wrong", "refused") else set()), (
        "only its own slowness is its fault"
    )


def test_many_findings_of_one_rule_are_shortened() -> None:
    found = invariants.answered([outcome(how="wrong")] * 100)
    assert len(found) == 6
    assert found[-1].text == "... 95 more"


def test_the_calm() -> None:
    assert invariants.calm([outcome(), outcome(how="left")], {"P0": 3}, 0) == []
    assert rules(invariants.calm([outcome(how="error")], {"P0": 3}, 0)) == {
        "without faults each request is right"
    }
    assert rules(invariants.calm([], {"P0": 3, "D1": 0}, 0)) == {"each engine serves again"}
    assert rules(invariants.calm([], {"P0": 3}, 1)) == {"without faults KV is released"}


def test_reports() -> None:
    fine = [
        outcome("a"),
        outcome("b", "error", "502"),
        outcome("c", "left"),
        outcome("d", "error", "408"),
    ]
    events = [report("a"), report("b", "engine")]
    assert invariants.reported(fine, events) == []
    assert invariants.reported(fine, [*events, report("c", "client_left")]) == []
    assert rules(invariants.reported(fine, [*events, report("a")])) == {"a request ends once"}
    assert rules(invariants.reported(fine, events[1:])) == {"each request is reported"}
    assert rules(invariants.reported(fine, [report("a", "engine"), events[1]])) == {
        "reports are true"
    }
    assert rules(invariants.reported(fine, [events[0], report("b")])) == {"reports are true"}
    assert rules(invariants.reported(fine, [*events, report("x")])) == {
        "each report has its request"
    }
    stream = msgspec.structs.replace(report("a", total=invariants.STREAM + 1), stream=True)
    assert rules(invariants.reported(fine, [stream, events[1]])) == {
        "each wait of a stream has its deadline"
    }
    late = invariants.reported(fine, [report("a", total=DEADLINES.total + 3), events[1]])
    assert rules(late) == {"no request outlives deadlines.total"}


def test_tasks_timers_and_what_is_left_at_the_end() -> None:
    assert invariants.lasting(["probe", "probe"], ["probe"], 3, 2) == []
    assert rules(invariants.lasting(["probe"], ["probe", "probe"], 3, 3)) == {"tasks end"}
    assert rules(invariants.lasting([], [], 3, 4)) == {"timers are cancelled"}
    assert rules(invariants.ended(["task"], ["transport"])) == {"tasks end", "transports end"}
    assert rules(invariants.logged(["background task x failed"])) == {"no error is logged"}


def test_garbage() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    gc.collect()
    gc.disable()
    try:
        Cycle()
        assert invariants.garbage() == []
        Cycle.__module__ = "pdproxy_lab.sim.engine"
        Cycle()
        assert invariants.garbage() == []
        Cycle.__module__ = "pdproxy.serving.request"
        Cycle()
        assert rules(invariants.garbage()) == {"no garbage"}
        assert invariants.garbage() == [], "each is found once"
    finally:
        gc.enable()


def _lease(w: World) -> None:
    w.proxy.ledger.engines[0].requests += 1


def _place(w: World) -> None:
    w.proxy.admission = SimpleNamespace(inflight=1, waiting=0)


def _body(w: World) -> None:
    w.proxy.body_budget.take(Client("x"), 7)


def _answer(w: World) -> None:
    w.proxy.answer_budget.held += 7


def _connection(w: World) -> None:
    w.proxy.connections.open += 1


def _orphan(w: World) -> None:
    w.proxy.custodian.orphans.count += 1


def _blocks(w: World) -> None:
    w.engines[0].sim.engine.rank_stats[0].kv_cache_usage = 0.5


def _crash(w: World) -> None:
    w.engines[0].sim.crashes.append("KeyError")


def _book(w: World) -> None:
    w.proxy.metrics.notify(report("unseen"))


@pytest.mark.parametrize(
    ("breaks", "rule"),
    [
        (_lease, "leases end"),
        (_place, "places are given back"),
        (_body, "bytes are given back"),
        (_answer, "bytes are given back"),
        (_connection, "connections end"),
        (_orphan, "abandoned prefills end"),
        (_blocks, "blocks are freed"),
        (_crash, "the simulator works"),
        (_book, "books balance"),
    ],
)
def test_what_is_held_when_all_is_quiet(breaks: Callable[[World], None], rule: str) -> None:
    async def main(network: VirtualNetwork) -> tuple[set[str], set[str]]:
        trace = Trace()
        world = World(Options(prefill=1, decode=1), network, trace)
        await world.begin()

        def found() -> set[str]:
            return rules([*invariants.quiet(world), *invariants.balanced(world, trace.events)])

        before = found()
        breaks(world)
        after = found()
        await _stop(world)
        return before, after

    assert run(main) == (set(), {rule})


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (End.ABORTED, set()),
        (End.LOST, set()),
        (End.LOADED, {"blocks are freed"}),
        (End.RELEASED, {"blocks are freed"}),
    ],
)
def test_a_push_that_is_awaited_when_all_is_quiet(end: End, expected: set[str]) -> None:
    """A decode engine may wait only for the KV of requests that were closed, as far as none is
    counted.
    """

    async def main(network: VirtualNetwork) -> tuple[set[str], set[str]]:
        world = World(Options(connector="nixl-push", prefill=1, decode=1), network, Trace())
        await world.begin()
        prefill, decode = world.engines
        (core,) = decode.sim.engine._cores
        connector: Any = core.connector
        connector.expected["cmpl-leg-0-abc"] = SimpleNamespace(since=0.0)
        before = rules(invariants.quiet(world))
        record = PrefillRecord(prefill.url, None, (), lambda body: None, decode.url)
        custody = world.proxy.custodian.take(Handle(b"{}", None, 1, "leg"), record)
        custody.spend(world.proxy.engines[decode.url].in_ledger.run_number)
        custody.end(end)
        after = rules(invariants.quiet(world))
        connector.expected.clear()
        await _stop(world)
        return before, after

    assert run(main) == ({"blocks are freed"}, expected)


async def _stop(world: World) -> None:
    """Stop without the drain, which would wait for what was broken."""
    await world.in_proxy(world.proxy.stop())
    for engine in (*world.engines, world.judge):
        await engine.run(engine.sim.stop())
    await asyncio.sleep(1)


def test_the_trace_tells_runs_apart() -> None:
    async def main(network: VirtualNetwork) -> list[str]:
        found: list[str] = []
        steps: list[Callable[[Trace], Any]] = [
            lambda trace: None,
            lambda trace: trace.delivered(1, 5),
            lambda trace: trace.delivered(1, 6),
            lambda trace: trace.notify(report("a")),
            lambda trace: trace.notify(report("a", "engine")),
            lambda trace: trace.ended(outcome("a")),
            lambda trace: trace.mark("item 3"),
        ]
        for step in steps:
            trace = Trace()
            step(trace)
            found.append(trace.digest)
        return found

    digests = run(main)
    assert len(set(digests)) == len(digests)


def test_a_body_that_is_no_json() -> None:
    engines: list[Any] = [
        SimpleNamespace(name=name, sim=SimpleNamespace(defective=[])) for name in ("P0", "D0")
    ]
    assert invariants.bodies(engines) == []
    engines[1].sim.defective.append("POST /v1/completions: no JSON")
    assert invariants.bodies(engines) == [
        Finding("each body is JSON", "D0: POST /v1/completions: no JSON")
    ]


def test_what_only_leases_free() -> None:
    """A client of nixl-push that leaves before a decode engine is asked leaves KV that nothing else
    frees.
    """
    events = [HandleEnded(end, "http://p:1", 1.0) for end in ("lost", "loaded", "lost", "stuck")]
    found = {
        name: invariants.left_to_leases(registry.entry_of(name).contract(Settings()), events)
        for name in ("nixl-push", "nixl", "mooncake")
    }
    assert found == {"nixl-push": 2, "nixl": 0, "mooncake": 0}
