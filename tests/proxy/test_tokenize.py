"""Prompts become token ids at the proxy: P need not make them, no failure costs a request, a
template that differs is found.
"""

import asyncio
import json
import sys
from typing import Any

import msgspec
import pytest

from pdproxy.app.compose import Proxy
from pdproxy.fleet.canary import Canaries
from pdproxy.observe.events import DeadlinePassed, Tokenized, TokenizerJudged
from pdproxy.serving.dispatch import tokenizer_check
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.tokens.ids import TokenIds, from_numbers
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer
from tests.fakes.client import request
from tests.fakes.pool import pool
from tests.fakes.tokenizer import Shelf, SimTokenizer
from tests.fakes.world import (
    CHAT,
    CHAT_TEXT,
    COMPLETIONS,
    PROMPT,
    TEXT,
    World,
    chat,
    completion,
    until,
    world,
)

IDS = BuiltInTokenizer().encode(PROMPT)


def always(tokenizer: str | None = "model", tokenize: str = "always") -> Any:
    """Settings that tokenize."""

    def adjust(settings: Settings) -> Settings:
        (pool,) = settings.pools
        return msgspec.structs.replace(
            settings, pools=(msgspec.structs.replace(pool, tokenize=tokenize, tokenizer=tokenizer),)
        )

    return adjust


def _canaries(w: World) -> list[Canaries]:
    return [
        pool.tokens.canaries for one in w.workers for pool in one.pools if pool.tokens is not None
    ]


async def judged(w: World, count: int = 2) -> list[TokenizerJudged]:
    """Wait until so many engines were compared with us, by each worker."""
    await until(lambda: len(w.events(TokenizerJudged)) >= count)
    await until(lambda: len({len(list(one.agreements())) for one in _canaries(w)}) == 1)
    return w.events(TokenizerJudged)


async def proven(w: World, count: int = 2) -> None:
    """Have engines compared, and a prompt of each kind served by P's own tokenizing, which proves
    that ours are the same.
    """
    assert all(one.agrees for one in await judged(w, count))
    assert (await w.ask(COMPLETIONS, completion())).text == TEXT
    assert (await w.ask(CHAT, chat())).text == CHAT_TEXT
    assert "prompt_token_ids" not in legs(w)[0]["kv_transfer_params"]
    assert legs(w, 0)[0]["prompt"] == PROMPT
    await w.settled()
    w.forget()


def legs(w: World, at: int = -1) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bodies that P and D got."""
    return tuple(json.loads(engine.requests[at].body) for engine in (w.prefill[0], w.decode[0]))


async def test_completion_ids_go_to_both() -> None:
    """P and D get ids in place of the text, and the answer is the same."""
    async with world(adjust=always(), library=Shelf(model=SimTokenizer())) as w:
        await proven(w)
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.text == TEXT
        assert [leg["prompt"] for leg in legs(w)] == [IDS, IDS]
        assert w.events(Tokenized)[0].tokens == len(IDS)
        assert w.metric("pdproxy_tokenize_total", source="here", result="ok") == 3
        assert w.metric("pdproxy_tokenize_seconds_count", source="here") == 3
        assert w.metric("pdproxy_tokenize_agrees", model="tiny") == 2, "of both engines"
        assert b"tokenized" not in (await w.get("/ready")).body


async def test_chat_ids_stand_beside_the_kv_params() -> None:
    """P gets them there, and D those that P says; the messages stay."""
    async with world(adjust=always(), library=Shelf(model=SimTokenizer())) as w:
        await proven(w)
        answer = await w.ask(CHAT, chat())
        assert answer.text == CHAT_TEXT
        prefill, decode = legs(w)
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert (
            prefill["kv_transfer_params"]["prompt_token_ids"]
            == decode["kv_transfer_params"]["prompt_token_ids"]
        )
        assert prefill["messages"] == decode["messages"] == chat()["messages"]
        assert "prompt" not in prefill


async def test_each_prompt_of_a_list_has_its_own() -> None:
    """And prompts that are ids already are left alone."""
    async with world(adjust=always(), library=Shelf(model=SimTokenizer())) as w:
        await proven(w)
        prompts = [PROMPT, PROMPT + "print(argv)\n"]
        assert (await w.ask(COMPLETIONS, completion(prompt=prompts))).status == 200
        asked = sorted(
            (json.loads(one.body)["prompt"] for one in w.prefill[0].requests[2:]), key=len
        )
        assert asked == [BuiltInTokenizer().encode(one) for one in prompts]
        w.forget()
        assert (await w.ask(COMPLETIONS, completion(prompt=IDS))).status == 200
        assert w.events(Tokenized) == []


async def test_an_engine_that_serves_other_ids_than_it_tokenizes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its canaries agree, its first answer doesn't: that request is right, D gets P's ids; later P
    makes them all.
    """

    class Otherwise(SimTokenizer):
        def completion(
            self, text: str, *, add_special_tokens: bool, scope: bytes = b""
        ) -> TokenIds:
            made = super().completion(text, add_special_tokens=add_special_tokens, scope=scope)
            return from_numbers([*made.numbers(), 9]) if PROMPT in text and "user" in text else made

    async with world(adjust=always(), library=Shelf(model=Otherwise())) as w:
        await judged(w)
        for _ in range(2):
            assert (await w.ask(CHAT, chat())).text == CHAT_TEXT
            prefill, decode = legs(w)
            assert "prompt_token_ids" not in prefill["kv_transfer_params"]
            assert decode["kv_transfer_params"]["prompt_token_ids"][-1] != 9
        assert [one.agrees for one in w.events(TokenizerJudged)] == [True, True, False]
        assert w.metric("pdproxy_tokenize_total", source="here", result="off") == 1
        assert b"served other token ids than ours" in (await w.get("/ready")).body
        await w.ask(COMPLETIONS, completion())
        await w.ask(COMPLETIONS, completion())
        assert legs(w)[0]["prompt"] == IDS, "completions are another matter"


async def test_now_and_then_an_engine_shows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was proven once is proven again by one prompt in so many; each run of an engine begins
    again.
    """
    monkeypatch.setattr(tokenizer_check, "EVERY", 3)
    async with world(adjust=always(), library=Shelf(model=SimTokenizer())) as w:
        await judged(w)

        async def sent(count: int) -> list[bool]:
            before = len(w.prefill[0].requests)
            for _ in range(count):
                assert (await w.ask(COMPLETIONS, completion())).text == TEXT
            return [json.loads(one.body)["prompt"] == IDS for one in w.prefill[0].requests[before:]]

        assert await sent(7) == [False, True, True, False, True, True, False]
        w.prefill[0].started += 100
        await w.settled()
        w.forget()
        await w.probe()
        await judged(w, 1)
        assert await sent(2) == [False, True]


@pytest.mark.parametrize("tokenize", ["off", "auto"])
async def test_not_where_nothing_needs_it(tokenize: str) -> None:
    """This connector works without ids: no engine is compared, no thread made, no tokenizer
    loaded.
    """
    async with world(adjust=always("is not there", tokenize)) as w:
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert legs(w)[0]["prompt"] == PROMPT
        assert w.proxy.tokens is None
        assert b"pdproxy_tokenize_agrees{" not in w.page()


async def test_the_engines_own_model() -> None:
    """Without a folder in the settings, what an engine calls its model's root is looked for."""
    async with world(adjust=always(None), library=Shelf(root=SimTokenizer())) as w:
        await proven(w)
        await w.ask(COMPLETIONS, completion())
        assert legs(w)[0]["prompt"] == IDS


async def test_a_model_that_is_not_here() -> None:
    """Requests go on without ids, and the operator reads why."""
    async with world(adjust=always(None)) as w:
        (one, _) = await judged(w)
        assert not one.agrees
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert legs(w)[0]["prompt"] == PROMPT
        assert w.metric("pdproxy_tokenize_total", source="here", result="off") == 1
        ready = (await w.get("/ready")).body.decode()
        assert (
            "prompts of tiny are not tokenized here: ./model: is not a folder: name its folder "
            "with `tokenizer`" in ready
        )


def test_a_folder_that_can_not_be_used() -> None:
    """It ends the start, in one line."""
    nodes = (ConfiguredEngine(url="http://127.0.0.1:1", role="decode"),)
    settings = Settings(pools=(Pool(tokenize="always", tokenizer="/no/where", nodes=nodes),))
    with pytest.raises(
        SettingsError, match=r'^pools\[0\].tokenizer: "/no/where": is not a folder$'
    ):
        Proxy.build(settings)


def test_nothing_tokenizes_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the smaller image: where tokenizing is asked for, the start ends, and says what is
    missing.
    """
    monkeypatch.setitem(sys.modules, "transformers", None)
    nodes = (ConfiguredEngine(url="http://127.0.0.1:1", role="decode"),)
    asked = Pool(tokenize="always", nodes=nodes)
    missing = "needs transformers, which is not installed: "
    with pytest.raises(SettingsError, match=rf"^pools\[0\].tokenize: always: {missing}"):
        Proxy.build(Settings(pools=(asked,)))
    named = msgspec.structs.replace(asked, tokenizer="/")
    with pytest.raises(SettingsError, match=rf'^pools\[0\].tokenizer: "/": {missing}'):
        Proxy.build(Settings(pools=(named,)))


async def test_engines_tokenize_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that needs ids gets them of an engine, and the operator reads why."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    async with pool("lmcache-pd") as pair:
        w = pair.world
        assert not (await judged(w))[0].agrees
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert w.metric("pdproxy_tokenize_total", source="engine", result="ok") == 1
        ready = (await w.get("/ready")).body.decode()
        assert "--target tokenizer, or pip install transformers" in ready
        assert "name its folder" not in ready


async def test_a_template_that_differs_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """Chats are left to the engines, loudly; completions are made here all the same."""
    with caplog.at_level("INFO", "pdproxy"):
        async with world(adjust=always(), library=Shelf(model=SimTokenizer("plain"))) as w:
            assert not any(one.agrees for one in await judged(w))
            for _ in range(2):
                assert (await w.ask(CHAT, chat())).text == CHAT_TEXT
                assert "prompt_token_ids" not in legs(w)[0]["kv_transfer_params"]
                await w.ask(COMPLETIONS, completion())
            assert legs(w)[0]["prompt"] == IDS
            assert w.metric("pdproxy_tokenize_agrees", model="tiny") == 0
            ready = (await w.get("/ready")).body.decode()
            assert "other token ids than the engine's for a message" in ready
            assert "chats are left to the engines" in ready
    assert any(
        one.levelname == "ERROR" and "NOT tokenized" in one.getMessage() for one in caplog.records
    )


async def test_one_engine_of_several_that_differs() -> None:
    """Switches chats' ids off for its model, whichever engine would serve; they come back once it
    agrees again, or is gone.
    """
    async with world(decode=2, adjust=always(), library=Shelf(model=SimTokenizer())) as w:
        await proven(w, 3)
        other = w.decode[1]

        async def has_ids() -> bool:
            assert (await w.ask(CHAT, chat())).text == CHAT_TEXT
            return (
                "prompt_token_ids"
                in json.loads(w.prefill[0].requests[-1].body)["kv_transfer_params"]
            )

        assert await has_ids()
        for template, agrees in (("plain", False), ("chatml", True), ("plain", False)):
            other.be(template=template)
            other.started += 100
            await w.settled()
            w.forget()
            await w.probe()
            (one, *_) = await judged(w, 1)
            assert (one.node, one.agrees) == (other.url, agrees)
            assert await has_ids() is agrees
        other.stop()
        await w.probe()
        assert await has_ids()


async def test_late_ids_cost_the_request_nothing() -> None:
    """Past the deadline P gets the text. What waits for a thread no longer takes one."""
    tokenizer = SimTokenizer()
    async with world(
        adjust=always(), library=Shelf(model=tokenizer), deadlines={"tokenize": 0.1}
    ) as w:
        await judged(w)
        made = tokenizer.made
        tokenizer.gate.clear()
        answers = await asyncio.gather(*(w.ask(COMPLETIONS, completion()) for _ in range(4)))
        assert [one.text for one in answers] == [TEXT] * 4
        assert legs(w)[0]["prompt"] == PROMPT
        assert {one.wait for one in w.events(DeadlinePassed)} == {"tokenize"}
        assert w.metric("pdproxy_tokenize_total", source="here", result="late") == 4
        assert w.metric("pdproxy_deadline_total", wait="tokenize") == 4
        tokenizer.gate.set()
        await until(lambda: tokenizer.waiting == 0)
        assert tokenizer.made - made <= 2, (
            "two threads were at work, the others' wishes were withdrawn"
        )


async def test_a_client_that_leaves_meanwhile() -> None:
    """Nothing of its request reaches an engine."""
    tokenizer = SimTokenizer()
    async with world(adjust=always(), library=Shelf(model=tokenizer)) as w:
        await judged(w)
        tokenizer.gate.clear()
        client = await w.client()
        client.send(request("POST", COMPLETIONS, completion()))
        await until(lambda: tokenizer.waiting == 1)
        client.close()
        assert (await w.ended()).outcome == "client_left"
        tokenizer.gate.set()
        assert w.prefill[0].requests == []


async def test_what_only_an_engine_can_tell() -> None:
    """Truncation, for one: the request goes on as it came."""
    async with world(adjust=always(), library=Shelf(model=SimTokenizer())) as w:
        await judged(w)
        body = completion(truncate_prompt_tokens=20)
        assert (await w.ask(COMPLETIONS, body)).status == 200
        assert legs(w)[0]["prompt"] == PROMPT
        assert w.metric("pdproxy_tokenize_total", source="here", result="unsure") == 1
