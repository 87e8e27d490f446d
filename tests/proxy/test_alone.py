"""`pools[].alone`: which prompts a decode engine may serve whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdproxy.app.live import configure_pool
from pdproxy.observe.events import RequestEnded
from pdproxy.settings.changes import changes
from pdproxy.settings.conform import conform, parse
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.pools import AloneLimit, Pool, PoolPolicy, PoolSlo
from pdproxy.settings.schema import Settings
from tests.fakes import scripts
from tests.fakes.client import Answer
from tests.fakes.world import CHAT, COMPLETIONS, TEXT, World, chat, completion, world

LONG = "import os " * 400
"""A prompt of 4000 bytes: taken to be 1000 tokens."""


def pool(**fields: Any) -> Callable[[Settings], Settings]:
    """Settings whose pool has these fields."""

    def adjust(settings: Settings) -> Settings:
        replace = msgspec.structs.replace
        return replace(settings, pools=(replace(settings.pools[0], **fields),))

    return adjust


def without_prefill(w: World) -> None:
    for engine in w.prefill:
        w.mark_down(engine, "gone")


def is_refused(answer: Answer, why: str) -> bool:
    error = answer.json["error"]
    assert (answer.status, answer.header("retry-after")) == (503, "1"), answer.body
    assert error["type"] == "ServiceUnavailableError"
    assert error["reason"] == "alone"
    return f"({why})" in error["message"]


@pytest.mark.parametrize(
    ("alone", "refused"), [("always", False), (999, True), (1000, False), ("never", True)]
)
async def test_a_prompt_that_can_not_be_split_now(alone: str | int, refused: bool) -> None:
    """Without a prefill engine. Prompts below a block are served all the same."""
    async with world(adjust=pool(alone=alone)) as w:
        without_prefill(w)
        answer = await w.ask(COMPLETIONS, completion(prompt=LONG))
        if refused:
            assert is_refused(answer, "no_pair")
            assert w.metric("pdproxy_refusals_total", reason="alone") == 1
            assert not w.metric("pdproxy_alone_total")
            assert not w.decode[0].requests
        else:
            assert answer.status == 200
        assert (await w.ask(COMPLETIONS, completion(prompt="x"))).status == 200
        ready = await w.get("/ready")
        assert ready.status == (503 if alone == "never" else 200)


async def test_tokens_count_where_they_are_known() -> None:
    """Whatever the size of the text."""
    async with world(adjust=pool(alone=100)) as w:
        without_prefill(w)
        assert (await w.ask(COMPLETIONS, completion(prompt=[1000] * 100))).status == 200
        assert is_refused(await w.ask(COMPLETIONS, completion(prompt=[1] * 101)), "no_pair")


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (COMPLETIONS, completion(prompt=LONG, echo=True), "echo"),
        (COMPLETIONS, completion(prompt=[LONG, LONG], stream=True, temperature=1, n=2), "n"),
        (COMPLETIONS, completion(prompt=[LONG, LONG], echo=True), "echo"),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": LONG}], use_beam_search=True),
            "beam_search",
        ),
    ],
)
async def test_a_request_that_can_never_be_split(path: str, body: dict[str, Any], why: str) -> None:
    """It is refused, too, and an aggregated engine serves it."""
    async with world(adjust=pool(alone="never")) as w:
        answer = await w.ask(path, body)
        assert is_refused(answer, why)
        assert not w.decode[0].requests
    async with world(aggregated=1, adjust=pool(alone="never")) as w:
        assert (await w.ask(path, body)).status == 200
        assert w.aggregated[0].requests
        assert not w.decode[0].requests


async def test_a_prefill_that_fails() -> None:
    """After the last attempt; a whole answer and a stream alike."""
    async with world(adjust=pool(alone="never"), deadlines={"prefill": 30}) as w:
        w.prefill[0].script(*[scripts.whole(b"{}", 500)] * 8)
        for stream in (False, True):
            assert is_refused(await w.ask(COMPLETIONS, completion(stream=stream)), "prefill_failed")
        assert [one.outcome for one in w.events(RequestEnded)] == ["capacity"] * 2


async def test_a_prompt_that_prefill_refuses() -> None:
    """An engine answers the client's own request: it alone can say what is wrong."""
    async with world(adjust=pool(alone="never")) as w:
        answer = await w.ask(COMPLETIONS, completion(temperature=-1))
        assert answer.status == 400


async def test_routes_that_one_engine_always_serves() -> None:
    async with world(adjust=pool(alone="never")) as w:
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}
        assert (await w.ask("/v1/messages", body)).status == 200


async def test_it_changes_while_requests_are_served() -> None:
    async with world() as w:
        without_prefill(w)
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        new = pool(alone="never")(w.proxy.settings)
        found = changes(w.proxy.settings, new)
        assert (found.at_once, found.restart) == (("pools[0].alone",), ())
        for one in w.workers:
            configure_pool(one.pools[0], new.pools[0], new)
        assert is_refused(await w.ask(COMPLETIONS, completion()), "no_pair")


@pytest.mark.parametrize(("alone", "choice"), [("always", "whole"), ("never", "split")])
async def test_a_placement_follows_it(alone: str, choice: str) -> None:
    """A short prompt would be served whole by the idle decode engine; without a pair it is
    refused.
    """
    policy = PoolPolicy(placement="auto")
    adjust = pool(alone=alone, policy=policy, profile="h200-8b", slo=PoolSlo(ttft=0.5, tpot=0.015))
    async with world(adjust=adjust) as w:
        answer = await w.ask(
            COMPLETIONS, completion(prompt=list(range(64))), [("X-PDProxy-Decision", "1")]
        )
        assert answer.status == 200
        assert (answer.header("x-pdproxy-decision") or "").startswith(choice)
        if alone == "never":
            without_prefill(w)
            assert is_refused(
                await w.ask(COMPLETIONS, completion(prompt=list(range(64)))), "no_pair"
            )


async def test_where_decode_is_gone_too_no_setting_is_to_blame() -> None:
    async with world(adjust=pool(alone="never")) as w:
        for engine in w.engines:
            w.mark_down(engine, "gone")
        assert (await w.ask(COMPLETIONS, completion())).json["error"]["reason"] == "no_engine"


@pytest.mark.parametrize(("text", "wanted"), [("always", None), ("never", 0), ("4000", 4000)])
def test_its_values(text: str, wanted: int | None) -> None:
    value = conform(parse(text, AloneLimit), AloneLimit, "")
    assert Pool(alone=value).alone_up_to == wanted


@pytest.mark.parametrize("value", ["sometimes", 0, -1, 1.5, None])
def test_what_is_none(value: object) -> None:
    with pytest.raises(SettingsError, match="expected always or never or a whole number"):
        conform(value, AloneLimit, "", ("alone",))
