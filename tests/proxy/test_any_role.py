"""Engines of role any: each makes KV for others, uses others' KV and serves requests whole, for
different requests at once.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
import pytest

from pdproxy.observe.events import NodeChanged, RequestEnded
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.policy import Ask
from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes import scripts
from tests.fakes.engine import Reply, Script
from tests.fakes.placement import install, placed_world, scripted, split, whole
from tests.fakes.pool import pool
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, until, world

LONG_PROMPT = (
    "a prompt that has some blocks of KV, because it goes on for a while, and then some more"
)


SPLIT = {"policy": PoolPolicy(placement="split")}
"""Each prompt is split that can be: by default a pool with these engines has a placement."""


def splitting(settings: Settings) -> Settings:
    """Return settings with that."""
    chosen = msgspec.structs.replace(settings.pool, **SPLIT)
    return msgspec.structs.replace(settings, pools=(chosen,))


def roles_taken(w: World) -> set[tuple[str, bool]]:
    """What engines did: (URL, whether with another engine's KV)."""
    return {
        (engine.url, request.kv is not None) for engine in w.anything for request in engine.requests
    }


# -- texts


@pytest.mark.parametrize(
    ("connector", "dispatch"),
    [
        ("nixl", None),
        ("nixl-push", None),
        ("nixl-push", "concurrent"),
        ("mooncake", None),
        ("mooncake", "concurrent"),
        ("lmcache-mp", None),
        ("shared", None),
    ],
)
async def test_the_texts_are_one_engines(
    connector: str, dispatch: Literal["sequential", "concurrent"] | None
) -> None:
    """Split between any two, at the same time in both directions: as a plain engine answers, whole
    and streamed.

    One leg after the other, unless the settings want both at once: full engines could wait for each
    other for ever.
    """
    async with pool(
        connector, prefills=2, decodes=1, anything=True, dispatch=dispatch, pool_settings=SPLIT
    ) as p:
        assert p.world.proxy.transfer.contract.order == (dispatch or "sequential")
        asked = [
            (COMPLETIONS, completion(prompt=f"{LONG_PROMPT} {n}", max_tokens=6)) for n in range(6)
        ]
        asked += [
            (CHAT, chat(messages=[{"role": "user", "content": f"{LONG_PROMPT} {n}"}]))
            for n in range(4)
        ]
        asked += [(path, body | {"stream": True}) for path, body in asked[::3]]
        answers = await asyncio.gather(*[p.ask(path, body) for path, body in asked])
        for (path, body), answer in zip(asked, answers, strict=True):
            assert answer.status == 200, answer.body
            assert answer.text == (await p.asked_plain(path, body)).text
        split_apart = [
            report for report in p.world.events(RequestEnded) if report.legs[0].prefill is not None
        ]
        assert len(split_apart) == len(asked)
        assert len({report.legs[0].prefill for report in split_apart}) > 1, (
            "several engines make KV"
        )
        assert len({report.legs[0].decode for report in split_apart}) > 1, "several engines use it"
        assert all(report.legs[0].prefill != report.legs[0].decode for report in split_apart)


async def test_one_engine_serves_what_cannot_be_split() -> None:
    async with world(0, 0, anything=2) as w:
        bodies = [
            completion(prompt="short"),
            completion(n=2, temperature=1),
            completion(prompt="brief"),
        ]
        assert [(await w.ask(COMPLETIONS, body)).status for body in bodies] == [200] * 3
        assert {has_kv for _, has_kv in roles_taken(w)} == {False}


async def test_a_pool_of_one_serves_whole() -> None:
    """It is ready, and degraded: nobody is there to split prompts with."""
    async with world(0, 0, anything=1, adjust=splitting) as w:
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        ready = (await w.get("/ready")).json
        assert (ready["ready"], ready["state"]) == (True, "degraded")
        assert (await w.ended()).legs[0].why_alone == "no_pair"


# -- what is shown


async def test_ready_and_metrics_of_a_pool_of_any() -> None:
    async with world(0, 0, anything=3, adjust=splitting) as w:
        assert (await w.get("/ready")).json == {
            "ready": True,
            "state": "ok",
            "reason": None,
            "details": [],
        }
        await w.ask(COMPLETIONS, completion(stream=True))
        for engine in w.anything:
            labels = {"node": engine.url, "role": "any"}
            assert w.metric("pdproxy_node_up", **labels) == 1
            assert 'role="any"' in w.page().decode()
        assert w.metric("pdproxy_node_legs_total", phase="prefill") == 1
        assert w.metric("pdproxy_node_legs_total", phase="kv") == 1
        assert len((await w.get("/v1/models")).json["data"]) == 1


async def test_one_strange_engine_among_many_is_one_sentence() -> None:
    """Not one for each pair in each direction."""
    async with world(0, 0, anything=6, adjust=splitting) as w:
        ledger = w.proxy.ledger
        for engine in w.anything[1:]:
            ledger.eject(w.anything[0].url, engine.url)
        first = w.anything[1].url
        reason = "ejected: they counted different prompt lengths for one request"
        assert ledger.shortcomings(0.0) == [
            f"{w.anything[0].url} is not paired with {first} and 4 more: {reason}"
        ]
        assert ledger.why_degraded(0.0) is None
        for number, engine in enumerate(w.anything[2:]):
            ledger.mark_down(engine.url, f"gone {number}", 0.0)
        assert ledger.why_degraded(0.0) is not None


# -- faults: an engine dies as P, as D, and while it serves whole


@pytest.fixture
def _placement(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.usefixtures("_placement")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("part", ["prefill", "decode", "whole"])
@pytest.mark.parametrize("how", [scripts.eof, scripts.reset, scripts.whole(b"{}", 500)])
async def test_an_engine_that_fails_in_any_part_is_replaced(
    part: str, stream: bool, how: Script
) -> None:
    """Before any byte: another engine takes over, the failed one gets nothing more of it, and no KV
    is left.
    """
    async with placed_world(anything=4) as w:
        victim = w.anything[1]
        # Of the decode engines that may work with engine 0, the first is engine 1.
        choice = {"prefill": split(1, 0), "decode": split(0, 0), "whole": whole(1)}[part]
        scripted(w).choices.append(choice)
        victim.script(how)
        body = completion(prompt=LONG_PROMPT, stream=stream)
        answer = await w.ask(COMPLETIONS, body)
        reference = await w.ask(COMPLETIONS, body)
        assert (answer.status, answer.text) == (200, reference.text)
        leg = (await w.ended()).legs[0]
        assert leg.attempts == 2
        assert victim.url not in (leg.prefill, leg.decode)
        assert scripted(w).of(victim.url, "closed")[0][1] == {"whole": "aggregated"}.get(part, part)


@pytest.mark.usefixtures("_placement")
@pytest.mark.parametrize("part", ["prefill", "decode", "whole"])
async def test_an_engine_that_dies_with_several_parts_at_once(part: str) -> None:
    """It makes KV for one request, uses it for another and serves a third: all three are
    answered.
    """
    async with placed_world(anything=4) as w:
        placement, victim = scripted(w), w.anything[1]
        reached = asyncio.Event()

        async def held(reply: Reply) -> None:
            if len(victim.requests) == 3:
                reached.set()
            await reached.wait()
            victim.refuse()
            reply.reset()

        order = {"prefill": [split(1, 0), split(0, 0), whole(1)]}
        order["decode"] = order["prefill"][1:] + order["prefill"][:1]
        order["whole"] = order["prefill"][2:] + order["prefill"][:2]
        placement.choices.extend(order[part])
        placement.usual = split(2, 2)
        victim.default = held
        bodies = [completion(prompt=f"{LONG_PROMPT} {n}", stream=n == 1) for n in range(3)]
        answers = await asyncio.gather(*[w.ask(COMPLETIONS, body) for body in bodies])
        assert [answer.status for answer in answers] == [200] * 3
        await w.quiet()
        engine = next(engine for engine in w.proxy.ledger.engines if engine.url == victim.url)
        assert (engine.requests, engine.prompt_bytes) == (0, 0)


async def test_a_breaker_of_any_is_one_for_all_parts() -> None:
    """An engine that fails as prefill engine is not asked to decode either, as long as others are
    there.
    """
    async with world(
        0, 0, anything=3, limits={"breaker_failures": 1, "breaker_cooldown": 100.0}
    ) as w:
        ledger, victim = w.proxy.ledger, w.anything[0]
        pair = None
        for _ in range(3):
            pair = ledger.assign(
                (Role.PREFILL, Role.DECODE), Ask("tiny", 100, w.proxy.service.resources.now())
            )
            assert pair is not None
            if pair.leases[0].engine.url == victim.url:
                break
            for lease in pair.leases:
                ledger.close(lease, Verdict.NEUTRAL, w.proxy.service.resources.now())
        assert pair is not None
        assert pair.leases[0].engine.url == victim.url
        for lease, verdict in zip(pair.leases, (Verdict.FAILED, Verdict.NEUTRAL), strict=True):
            w.proxy.service.resources.close(lease, verdict)
        assert [event.role for event in w.events(NodeChanged) if not event.up] == ["any"]
        for n in range(4):
            assert (await w.ask(COMPLETIONS, completion(prompt=f"{LONG_PROMPT} {n}"))).status == 200
        assert not victim.requests
        await until(lambda: not w.busy())
