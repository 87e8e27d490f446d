"""Engines that differ are never paired; engines that prove to differ are ejected; KV that does not
arrive is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from pdproxy.observe.events import KvShortfall
from tests.fakes import answers, scripts
from tests.fakes.engine import Reply
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, World, chat, completion, world


def _model(w: World) -> None:
    w.prefill[0].models = ["other"]


def _version(w: World) -> None:
    w.prefill[0].be(version="0.31.0")


def _block(w: World) -> None:
    w.prefill[0].be(block_size=32)


def _template(w: World) -> None:
    w.prefill[0].be(template="plain")


def _messages(w: World) -> None:
    w.prefill[0].admin["/v1/messages/count_tokens"] = scripts.whole(b'{"input_tokens":7}')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_model, "no model in common (other / tiny)"),
        (_version, "different versions (0.31.0 / 0.32.0)"),
        (_block, "different block sizes (32 / 16)"),
        (_template, "another tokenizer or chat template"),
        (_messages, "different lengths of the same canary message"),
    ],
)
async def test_incompatible_engines_are_not_paired(
    change: Callable[[World], None], said: str
) -> None:
    """A prefill engine unlike the decode engine is not asked; /ready says why; another pair is
    used.
    """
    async with world(before=change) as w:
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert not w.prefill[0].requests
        assert w.metric("pdproxy_alone_total", reason="no_pair") == 1
        details = (await w.get("/ready")).json["details"]
        expected = f"{w.prefill[0].url} and {w.decode[0].url} are not paired: "
        assert any(line.startswith(expected) and said in line for line in details), details
    async with world(prefill=2, before=change) as w:
        for _ in range(2):
            await w.ask(COMPLETIONS, completion())
        assert (len(w.prefill[0].requests), len(w.prefill[1].requests)) == (0, 2)


async def test_an_engine_that_changes_is_asked_again() -> None:
    """After a restart with another template the pair is gone; after one back, it is there again."""
    async with world() as w:
        await w.ask(CHAT, chat())
        assert len(w.prefill[0].requests) == 1
        w.prefill[0].be(template="plain")
        w.prefill[0].started += 100
        await w.probe()
        await w.ask(CHAT, chat())
        assert len(w.prefill[0].requests) == 1
        w.prefill[0].be(template="chatml")
        w.prefill[0].started += 100
        await w.probe()
        await w.ask(CHAT, chat())
        assert len(w.prefill[0].requests) == 2


async def test_engines_that_were_asked_on_different_days() -> None:
    """A template that prints the date made another prompt then, and makes the same today: they are
    a pair once both have been asked on one day, though none has restarted.
    """
    async with world(before=_template) as w:
        await w.ask(CHAT, chat())
        assert not w.prefill[0].requests
        w.prefill[0].be(template="chatml")
        await w.probe()
        await w.ask(CHAT, chat())
        assert len(w.prefill[0].requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_different_prompt_lengths_eject_the_pair(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines that count different lengths saw different prompts: loud, and never again until one
    of them changes.
    """

    async def longer(reply: Reply) -> None:
        reply.engine.loaded(reply.request)
        count = len(reply.engine.ids(reply.request)) + 1
        if stream:
            await reply.start()
            await reply.pieces(*answers.stream(False, count, [" a"], with_usage=True))
            await reply.finish()
        else:
            await reply.whole(answers.whole(False, list(range(count)), " a", 1))

    async with world() as w:
        w.decode[0].script(longer)
        assert (await w.ask(COMPLETIONS, completion(stream=stream))).status == 200
        assert w.metric("pdproxy_pairs_ejected_total") == 1
        assert any(
            r.levelno == logging.ERROR and "pair ejected" in r.getMessage() for r in caplog.records
        )
        await w.ask(COMPLETIONS, completion(stream=stream))
        assert len(w.prefill[0].requests) == 1
        assert any("ejected" in line for line in (await w.get("/ready")).json["details"])
        await w.probe()
        await w.ask(COMPLETIONS, completion(stream=stream))
        assert len(w.prefill[0].requests) == 1, "a probe that finds nothing new changes nothing"
        w.decode[0].started += 1
        await w.probe()
        await w.ask(COMPLETIONS, completion(stream=stream))
        assert len(w.prefill[0].requests) == 2
        assert (await w.get("/ready")).json["details"] == []


async def test_silent_recomputing_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """A decode engine that computes what it was to load: counted, logged and in /ready."""
    async with world() as w:
        w.decode[0].moves_kv = False
        await w.probe()
        for number in range(3):
            assert (await w.ask(COMPLETIONS, completion(prompt=f"{number} {PROMPT}"))).status == 200
        await w.quiet()
        for _ in range(3):
            await w.probe()
        tokens = sum(len(w.decode[0].ids(r)) // 16 * 16 for r in w.decode[0].requests)
        assert w.metric("pdproxy_kv_moved_total", result="recomputed") == tokens
        assert w.metric("pdproxy_kv_moved_total", result="transferred") == 0
        assert w.metric("pdproxy_kv_missing_tokens", node=w.decode[0].url) == tokens
        assert w.metric("pdproxy_kv_recomputed_ratio", node=w.decode[0].url) == 1
        assert len(w.events(KvShortfall)) == 1, "said once"
        assert any("KV did not arrive" in record.getMessage() for record in caplog.records)
        details = (await w.get("/ready")).json["details"]
        assert any(
            f"{tokens} of {tokens} prompt tokens never arrived" in line for line in details
        ), details


async def test_kv_that_moves_is_counted_as_moved() -> None:
    """With counters that rise there is no alarm, and the tokens count as transferred."""
    async with world() as w:
        for stream in (True, False, True):
            await w.ask(COMPLETIONS, completion(stream=stream))
        await w.quiet()
        for _ in range(3):
            await w.probe()
        tokens = sum(len(w.decode[0].ids(r)) // 16 * 16 for r in w.decode[0].requests)
        assert w.metric("pdproxy_kv_moved_total", result="transferred") == tokens
        assert w.metric("pdproxy_kv_moved_total", result="recomputed") == 0
        assert w.metric("pdproxy_kv_recomputed_ratio", node=w.decode[0].url) == 0
        assert (await w.get("/ready")).json["details"] == []


async def test_no_false_alarm_with_lagging_counters_or_clients_that_left() -> None:
    """Counters that lag a scrape, and requests whose clients left before data, are not taken for
    recomputing.
    """
    async with world() as w:
        engine = w.decode[0]

        async def lagging(reply: Reply) -> None:
            before = dict(engine.by_source)
            engine.loaded(reply.request)
            after, engine.by_source = engine.by_source, before
            behind.append(after)
            await reply.whole(answers.whole(False, engine.ids(reply.request), " a", 1))

        behind: list[dict[str, int]] = []
        engine.script(lagging)
        await w.ask(COMPLETIONS, completion())
        await w.quiet()
        await w.probe()  # the counters do not know of it yet
        engine.by_source = behind[0]
        await w.probe()
        await w.probe()
        assert not w.events(KvShortfall)
        assert w.metric("pdproxy_kv_moved_total", result="transferred") > 0
        for _ in range(3):
            engine.script(scripts.streams(then="stall"))
            client = await w.client()
            client.post(COMPLETIONS, completion(stream=True))
            request = await engine.asked(len(engine.requests) + 1)
            client.close()
            await request.left.wait()
            # it had been pulled
            engine.by_source["external_kv_transfer"] += len(engine.ids(request))
            await w.quiet()
            await w.probe()
        await w.ask(COMPLETIONS, completion())
        await w.quiet()
        for _ in range(3):
            await w.probe()
        assert not w.events(KvShortfall)
        assert (await w.get("/ready")).json["details"] == []


async def test_an_engine_that_does_not_count_is_said_to_be_blind() -> None:
    """Without the counters there is no audit, and /ready says so."""

    def blind(w: World) -> None:
        w.decode[0].admin["/metrics"] = scripts.whole(
            b'process_start_time_seconds 1.0\nvllm:cache_config_info{block_size="16",engine="0"} '
            b"1.0\n"
        )

    async with world(before=blind) as w:
        details = (await w.get("/ready")).json["details"]
        assert details == [
            f"decode {w.decode[0].url}: its /metrics do not say where prompt tokens come from"
        ]


@pytest.mark.parametrize("answer", [b"{}", b'{"input_tokens":"7"}', b"<html>", b"\xff"])
async def test_an_engine_that_counts_no_messages_is_paired(answer: bytes) -> None:
    """What it answers says nothing about what it serves."""

    def change(w: World) -> None:
        w.prefill[0].admin["/v1/messages/count_tokens"] = scripts.whole(answer)

    async with world(before=change) as w:
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert len(w.prefill[0].requests) == 1
