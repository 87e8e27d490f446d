"""The placement `auto` in a proxy: what it decides, what it learns, and what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from pdproxy.scheduling.auto.auto import Auto
from pdproxy.settings.engines import Facts
from pdproxy.settings.pools import PoolPolicy, PoolSlo
from pdproxy.settings.schema import Settings
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, until, world

WANTED = [("X-PDProxy-Decision", "1")]
IDS = list(range(64))
NONE: Mapping[str, Any] = MappingProxyType({})


def auto_world(
    prefill: int = 0,
    decode: int = 0,
    *,
    anything: int = 0,
    profile: str | None = "h200-8b",
    policy: Mapping[str, Any] = NONE,
    slo: PoolSlo | None = None,
    **more: Any,
) -> AbstractAsyncContextManager[World]:
    """A world whose pool has it. `policy`: further settings of it."""

    def adjust(settings: Settings) -> Settings:
        chosen = msgspec.structs.replace(
            settings.pool,
            policy=PoolPolicy(placement="auto", **policy),
            profile=profile,
            slo=slo or PoolSlo(ttft=0.5, tpot=0.015),
        )
        return msgspec.structs.replace(settings, pools=(chosen,))

    return world(prefill, decode, anything=anything, adjust=adjust, **more)


def auto_of(w: World) -> Auto:
    found = w.proxy.ledger.placement
    assert isinstance(found, Auto)
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prefill", "decode", "anything"), [(0, 0, 2), (2, 2, 0), (1, 1, 2)])
async def test_it_serves_on_engines_of_all_roles(
    prefill: int, decode: int, anything: int, stream: bool
) -> None:
    """Whatever it decides, the text is the same, nothing is left of a request, and each decision
    shows its predictions.
    """
    async with auto_world(prefill, decode, anything=anything) as w:
        body = completion(prompt=IDS, stream=stream)
        answers = await asyncio.gather(*[w.ask(COMPLETIONS, body, WANTED) for _ in range(8)])
        assert [answer.status for answer in answers] == [200] * 8
        assert len({answer.text for answer in answers}) == 1
        for answer in answers:
            shown = answer.header("x-pdproxy-decision")
            assert shown is not None
            assert shown.startswith(("whole http", "split http"))
            assert "; ttft=" in shown
            assert "; tpot=" in shown
        assert (await w.ask(CHAT, chat())).status == 200
        await w.quiet()
        placement = auto_of(w)
        assert not placement._legs
        # Of several workers one may not have read yet what has ended in another.
        loads = placement._loads.values()
        await until(
            lambda: all((one.expected, one.decoding, one.pending_s) == (0, 0, 0.0) for one in loads)
        )


async def test_an_engines_own_settings_say_how_many_tokens_its_steps_have() -> None:
    """Else its profile does."""

    def adjust(settings: Settings) -> Settings:
        first, second = settings.pool.nodes
        own = msgspec.structs.replace(second, facts=Facts(max_num_batched_tokens=512))
        pool = msgspec.structs.replace(
            settings.pool,
            policy=PoolPolicy(placement="auto"),
            profile="h200-8b",
            nodes=(first, own),
        )
        return msgspec.structs.replace(settings, pools=(pool,))

    async with world(0, 0, anything=2, adjust=adjust) as w:
        assert (await w.ask(COMPLETIONS, completion(prompt=IDS))).status == 200
        chunks = {url: load.times.chunk for url, load in auto_of(w)._loads.items()}
        assert chunks == {w.anything[0].url: 8192, w.anything[1].url: 512}


async def test_streams_show_how_wrong_its_times_are() -> None:
    """The simulated engines take no time: the times of the profile are too long for them."""
    async with auto_world(anything=1) as w:
        for number in range(60):
            body = completion(prompt=[*range(200), number], stream=True, max_tokens=2)
            assert (await w.ask(COMPLETIONS, body)).status == 200
        await w.quiet()
        (load,) = auto_of(w)._loads.values()
        assert load.prefill.known
        assert w.metric("pdproxy_prediction_error_ratio", of="ttft", way="whole", kind="mean") < 0
        assert w.metric("pdproxy_prediction_error_ratio", of="ttft", way="whole", kind="size") > 0
        assert (
            w.metric("pdproxy_time_correction_ratio", node=load.url, work="prefill")
            == load.times.prefill_factor
        )
        assert w.metric("pdproxy_engines_kept_for_prefill") == 0


async def test_without_a_profile_it_says_so_until_it_has_measured() -> None:
    async with auto_world(anything=2, profile=None) as w:
        first, second = (engine.url for engine in w.anything)
        said = (
            f"no profile of {first} and 1 more: until enough of their answers were measured, "
            f"requests go to the engines"
        )
        details = (await w.get("/ready")).json["details"]
        assert any(detail.endswith(f"{said} with the least load") for detail in details)
        reasons = []
        for number in range(60):
            body = completion(prompt=[*range(64), number], stream=True, max_tokens=3)
            answer = await w.ask(COMPLETIONS, body, WANTED)
            assert answer.status == 200
            reasons.append(
                (answer.header("x-pdproxy-decision") or "").split("reason=")[1].split(";")[0]
            )
        assert reasons[0] == "uncalibrated"
        assert reasons[-1] != "uncalibrated"
        assert "no profile" not in (await w.get("/ready")).body.decode()
        assert {first, second} == {load.url for load in auto_of(w)._loads.values()}


async def test_what_no_engine_can_serve_in_time_is_refused_where_the_settings_want_it() -> None:
    """With 503 and Retry-After, before any engine has it. A request without such a limit is
    served.
    """
    async with auto_world(anything=2, policy={"refuse_late": True}) as w:
        body = completion(prompt=IDS)
        answer = await w.ask(COMPLETIONS, body, [("X-PDProxy-SLO-TTFT-MS", "0.001")])
        assert answer.status == 503
        assert answer.header("retry-after") is not None
        assert answer.json["error"]["message"]
        assert not [engine for engine in w.anything if engine.requests]
        assert w.metric("pdproxy_decisions_total", choice="refused", reason="late") == 1
        assert (await w.ask(COMPLETIONS, body)).status == 200
    async with auto_world(anything=2) as w:
        assert (await w.ask(COMPLETIONS, body, [("X-PDProxy-SLO-TTFT-MS", "0.001")])).status == 200


async def test_prefixes_attract_prompts() -> None:
    """What was sent to an engine is expected in its cache, and the decision says so."""
    async with auto_world(anything=3) as w:
        beginning = list(range(4000))
        shown = []
        for number in range(4):
            answer = await w.ask(
                COMPLETIONS, completion(prompt=[*beginning, number], stream=True), WANTED
            )
            assert answer.status == 200
            await w.quiet()
            await w.told()
            shown.append(answer.header("x-pdproxy-decision") or "")
        assert len({text.split()[1] for text in shown}) == 1, shown
        assert "reason=cached" in shown[-1]
