"""The placement `auto` in front of two real engines of any role: engines are chosen by the first
ids of a long prompt, and all of its ids are made behind that.
"""

from __future__ import annotations

import pytest

from pdproxy.scheduling.prefix.prompts import PromptBeginning
from pdproxy.serving.dispatch.prefixes import PrefixQuestions
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.health import Probes
from pdproxy.settings.pools import Pool, PoolPolicy, PoolSlo
from pdproxy.settings.schema import Settings
from tests.fakes.world import until
from tests.proxy.prefixes import proxy_before

from .client import Answer, ask
from .engine import MODEL
from .fleet import Fleet

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

CHAT = "/v1/chat/completions"
AGREE_WITHIN = 120.0
DECISION = {"X-PDProxy-Decision": "1"}


async def test_engines_are_chosen_by_the_first_ids_of_a_long_prompt(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as no engine has more of it in its cache. The answer is that of a plain engine. All
    ids of the same prompt are known at once when it comes again.
    """
    enough: list[bool] = []
    known_by_first = PrefixQuestions.known_by_first

    def noted(*given: object) -> PromptBeginning | None:
        found = known_by_first(*given)  # type: ignore[arg-type]
        enough.append(found is not None)
        return found

    monkeypatch.setattr(PrefixQuestions, "known_by_first", noted)
    pool = Pool(
        nodes=tuple(ConfiguredEngine(url=engine.url, role="any") for engine in fleet.decodes),
        policy=PoolPolicy(placement="auto"),
        profile="h200-8b",
        slo=PoolSlo(ttft=0.5, tpot=0.015),
    )
    settings = Settings(pools=(pool,), probes=Probes(interval=0.5, scrape_interval=1.0))
    words = " ".join(f"first {number} words" for number in range(260))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 8,
        "temperature": 0,
    }
    plain = await ask(fleet.plain.url, CHAT, body)
    async with proxy_before(settings) as world:

        async def answer() -> Answer:
            return await ask(f"http://127.0.0.1:{world.port}", CHAT, body, headers=DECISION)

        def made() -> float:
            return world.metric("pdproxy_tokenize_total", source="here", result="ok")

        await until(
            lambda: world.metric("pdproxy_tokenize_agrees") >= len(fleet.decodes), AGREE_WITHIN
        )
        for number in (1, 2):
            got = await answer()
            assert (got.status, got.text) == (200, plain.text), got.body
            assert got.json["usage"]["prompt_tokens"] == plain.json["usage"]["prompt_tokens"]
            assert got.headers["x-pdproxy-decision"].startswith(("whole ", "split "))
            await until(lambda: made() == number)  # noqa: B023 - it ends within the turn
            assert enough == [True]
