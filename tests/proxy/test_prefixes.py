"""What the proxy knows of engines' prefix caches, before simulated engines: it chooses by it, and
what it expects comes true.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from pdproxy.fleet import kv_source
from pdproxy.scheduling.prefix import refreshing
from pdproxy.serving.dispatch import prefixes
from pdproxy.settings.kv import KvEvents, Prefixes
from pdproxy.settings.pools import PoolPolicy
from pdproxy.wire.route import Route
from pdproxy_lab.sim.facts import KvEventsConfig
from tests.fakes.pool import Pair, pool
from tests.fakes.ports import free_port
from tests.fakes.tokenizer import SimTokenizer
from tests.proxy.kv_events import ANY, prompt
from tests.proxy.prefixes import Known, knowing
from tests.sim.raw import until

NO_REPLAYS = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", topic="t")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_source, "COOLDOWN", 0.01)
    monkeypatch.setattr(refreshing, "GAP", 0.0)


async def test_a_prompt_goes_where_its_beginning_is() -> None:
    async with knowing(3) as known:
        first = {number: await known.ask(prompt(number)) for number in range(6)}
        assert set(first.values()) == {0, 1, 2}
        for number in (3, 0, 5, 2, 4, 1):
            await known.settled()
            assert await known.ask([*prompt(number), 7, 8, 9]) == first[number]
        assert known.all() == (12, 0, 0)
        tokens = known.world.metric("pdproxy_prefix_tokens_total", what="reported")
        assert (
            tokens == 6 * 96 == known.world.metric("pdproxy_prefix_tokens_total", what="predicted")
        )


@pytest.mark.parametrize(("config", "basis"), [(ANY, "events"), (None, "routing")])
async def test_a_prompt_whose_first_ids_are_enough_does_not_wait_for_the_others(
    config: KvEventsConfig | None, basis: str
) -> None:
    """An engine is chosen while they are made, and they say later what it has. Where an engine may
    have more than the first ones say, the prompt waits.
    """
    tokenizer = SimTokenizer()
    tokenizer.first = 300
    async with knowing(3, config, tokenizer=tokenizer) as known:
        await until(lambda: known.world.metric("pdproxy_tokenize_agrees") == 3)
        texts = [f"{number} {'many words ' * 90}" for number in range(4)]
        tokenizer.gate.clear()
        first = [await known.ask(text) for text in texts]
        assert set(first) == {0, 1, 2}
        waits = asyncio.create_task(known.ask(f"{texts[0]} and more"))
        await until(lambda: tokenizer.waiting == 2)
        assert not waits.done()
        tokenizer.gate.set()
        assert await waits == first[0]
        for text, engine in zip(texts, first, strict=True):
            await known.settled()
            assert await known.ask(text) == engine
        exact, too_high, too_low = known.all(basis)
        assert (exact + too_low, too_high) == (9, 0)
        assert too_low <= (basis == "routing"), "at most of the one that came at the same moment"
        assert known.world.metric("pdproxy_tokenize_total", result="ok") == 9


async def test_expectations_come_true_while_caches_are_full() -> None:
    """Engines evict all the time: what was just sent to one may be gone as soon."""
    chance = random.Random(5)
    async with knowing(2, num_gpu_blocks=40, max_model_len=256) as known:
        for _ in range(150):
            body = [
                *prompt(chance.randrange(12)),
                *chance.choices(range(300, 900), k=chance.randrange(40)),
            ]
            await known.ask(body)
            await known.settled()
        assert known.all() == (150, 0, 0)
        assert known.world.metric("pdproxy_prefix_event_blocks_total", result="removed") > 100


async def test_a_lost_message_is_made_up_for_without_replay() -> None:
    """The engine has more than is known: the next request with that prompt has it reported, and
    then all is known.
    """
    async with knowing(1, NO_REPLAYS, prefixes={"ttl": 0.001}) as known:
        await forget(known)
        await known.ask(prompt(1))
        assert known.all() == (3, 0, 1)
        await known.settled()
        await known.ask(prompt(1))  # this one asks
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="asked") == 1
        assert known.all() == (3, 0, 2)
        await known.settled()
        await known.ask(prompt(1))
        assert known.all() == (4, 0, 2)
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="asked") == 1


async def test_an_engine_that_refuses_the_field_gets_no_more_and_no_client_learns_of_it() -> None:
    async with knowing(1, NO_REPLAYS, prefixes={"ttl": 0.001}) as known:
        await forget(known)
        await known.ask(prompt(1))
        for _ in range(refreshing.REFUSALS):
            known.sims[0].faults.add("status:status=400,next=1,path=/v1/completions")
            await known.settled()
            await known.ask(prompt(1))  # asks, is refused, and is sent again as the client wrote it
        assert (
            known.world.metric("pdproxy_prefix_refreshes_total", result="refused")
            == refreshing.REFUSALS
        )
        for _ in range(3):
            await known.settled()
            await known.ask(prompt(1))
        assert (
            known.world.metric("pdproxy_prefix_refreshes_total", result="asked")
            == refreshing.REFUSALS
        )


async def test_a_clients_own_bad_request_is_still_answered_400() -> None:
    """And it does not look as if the engine refused the field."""
    async with knowing(1, NO_REPLAYS, prefixes={"ttl": 0.001}) as known:
        await forget(known)
        await known.ask(prompt(1))
        await known.settled()
        known.sims[0].faults.add("status:status=400,next=2,path=/v1/completions")
        body = {"model": "tiny", "prompt": prompt(1), "max_tokens": 2}
        assert (await known.world.ask("/v1/completions", body)).status == 400
        for _ in range(3):
            await known.ask(prompt(1))
            await known.settled()
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="asked") == 2
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="refused") == 1


@pytest.mark.parametrize("refresh", [True, False])
async def test_refreshing_can_be_switched_off(refresh: bool) -> None:
    async with knowing(1, NO_REPLAYS, prefixes={"ttl": 0.001, "refresh": refresh}) as known:
        await forget(known)
        for _ in range(4):
            await known.ask(prompt(1))
            await known.settled()
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="asked") == refresh


async def test_without_events_what_was_sent_is_known() -> None:
    async with knowing(2, None) as known:
        first = {number: await known.ask(prompt(number)) for number in range(6)}
        for number in (3, 0, 5, 2, 4, 1):
            assert await known.ask([*prompt(number), 7, 8, 9]) == first[number]
        assert known.all("routing") == (12, 0, 0)


async def test_while_no_events_come_what_was_sent_is_known() -> None:
    """Engine and proxy connect to the same port, and nobody binds it."""
    nobody = KvEventsConfig(
        enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{free_port()}", topic="t"
    )
    async with knowing(1, nobody, connected=False) as known:
        await until(
            lambda: known.world.metric("pdproxy_kv_event_sources", state="not_connected") == 1
        )
        for _ in range(2):
            await known.ask(prompt(1))
        assert (known.all("routing"), known.all()) == ((2, 0, 0), (0, 0, 0))
        assert known.world.metric("pdproxy_prefix_tokens_total", what="reported") == 96
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="asked") == 0


async def test_without_events_an_engine_holds_no_more_than_its_blocks() -> None:
    """Its metrics say how many it has."""
    async with knowing(1, None, num_gpu_blocks=40, max_model_len=256) as known:
        for number in range(12):
            await known.ask(prompt(number))
        assert 30 <= len(known.knowledge.routing) <= 40
        await known.ask(prompt(0))
        assert known.predictions("too_high", "routing") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_without_ids_the_text_is_known(stream: bool) -> None:
    """Chats as their messages are. Nothing is tokenized here."""
    async with knowing(2) as known:
        path, long = "/v1/chat/completions", "All ships that came in, and what they carried. " * 20

        def chat(number: int, *more: str) -> list[dict[str, str]]:
            texts = [f"{number} {long}", *more]
            return [
                {"role": "assistant" if at % 2 else "user", "content": text}
                for at, text in enumerate(texts)
            ]

        first = {number: await known.ask(chat(number), path, stream=stream) for number in range(4)}
        for number in (2, 1, 3, 0):
            more = chat(number, "Aye.", "And then?")
            assert await known.ask(more, path, stream=stream) == first[number]
        assert sum(known.all("text")) == 8
        assert known.world.metric("pdproxy_prefix_blocks", **{"from": "routing"}) > 40


async def test_salts_are_apart() -> None:
    """Clients with different salts share nothing, and so it is expected."""
    async with knowing(1) as known:
        for salt in ("a", "b", "a", None, "b"):
            await known.ask(prompt(1), **({} if salt is None else {"cache_salt": salt}))
            await known.settled()
        assert known.all() == (5, 0, 0)
        assert known.world.metric("pdproxy_prefix_tokens_total", what="reported") == 2 * 96


async def test_an_engine_that_starts_again_has_nothing() -> None:
    async with knowing(1) as known:
        for _ in range(2):
            await known.ask(prompt(1))
            await known.settled()
        await known.sims[0].restart()
        await known.world.probe()
        await until(
            lambda: (
                known.world.metric("pdproxy_kv_event_gaps_total", cause="restart")
                or len(known.knowledge.blocks) == 0
            )
        )
        await known.ask(prompt(1))
        assert known.predictions("too_high") == 0


async def test_nothing_is_kept_where_no_policy_asks() -> None:
    async with knowing(1, policy=PoolPolicy(), connected=False) as known:
        await known.ask(prompt(1))
        assert known.world.proxy.prefixes is None
        assert known.world.proxy.kv_events is None


async def test_a_report_is_asked_for_although_the_prompt_was_just_sent() -> None:
    """What was just sent counts as cached, but no event has said so."""
    async with knowing(1, NO_REPLAYS) as known:
        await forget(known)
        for _ in range(2):
            await known.ask(prompt(1))
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="asked") == 1


async def forget(known: Known) -> None:
    """Have the engine hold a prompt that the proxy knows nothing of: a message was lost, and there
    is no replay.
    """
    await known.ask(prompt(0))
    await known.settled()
    known.sims[0].faults.add("lost_kv_events:next=1")
    await known.ask(prompt(1))
    await known.settled()
    await known.ask(prompt(2))  # shows the gap: all is forgotten
    await known.settled()


# -- prompts that are split, and ids that are made here


def known_of(pair: Pair) -> Known:
    return Known(pair.world, [pair.p, pair.d, *pair.more])


SPLIT = {
    "policy": PoolPolicy(prefill="prefix", decode="least_load"),
    "kv_events": KvEvents(enabled=True),
    "prefixes": Prefixes(ttl=0.001),
}
PUBLISHING = {"kv_events": ANY, "enable_prompt_tokens_details": True}


async def connected(known: Known, count: int) -> None:
    await until(lambda: known.world.metric("pdproxy_kv_event_sources", state="connected") == count)
    await until(
        lambda: known.world.metric("pdproxy_kv_event_replays_total", result="complete") >= count
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_split_prompt_the_prefill_engines_answer_counts(stream: bool) -> None:
    """And the client gets what the prefill engine has found in its cache."""
    async with pool("nixl", prefills=2, everybody=PUBLISHING, pool_settings=SPLIT) as pair:
        known = known_of(pair)
        await connected(known, 3)
        prefills = [pair.p, pair.more[0]]
        served: dict[int, int] = {}
        for number in (0, 1, 2, 3, 2, 0, 3, 1):
            before = [one.engine.stats.prompt_tokens for one in prefills]
            body = {"model": "tiny", "prompt": prompt(number), "max_tokens": 3, "stream": stream}
            assert (await pair.ask("/v1/completions", body)).status == 200
            await known.settled()
            at = next(n for n in range(2) if prefills[n].engine.stats.prompt_tokens != before[n])
            assert served.setdefault(number, at) == at
        assert known.all() == (8, 0, 0)
        assert known.world.metric("pdproxy_prefix_tokens_total", what="reported") == 4 * 96
        assert set(served.values()) == {0, 1}


async def test_a_prefill_engine_is_asked_to_report_and_may_refuse() -> None:
    """The prompt is split all the same."""
    async with pool(
        "nixl", everybody={**PUBLISHING, "kv_events": NO_REPLAYS}, pool_settings=SPLIT
    ) as pair:
        known = known_of(pair)
        await until(lambda: known.world.metric("pdproxy_kv_event_sources", state="connected") == 2)

        async def ask(number: int) -> None:
            answer = await pair.ask(
                "/v1/completions", {"model": "tiny", "prompt": prompt(number), "max_tokens": 3}
            )
            assert answer.status == 200
            await known.settled()

        await ask(0)
        pair.p.faults.add("lost_kv_events:next=1")
        for number in (1, 2, 1):
            await ask(number)
        assert known.all() == (3, 0, 1)
        pair.p.faults.add("status:status=400,next=1,path=/v1/completions")
        await ask(1)
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="refused") == 1
        assert known.world.metric("pdproxy_alone_total") == 0
        await ask(1)
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="asked") == 2
        assert known.world.metric("pdproxy_prefix_refreshes_total", result="refused") == 1


async def test_prompts_that_are_tokenized_here_are_known_by_their_ids() -> None:
    settings = {**SPLIT, "prefixes": Prefixes()}
    async with pool(
        "nixl", everybody=PUBLISHING, pool_settings=settings, tokenizer=SimTokenizer()
    ) as pair:
        known = known_of(pair)
        await connected(known, 2)
        canaries = [one.tokens.canaries for one in pair.world.workers if one.tokens is not None]
        assert len(canaries) == len(pair.world.workers)
        await until(lambda: all(one.trusted("tiny", Route.CHAT) for one in canaries))
        messages = [{"role": "user", "content": "All ships that came in. " * 20}]
        for _ in range(3):
            assert (
                await pair.ask("/v1/chat/completions", {"model": "tiny", "messages": messages})
            ).status == 200
            await known.settled()
            messages += [
                {"role": "assistant", "content": "Aye."},
                {"role": "user", "content": "And what left again?"},
            ]
        assert known.all() == (3, 0, 0)
        assert known.world.metric("pdproxy_prefix_tokens_total", what="reported") > 200


async def test_long_prompts_keys_are_made_in_a_thread() -> None:
    async with knowing(1, max_model_len=40_000, num_gpu_blocks=8192) as known:
        for _ in range(2):
            await known.ask([300 + at % 3001 for at in range(20_000)])
            await known.settled()
        assert known.all() == (2, 0, 0)
        assert known.world.metric("pdproxy_prefix_tokens_total", what="reported") == 19_984
        assert known.world.proxy.prefixes is not None
        assert known.world.proxy.prefixes.of_requests._threads._threads


async def test_more_long_prompts_than_can_wait_are_served_without_knowledge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefixes, "WAITING", 0)
    async with knowing(1, max_model_len=40_000, num_gpu_blocks=8192) as known:
        await known.ask([300 + at % 3001 for at in range(20_000)])
        assert known.world.metric("pdproxy_prefix_skipped_total", reason="busy") == 1
        await known.ask(prompt(1))
        assert known.all() == (1, 0, 0)


async def test_an_engine_whose_settings_change_keeps_its_cache() -> None:
    """It is the same process: what was routed there is still known, and the next prompt goes
    there.
    """
    async with knowing(2, None) as known:
        prompt = [7] * 96
        at = await known.ask(prompt)
        url, members = known.sims[at].url, known.world.proxy.membership
        changed = [
            msgspec.structs.replace(one.settings, labels={"rack": "7"})
            if one.url == url
            else one.settings
            for one in members.members.values()
        ]
        old = known.world.proxy.engines[url]
        members.apply("settings", changed)
        assert known.world.proxy.engines[url] is not old
        assert [await known.ask([*prompt, n]) for n in range(4)] == [at] * 4
        members.remove(url, "settings", at_once=True)
        await until(lambda: url not in known.world.proxy.engines.known)
        assert [await known.ask([*prompt, n]) for n in range(2)] == [1 - at] * 2
