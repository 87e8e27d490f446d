"""Policies that need more than loads: sessions by a header or the body's `user`; labels that pair
engines; whole on prefill.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdproxy.fleet.entries import EngineEntries, EnginePairs, PoolEngines
from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes.passed import asked as requests_of
from tests.fakes.passed import everyone, fine
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, world

LONG_PROMPT = (
    "a prompt that has some blocks of KV, because it goes on for a while, and then some more"
)


def adjusted(
    *,
    labels: tuple[str, ...] = (),
    label: str = "rack",
    engines: dict[str, Any] | None = None,
    **pool: Any,
) -> Any:
    """What changes a world's settings: the pool's, and those of all its prefill engines; `labels`
    are the values of the engines' `label`.
    """

    def adjust(settings: Settings) -> Settings:
        replace, old = msgspec.structs.replace, settings.pool
        made = [
            replace(engine, **(engines or {})) if engine.role == "prefill" else engine
            for engine in old.nodes
        ]
        if labels:
            made = [
                replace(engine, labels={label: value})
                for engine, value in zip(made, labels, strict=True)
            ]
        return replace(settings, pools=(replace(old, nodes=tuple(made), **pool),))

    return adjust


async def asked(w: World, headers: list[tuple[str, str]], **fields: Any) -> set[str | None]:
    """The engines that made KV, and those that answered, for eight requests of a session."""
    before = {engine.url: len(engine.requests) for engine in w.engines}
    for n in range(8):
        body = completion(prompt=f"{LONG_PROMPT} {n}", **fields)
        assert (await w.ask(COMPLETIONS, body, headers)).status == 200
    return {engine.url for engine in w.engines if len(engine.requests) > before[engine.url]}


SESSION = adjusted(policy=PoolPolicy(prefill="session", decode="session"))


async def test_a_session_by_its_header_stays() -> None:
    """At one prefill and one decode engine; the header is forwarded as ever."""
    async with world(3, 3, adjust=SESSION) as w:
        homes = [await asked(w, [("X-Session-ID", f"s{n}")]) for n in range(4)]
        assert [len(home) for home in homes] == [2] * 4
        assert len(set().union(*homes)) > 2
        assert any(
            "s3" in str(request.headers) for engine in w.decode for request in engine.requests
        )


async def test_a_session_by_the_bodys_user_stays() -> None:
    async with world(3, 3, adjust=SESSION) as w:
        homes = [await asked(w, [], user=f"user {n}") for n in range(4)]
        assert [len(home) for home in homes] == [2] * 4
        assert len(set().union(*homes)) > 2


async def test_the_header_counts_more_than_the_user() -> None:
    async with world(3, 3, adjust=SESSION) as w:
        home = await asked(w, [("X-Session-ID", "s")])
        for n in range(4):
            assert await asked(w, [("X-Session-ID", "s")], user=f"user {n}") == home


async def test_without_either_the_least_load_counts() -> None:
    async with world(3, 3, adjust=SESSION) as w:
        assert len(await asked(w, [])) == 6, "they take turns"
        assert len(await asked(w, [("X-Session-ID", "")], user=None)) == 6


async def test_the_header_is_the_settings() -> None:
    """It is read in any case, is not forwarded, and X-Session-ID is then no session."""
    chosen = PoolPolicy(prefill="session", decode="session", session_header="X-My-Talk")
    async with world(3, 3, adjust=adjusted(policy=chosen)) as w:
        assert len(await asked(w, [("x-my-TALK", "one")])) == 2
        assert not [
            r
            for engine in w.engines
            for r in engine.requests
            if "x-my-talk" in str(r.headers).lower()
        ]
        assert len(await asked(w, [("X-Session-ID", "one")])) == 6


@pytest.mark.parametrize("value", ["x" * 60_000, "\u00ff\u00fe", "a b;c,d", "\t", '"'])
async def test_hostile_names_of_sessions(value: str) -> None:
    """Whatever they are, they are served; the part that counts is bounded."""
    async with world(2, 2, adjust=SESSION) as w:
        wanted = 2 if value.strip() else 4  # an empty one is none
        assert len(await asked(w, [("X-Session-ID", value)])) == wanted
        ask = {"user": value} if value != "\t" else {"user": {"a": [1, 2]}}
        answer = await w.ask(COMPLETIONS, completion(**ask))
        assert answer.status in (200, 400), "an engine judges the body's field"


async def test_chats_and_lists_have_sessions() -> None:
    async with world(3, 3, adjust=SESSION) as w:
        headers = [("X-Session-ID", "s")]
        home = await asked(w, headers)
        lists = completion(prompt=[f"{LONG_PROMPT} {n}" for n in range(2)])
        assert (await w.ask(COMPLETIONS, lists, headers)).status == 200
        assert (await w.ask(CHAT, chat(), headers)).status == 200
        used = {engine.url for engine in w.engines if engine.requests}
        assert home <= used
        assert len(used) <= 4, "two prompts at once: the second may find the bound"


async def test_routes_that_are_never_split_have_sessions_by_the_header() -> None:
    async with world(1, 3, adjust=SESSION) as w:
        before = [requests_of(engine, "/tokenize") for engine in w.decode]  # probes ask it, too
        for n in range(6):
            body = {"model": "tiny", "prompt": f"some text {n}"}
            assert (await w.ask("/tokenize", body, [("X-Session-ID", "s")])).status == 200
        counts = [
            requests_of(engine, "/tokenize") - old
            for engine, old in zip(w.decode, before, strict=True)
        ]
        assert sorted(counts) == [0, 0, 6]


async def test_what_an_invocation_sends_whole_has_its_session_by_the_header() -> None:
    async with world(1, 3, adjust=SESSION) as w:
        everyone(w, "/invocations", fine)
        for n in range(6):
            answer = await w.ask(
                "/invocations", {"input": f"some text {n}"}, [("X-Session-ID", "s")]
            )
            assert answer.status == 200
        assert sorted(requests_of(engine, "/invocations") for engine in w.decode) == [0, 0, 6]


# -- labels


async def test_engines_pair_only_within_a_label() -> None:
    """Racks a and b, with one prefill and one decode engine each: no KV crosses, and /ready has
    nothing to say about it.
    """
    async with world(
        2, 2, adjust=adjusted(labels=("a", "b", "b", "a"), pair_within=("rack",))
    ) as w:
        for n in range(8):
            assert (await w.ask(COMPLETIONS, completion(prompt=f"{LONG_PROMPT} {n}"))).status == 200
        pairs = {
            ((await w.ended(n + 1)).legs[0].prefill, (await w.ended(n + 1)).legs[0].decode)
            for n in range(8)
        }
        p, d = w.prefill, w.decode
        assert pairs == {(p[0].url, d[1].url), (p[1].url, d[0].url)}
        assert (await w.get("/ready")).json["details"] == []


async def test_a_handle_is_released_within_its_label() -> None:
    async with world(1, 2, adjust=adjusted(labels=("a", "b", "a"), pair_within=("rack",))) as w:
        engine = w.proxy.ledger.releasing.through(
            w.prefill[0].url, "tiny", w.proxy.service.resources.now()
        )
        assert engine is not None
        assert engine.url == w.decode[1].url


async def test_engines_without_a_partner_in_their_label_leave_a_pool_degraded() -> None:
    async with world(1, 1, adjust=adjusted(labels=("a", "b"), pair_within=("rack",))) as w:
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert (await w.ended()).legs[0].why_alone == "no_pair"
        assert (await w.get("/ready")).json["state"] == "degraded"


# -- revisions


async def test_a_new_revision_gets_requests_once_it_is_complete() -> None:
    """Its prefill engine comes up last. No prompt is split between both."""
    revisions = adjusted(label="revision", labels=("v1", "v2", "v1", "v2"))
    async with world(2, 2, adjust=revisions) as w:
        w.mark_down(w.prefill[1], "not started")
        for n in range(6):
            assert (await w.ask(COMPLETIONS, completion(prompt=f"{LONG_PROMPT} {n}"))).status == 200
            assert (await w.ask(COMPLETIONS, completion(prompt="short"))).status == 200
        assert not w.decode[1].requests
        told = "revision v2 gets no requests: it has no prefill engine that is up"
        assert told in (await w.get("/ready")).json["details"]
        parts = {
            name: w.metric("pdproxy_revision_share_ratio", pool="default", revision=name)
            for name in ("v1", "v2")
        }
        assert parts == {"v1": 1.0, "v2": 0.0}
        (pool,) = w.proxy.pools
        parts_of_pool = (pool.membership, pool.engines, pool.resources.shares, pool.slow)
        entries = EngineEntries(
            [PoolEngines(pool.name, *parts_of_pool, pool.ledger.revisions)], lambda: 0.0
        )
        new, old = (entries.entry(one.url) for one in (w.decode[1], w.decode[0]))
        assert (new.waits, old.waits) == (told, None)
        assert old.pairs == EnginePairs(1, [], 0), "the other revision's are no pairs that fail"
        for one in w.workers:
            engine = one.ledger.get(w.prefill[1].url)
            assert engine is not None
            assert engine.evidence is not None
            one.ledger.mark_up(engine.url, engine.evidence)
        first = len(w.decode[0].requests)
        for n in range(6):
            assert (await w.ask(COMPLETIONS, completion(prompt=f"{LONG_PROMPT} {n}"))).status == 200
        assert len(w.prefill[1].requests) == len(w.decode[1].requests) == 3
        assert len(w.decode[0].requests) - first == 3
        assert (await w.get("/ready")).json["details"] == []


# -- prefill engines that serve whole


async def test_a_prefill_engine_may_serve_whole() -> None:
    """What can't be split goes there first, as to aggregated engines; prompts that can are
    split.
    """
    async with world(1, 1, adjust=adjusted(engines={"serves_whole": True})) as w:
        assert (await w.ask(COMPLETIONS, completion(prompt="short"))).status == 200
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert [len(w.prefill[0].requests), len(w.decode[0].requests)] == [2, 1]
        assert w.prefill[0].requests[0].kv is None
        w.mark_down(w.decode[0], "gone")
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert (await w.ended(3)).legs[0].decode == w.prefill[0].url
