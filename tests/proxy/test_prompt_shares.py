"""Operators are told when decode engines compute whole prompts while prefill engines idle, by
`/ready`, the metric and `pdproxy engines list`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.cli import engines_table
from pdproxy.observe.prompt_shares import FEW, PART, WINDOW
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.schema import Settings
from tests.fakes import scripts
from tests.fakes.admin import admin
from tests.fakes.clock import ManualClock
from tests.fakes.passed import RESPONSES, everyone, fine, responses
from tests.fakes.process import served
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, until, world

ECHO = completion(echo=True)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MEDIA = [{"role": "user", "content": [IMAGE]}]


async def told(w: World) -> list[str]:
    """The sentences of `/ready` on how prompts are served."""
    found = (await w.get("/ready")).json
    assert (found["ready"], found["state"]) == (True, "ok")
    return [one for one in found["details"] if "prompt tokens" in one]


async def ask(w: World, count: int, path: str = COMPLETIONS, body: Any = ECHO) -> None:
    for _ in range(count):
        assert (await w.ask(path, body)).status == 200


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (COMPLETIONS, ECHO, "echo"),
        (COMPLETIONS, completion(stream=True, prompt_logprobs=None, echo=True), "echo"),
        (CHAT, chat(return_prompt_text=True), "echo"),
    ],
)
async def test_a_client_whose_requests_are_all_served_alone(
    path: str, body: dict[str, Any], reason: str
) -> None:
    """Its answers are right, and `/ready` is ok: only the sentence tells. Few requests are none."""
    async with world() as w:
        await ask(w, FEW - 1, path, body)
        assert await told(w) == []
        await ask(w, 1, path, body)
        (text,) = await told(w)
        assert text.startswith("100% of the prompt tokens of the last 5 minutes was computed by ")
        assert f"({reason} 100%)" in text
        tokens = w.metric("pdproxy_tokens_total", kind="prompt")
        shares = w.metric("pdproxy_prompt_tokens_total", served="beside_idle", reason=reason)
        assert shares == tokens > 0
        assert w.metric("pdproxy_prompt_tokens_total") == tokens
        assert not w.prefill[0].requests


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_requests_that_go_whole_on_their_own_route(fields: dict[str, Any]) -> None:
    """With a tool that an engine may run by itself."""
    tools = [{"type": "web_search_preview"}]
    async with world() as w:
        await ask(w, FEW, RESPONSES, responses(tools=tools, max_output_tokens=4, **fields))
        assert len(await told(w)) == 1
        tokens = w.metric("pdproxy_tokens_total", kind="prompt")
        labels = {"served": "beside_idle", "reason": "built_in_tools"}
        assert w.metric("pdproxy_prompt_tokens_total", **labels) == tokens > 0


async def test_a_client_whose_requests_are_split() -> None:
    """Also where some are not: two of three tokens are enough."""
    async with world() as w:
        await ask(w, 2 * FEW, body=completion())
        await ask(w, FEW)
        assert await told(w) == []
        tokens = w.metric("pdproxy_tokens_total", kind="prompt")
        split = w.metric("pdproxy_prompt_tokens_total", served="split", reason="none")
        assert 3 * split == 2 * tokens > 0
        await ask(w, 1)
        assert len(await told(w)) == 1


async def test_a_list_counts_each_prompt() -> None:
    async with world() as w:
        await ask(w, 1, body=completion(prompt=[[7] * 40, [8] * 60, [9] * 3]))
        assert w.metric("pdproxy_prompt_tokens_total", served="split", reason="none") == 100
        assert w.metric("pdproxy_prompt_tokens_total", served="alone", reason="short_prompt") == 3
        assert w.metric("pdproxy_prompt_tokens_total") == 103


async def test_short_prompts_are_no_problem() -> None:
    async with world() as w:
        await ask(w, 2 * FEW, body=completion(prompt=[1, 2, 3]))
        assert await told(w) == []


async def test_routes_that_generate_nothing_do_not_count() -> None:
    async with world() as w:
        everyone(w, "/v1/embeddings", fine)
        await ask(w, 2 * FEW, "/v1/embeddings", {"model": "tiny", "input": "a" * 999})
        assert await told(w) == []
        assert w.metric("pdproxy_prompt_tokens_total") == 0


async def test_a_wrong_request_does_not_count() -> None:
    async with world() as w:
        for _ in range(FEW):
            assert (await w.ask(COMPLETIONS, completion(max_tokens="x", echo=True))).status == 400
        assert w.metric("pdproxy_prompt_tokens_total") == 0


async def test_prefill_engines_that_work_or_are_not_there() -> None:
    """Nobody idles then: one is busy, none is up, none is configured."""
    async with world() as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, w.prefill[0].default))
        split = asyncio.ensure_future(w.ask(COMPLETIONS, completion()))
        await until(lambda: w.prefill[0].requests)
        await ask(w, FEW)
        assert await told(w) == []
        assert w.metric("pdproxy_prompt_tokens_total", served="alone", reason="echo") > 0
        go.set()
        assert (await split).status == 200
    async with world() as w:
        w.mark_down(w.prefill[0], "gone")
        await ask(w, FEW)
        assert w.metric("pdproxy_prompt_tokens_total", served="beside_idle") == 0
    async with world(prefill=0) as w:
        await ask(w, FEW)
        assert await told(w) == []


async def test_engines_that_are_there_for_whole_prompts() -> None:
    """An aggregated engine, and what the sentence advises."""

    def serves_whole(settings: Settings) -> Settings:
        pool = settings.pools[0]
        nodes = tuple(
            msgspec.structs.replace(one, serves_whole=one.role == "prefill")
            for one in pool.nodes
            if isinstance(one, ConfiguredEngine)
        )
        return msgspec.structs.replace(
            settings, pools=(msgspec.structs.replace(pool, nodes=nodes),)
        )

    async with world(aggregated=1) as w:
        await ask(w, FEW)
        assert await told(w) == []
    async with world(adjust=serves_whole) as w:
        await ask(w, FEW)
        assert await told(w) == []
        assert w.prefill[0].requests


async def test_it_is_over_when_the_window_is() -> None:
    clock = ManualClock()
    async with world(clock=clock) as w:
        await ask(w, FEW)
        assert len(await told(w)) == 1
        await clock.advance(WINDOW + PART)
        assert await told(w) == []


async def test_the_admin_api_and_the_table_show_the_shares() -> None:
    async with world() as w, admin(w) as api:
        assert "no prompts in the last 5 minutes" in engines_table.prompts(
            await api.get("/engines")
        )
        await ask(w, 1, body=completion(prompt=[7] * 30))
        await ask(w, 2, body=completion(prompt=[7] * 30, echo=True))
        listed = await api.get("/engines?pool=default")
        (one,) = listed["prompts"]
        assert one["served"] == {
            "split": 30,
            "alone": {},
            "beside_idle": {"echo": 60},
            "prompts": 2,
        }
        text = (
            "prompt tokens of the last 5 minutes: 33% split, 67% served by one engine alone (echo "
            "67%), 67% while a prefill engine had no request"
        )
        assert engines_table.prompts(listed) == text
        two = {"prompts": [one, {**one, "pool": "b"}]}
        assert engines_table.prompts(two).splitlines() == [
            f"pool {one['pool']}: {text}",
            f"pool b: {text}",
        ]
        assert engines_table.prompts({"engines": []}) == ""


async def test_two_workers_are_judged_together(tmp_path: Path) -> None:
    """Each has few requests; together they have enough, and the sentence stands there once."""
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2) as proxy:

            async def details() -> list[str]:
                found: list[str] = (await proxy.ask("GET", "/ready")).json["details"]
                return [one for one in found if "prompt tokens" in one]

            for count in range(FEW):
                found = await details()
                assert found == [], count
                assert (await proxy.ask("POST", COMPLETIONS, ECHO)).status == 200
            (text,) = await details()
            assert text.startswith("100% of")
