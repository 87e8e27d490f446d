"""Where a pool has a placement: each attempt follows its decision, it learns what became of it, and
everybody can see why.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import msgspec
import pytest

from pdproxy.observe.events import Decided
from pdproxy.observe.logs import access_fields
from pdproxy.observe.weighed import Option, Weighed
from pdproxy.scheduling.decisions import KEPT
from pdproxy.scheduling.slo import Slo
from pdproxy.settings.pools import PoolPolicy, PoolSlo
from pdproxy.web.admin.decided import decisions_of
from tests.fakes import scripts
from tests.fakes.admin import admin
from tests.fakes.engine import serve
from tests.fakes.placement import NAME, install, late, placed_world, scripted, split, whole
from tests.fakes.pool import pool
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, until

IDS = list(range(40))
WANTED = [("X-PDProxy-Decision", "1")]
CHOSEN = Option(0.5, 0.123456, 0.008, 0.25, 0.0625, 0.1875, 0.125, 0.0, 16)
OTHER = Option(0.75, 0.25, 0.0, 0.25, 0.0, 0.375, 0.0625, 0.0625, 0)
"""Its TPOT was not computed."""
WEIGHED = Weighed(CHOSEN, OTHER, ("http://1", "http://2"), engine_s=1.0)
NUMBERS = (
    "ttft=0.1235; tpot=0.008; cost=0.5; cached=16; term=harm; other=split http://1 -> http://2; "
    "other_ttft=0.25; other_cost=0.75; other_cached=0"
)
replace = msgspec.structs.replace


@pytest.fixture(autouse=True)
def _placement(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


async def decisions(w: World) -> list[dict[str, Any]]:
    """The record of decisions, the newest first."""
    kept = w.proxy.pools[0].decisions
    assert kept is not None
    shown = msgspec.json.encode(decisions_of(kept.kept(), [], []).decisions)
    found: list[dict[str, Any]] = json.loads(shown)
    return found


# -- the decision is followed


@pytest.mark.parametrize("stream", [False, True])
async def test_whole_or_split_as_the_placement_decides(stream: bool) -> None:
    """On one engine without any handle, or on two; with the same text; and the reason is `decided`,
    not that it had to be.
    """
    async with placed_world(1, 2) as w:
        placement = scripted(w)
        placement.choices.extend([whole(1), split(0, 1)])
        body = completion(stream=stream)
        answers = [await w.ask(COMPLETIONS, body) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        assert answers[0].text == answers[1].text
        assert w.decode[1].requests[0].json["prompt"] == body["prompt"]
        assert w.decode[1].requests[0].kv is None
        assert w.decode[1].requests[1].kv is not None
        assert len(w.prefill[0].requests) == 1
        assert not w.decode[0].requests
        legs = [(await w.ended(n)).legs[0] for n in (1, 2)]
        assert [leg.why_alone for leg in legs] == ["decided", None]
        assert [leg.prefill for leg in legs] == [None, w.prefill[0].url]
        assert w.metric("pdproxy_alone_total", reason="decided") == 1
        assert w.metric("pdproxy_decisions_total", choice="whole", reason="test") == 1
        assert w.metric("pdproxy_decisions_total", choice="split", reason="test") == 1


async def test_what_must_be_whole_is_placed_whole_and_keeps_its_reason() -> None:
    """The placement gets no pairs to choose from."""
    async with placed_world(1, 2) as w:
        placement = scripted(w)
        placement.usual = whole(1)
        assert (await w.ask(COMPLETIONS, completion(prompt="short"))).status == 200
        assert (placement.candidates[0].prefill, placement.candidates[0].decode) == ((), ())
        assert [ledger_engine.url for ledger_engine in placement.candidates[0].whole] == [
            engine.url for engine in w.decode
        ]
        assert (await w.ended()).legs[0].why_alone == "short_prompt"
        assert w.metric("pdproxy_alone_total", reason="short_prompt") == 1
        assert w.metric("pdproxy_alone_total", reason="decided") == 0
        assert (await decisions(w))[0]["must_be_whole"] == "short_prompt"


async def test_the_placement_learns_what_became_of_it() -> None:
    """Each lease with the engine's role for this request, the first token of streams, and the
    tokens that the client got.
    """
    async with placed_world(1, 1) as w:
        placement = scripted(w)
        p, d = w.prefill[0].url, w.decode[0].url
        await w.ask(COMPLETIONS, completion(stream=True, max_tokens=5))
        await w.quiet()
        assert placement.told == [
            ("opened", "prefill", p),
            ("opened", "decode", d),
            ("closed", "prefill", p, "good", None),
            ("began", "decode", d),
            ("closed", "decode", d, "good", 5),
        ]
        placement.told.clear()
        placement.usual = whole()
        await w.ask(CHAT, chat(max_tokens=4))
        await w.quiet()
        assert placement.told == [
            ("opened", "aggregated", d),
            ("closed", "aggregated", d, "good", 4),
        ]


@pytest.mark.parametrize(
    ("fields", "tokens"), [({"prompt": IDS}, 40), ({}, None), ({"prompt": IDS, "user": "me"}, 40)]
)
async def test_the_placement_is_asked_with_what_is_known(
    fields: dict[str, Any], tokens: int | None
) -> None:
    """The prompt's tokens where the client sent ids, and the session."""
    async with placed_world(1, 1) as w:
        await w.ask(COMPLETIONS, completion(**fields))
        ask = scripted(w).asks[0]
        assert (ask.tokens, ask.model) == (tokens, "tiny")
        assert ask.session == ('"me"' if "user" in fields else None)
        assert ask.slo is None


# -- failures


async def test_a_request_that_was_placed_whole_may_be_split_at_its_retry() -> None:
    """It failed before any byte."""
    async with placed_world(1, 2) as w:
        placement = scripted(w)
        placement.choices.extend([whole(0), split(0, 0)])
        w.decode[0].script(scripts.eof)
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 200
        leg = (await w.ended()).legs[0]
        assert (leg.prefill, leg.decode, leg.why_alone) == (w.prefill[0].url, w.decode[1].url, None)
        assert leg.attempts == 2
        assert w.decode[0].url not in {engine.url for engine in placement.candidates[1].whole}
        assert [one.choice for one in w.events(Decided)] == ["whole", "split"]


@pytest.mark.parametrize("fails", ["prefill", "decode"])
async def test_a_request_that_was_split_may_be_placed_whole_at_its_retry(fails: str) -> None:
    async with placed_world(1, 2) as w:
        scripted(w).choices.extend([split(0, 0), whole(-1)])
        (w.prefill[0] if fails == "prefill" else w.decode[0]).script(scripts.eof)
        answer = await w.ask(COMPLETIONS, completion(stream=True))
        assert answer.status == 200
        leg = (await w.ended()).legs[0]
        assert (leg.prefill, leg.decode, leg.why_alone) == (None, w.decode[1].url, "decided")
        await w.quiet()


async def test_after_the_last_try_a_failed_prefill_leaves_one_engine() -> None:
    """As without a placement: a failed prefill alone never fails a request, even if the placement
    would split it again.
    """
    async with placed_world(2, 1, limits={"attempts": 2}) as w:
        placement = scripted(w)
        for engine in w.prefill:
            engine.default = scripts.eof
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 200
        leg = (await w.ended()).legs[0]
        assert (leg.why_alone, leg.attempts) == ("prefill_failed", 3)
        assert placement.candidates[-1].prefill == ()


async def test_without_engines_the_request_fails_as_ever() -> None:
    async with placed_world(1, 1) as w:
        for engine in w.engines:
            w.mark_down(engine, "gone")
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 503
        assert "see /ready" in answer.json["error"]["message"]
        assert w.events(Decided) == []


# -- receive buffers that are bounded


ROOM = {"pd_buffer_size": 131_072 * 32 * 4, "kv_bytes_per_token": 131_072}
"""Four chunks of 32 tokens."""
THREE_CHUNKS = (
    "some words that make up a prompt of three chunks and not of four of them in this buffer, no "
    "more than that"
)


async def test_prompts_that_are_split_wait_for_space_and_others_do_not() -> None:
    """All are answered; nothing is left of leases that were given up meanwhile, and no slot is left
    taken.
    """
    chosen = {"policy": PoolPolicy(placement=NAME)}
    async with pool("lmcache-pd", lmcache=ROOM, pool_settings=chosen) as pair:
        w = pair.world
        placement, buffers = scripted(w), w.proxy.buffers
        pair.p.engine.freeze()
        asking = [
            asyncio.create_task(pair.ask(COMPLETIONS, completion(prompt=f"{n} {THREE_CHUNKS}")))
            for n in range(3)
        ]
        await until(lambda: len(placement.asks) >= 5 and sum(buffers.taken.values()) > 0)
        placement.choices.append(whole())
        assert (
            await pair.ask(COMPLETIONS, completion(prompt=f"whole {THREE_CHUNKS}"))
        ).status == 200
        assert not any(task.done() for task in asking), "it overtook those that wait for space"
        pair.p.engine.thaw()
        assert [(await task).status for task in asking] == [200] * 3
        await until(lambda: set(buffers.taken.values()) == {0})
        assert Counter(one.choice for one in w.events(Decided)) == {"split": 3, "whole": 1}
        opened, closed = (
            [one for one in placement.told if one[0] == what] for what in ("opened", "closed")
        )
        assert len(opened) == len(closed) > 7


async def test_waiting_for_space_ends_where_the_placement_chooses_one_engine() -> None:
    """It is asked again as space comes free, and may decide otherwise then."""
    chosen = {"policy": PoolPolicy(placement=NAME)}
    async with pool("lmcache-pd", lmcache=ROOM, pool_settings=chosen) as pair:
        placement = scripted(pair.world)
        placement.choices.extend([split(), whole()])
        answer = await pair.ask(COMPLETIONS, completion(prompt=THREE_CHUNKS))
        assert answer.status == 200
        assert (await pair.world.ended()).legs[0].why_alone == "decided"


async def test_a_prompt_that_is_too_late_while_it_waits_is_refused() -> None:
    chosen = {"policy": PoolPolicy(placement=NAME)}
    async with pool("lmcache-pd", lmcache=ROOM, pool_settings=chosen) as pair:
        scripted(pair.world).choices.extend([split(), late])
        assert (await pair.ask(COMPLETIONS, completion(prompt=THREE_CHUNKS))).status == 503
        assert pair.world.metric("pdproxy_decisions_total", choice="refused") == 1


# -- refused early


async def test_what_is_too_late_is_refused() -> None:
    """503 with Retry-After and the reason, before any engine works; counted, and in the record."""
    async with placed_world(1, 1) as w:
        scripted(w).usual = late
        answer = await w.ask(COMPLETIONS, completion(prompt=IDS))
        assert answer.status == 503
        assert answer.header("retry-after") == "1"
        assert answer.json["error"]["message"] == "no engine can serve this request in time now"
        assert not w.prefill[0].requests
        assert not w.decode[0].requests
        ended = await w.ended()
        assert (ended.outcome, ended.status) == ("capacity", 503)
        assert w.metric("pdproxy_decisions_total", choice="refused", reason="late") == 1
        one = (await decisions(w))[0]
        assert (one["choice"], one["reason"], one["engines"], one["tokens"]) == (
            "refused",
            "late",
            [],
            40,
        )


async def test_the_settings_reach_the_placement() -> None:
    more = {"slo": PoolSlo(ttft=0.5, tpot=0.02), "profile": "h200-8b"}
    async with placed_world(1, 1, policy={"refuse_late": True}, pool=more) as w:
        context = scripted(w).context
        assert (context.slo, context.refuse_late) == (Slo(0.5, 0.02), True)
        hardware = context.hardware(w.decode[0].url)
        assert hardware is not None
        assert hardware.context_token_s > 0
        assert context.chunk(w.decode[0].url) == 8192


# -- headers


@pytest.mark.parametrize(
    ("headers", "slo"),
    [
        ([("X-PDProxy-SLO-TTFT-MS", "250")], Slo(ttft=0.25)),
        (
            [("x-pdproxy-slo-tpot-ms", "12.5"), ("X-PDProxy-SLO-Gap-MS", " 80 ")],
            Slo(tpot=0.0125, gap=0.08),
        ),
        ([("X-PDProxy-SLO-TTFT-MS", "100"), ("X-PDProxy-SLO-TTFT-MS", "900")], Slo(ttft=0.1)),
        ([("X-PDProxy-Decision", "0")], None),
    ],
)
async def test_a_client_names_its_own_objective(
    headers: list[tuple[str, str]], slo: Slo | None
) -> None:
    """In milliseconds. No engine sees these headers."""
    async with placed_world(1, 1) as w:
        assert (await w.ask(COMPLETIONS, completion(), headers)).status == 200
        assert scripted(w).asks[0].slo == slo
        for engine in w.engines:
            assert not [
                name for name in engine.requests[0].headers if "pdproxy" in str(name).lower()
            ]


HOSTILE = [
    "",
    "abc",
    "-1",
    "0",
    "0.0",
    "1e3",
    "inf",
    "nan",
    "1_0",
    "+5",
    "1" * 30,
    "700000000",
    "5,6",
    "\u00b2",
    "0x10",
]


@pytest.mark.parametrize(
    "name", ["X-PDProxy-SLO-TTFT-MS", "X-PDProxy-SLO-TPOT-MS", "X-PDProxy-SLO-Gap-MS"]
)
async def test_a_hostile_objective_is_refused(name: str) -> None:
    """400 with the header's name, without what the client sent, and no engine is asked."""
    async with placed_world(1, 1) as w:
        for value in HOSTILE:
            answer = await w.ask(COMPLETIONS, completion(), [(name, value)])
            assert answer.status == 400, value
            error = answer.json["error"]
            assert (error["param"], error["message"]) == (
                name,
                f"{name}: expected milliseconds, above 0 and up to 604800000",
            )
        assert scripted(w).asks == []


@pytest.mark.parametrize("value", ["2", "yes", "", "11"])
async def test_a_hostile_wish_for_the_decision_is_refused(value: str) -> None:
    async with placed_world(1, 1) as w:
        answer = await w.ask(COMPLETIONS, completion(), [("X-PDProxy-Decision", value)])
        assert answer.status == 400
        assert answer.json["error"]["param"] == "X-PDProxy-Decision"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_shows_the_decision_on_request(stream: bool) -> None:
    async with placed_world(1, 1) as w:
        placement, (p, d) = scripted(w), (w.prefill[0].url, w.decode[0].url)
        placement.choices.extend(
            [
                whole(0, "ttft", WEIGHED),
                split(0, 0, "gap"),
                whole(0, "ttft", Weighed(replace(CHOSEN, ttft_s=float("inf")))),
            ]
        )
        shown = [
            (await w.ask(COMPLETIONS, completion(stream=stream), WANTED)).header(
                "x-pdproxy-decision"
            )
        ]
        shown += [
            (await w.ask(COMPLETIONS, completion(stream=stream), WANTED)).header(
                "x-pdproxy-decision"
            )
        ]
        assert shown == [
            f"whole {d}; reason=ttft; {NUMBERS}",
            f"split {p} -> {d}; reason=gap",
        ]
        assert (await w.ask(COMPLETIONS, completion(stream=stream))).header(
            "x-pdproxy-decision"
        ) is None
        fields = access_fields(await w.ended())
        assert fields["decision"] == "ttft"
        assert fields["predicted_ttft_ms"] == 123.5
        assert fields["predicted_tpot_ms"] == 8.0
        assert (fields["cost"], fields["term"], fields["other_cost"]) == (0.5, "harm", 0.75)
        assert "predicted_ttft_ms" not in access_fields(await w.ended(3)), (
            "what is not finite is no time"
        )


# -- the record


async def test_the_last_decisions_are_kept() -> None:
    """A bounded number of them, the newest first, with what they were based on."""
    async with placed_world(1, 1) as w:
        scripted(w).usual = whole(
            0, "ttft", msgspec.structs.replace(WEIGHED, chosen=replace(CHOSEN, tpot_s=float("inf")))
        )
        await w.ask(COMPLETIONS, completion(prompt=IDS), [("X-Request-Id", "first")])
        one = (await decisions(w))[0]
        assert one.pop("age_s") >= 0
        assert one == {
            "request_id": "first",
            "choice": "whole",
            "reason": "ttft",
            "engines": [w.decode[0].url],
            "must_be_whole": None,
            "tokens": 40,
            "values": {"ttft": 0.123456, "tpot": None, "cost": 0.5, "cached": 16},
            "parts": {"ttft": 0.25, "tpot": 0.0625, "engines": 0.125, "kept": 0.0, "harm": 0.0625},
            "term": "harm",
            "other": {
                "choice": "split",
                "engines": ["http://1", "http://2"],
                "values": {"ttft": 0.25, "cost": 0.75, "cached": 0},
                "parts": {"ttft": 0.25, "tpot": 0.0, "engines": 0.125, "kept": 0.0, "harm": 0.375},
            },
            "outcome": None,
        }
        kept = w.proxy.pools[0].decisions
        assert kept is not None
        for _ in range(2 * KEPT):
            kept.add(kept.last[-1])
        assert len(await decisions(w)) == KEPT


async def test_decisions_are_shown_by_the_admin_api() -> None:
    """With what became of each. Not by the port of clients: they name requests of others."""
    async with placed_world(1, 2) as w, admin(w) as api:
        good, late = (replace(WEIGHED, ttft=bound, tpot=bound) for bound in (60.0, 1e-9))
        placement = scripted(w)
        placement.choices.extend([split(0, 0, weighed=good), whole(1, weighed=late)])
        w.decode[0].script(scripts.whole(b'{"error": {"message": "out of memory"}}', 500))
        body = completion(prompt=IDS, stream=True, max_tokens=5)
        await w.ask(COMPLETIONS, body, [("X-Request-Id", "first")])
        placement.choices.extend([whole(1, weighed=good)] * 2)
        await w.ask(COMPLETIONS, body, [("X-Request-Id", "second")])
        go = asyncio.Event()
        w.decode[1].script(scripts.gate(go, serve))
        client = await w.client()
        client.post(COMPLETIONS, body, [("X-Request-Id", "third")])
        await until(lambda: len(w.decode[1].requests) == 3)
        shown = (await api.get("/decisions"))["decisions"]
        assert [one["request_id"] for one in shown] == ["third", "second", "first", "first"]
        outcomes = [one["outcome"] for one in shown]
        assert [(one["state"], one["good"]) for one in outcomes] == [
            ("running", None),
            ("ok", True),
            ("ok", False),
            ("retried", None),
        ]
        assert outcomes[3]["error"]
        assert outcomes[1]["completion_tokens"] == 5
        assert outcomes[1]["ttft_s"] >= 0
        assert outcomes[1]["tpot_s"] >= 0
        fields = [access_fields(await w.ended(count)) for count in (1, 2)]
        assert [one["good"] for one in fields] == [False, True]
        assert "tpot_ms" in fields[1]
        assert (await w.get("/decisions")).status == 404
        go.set()


async def test_reasons_without_end_make_no_series_without_end() -> None:
    """A placement has a few: a defect of one must not fill the page."""
    async with placed_world(1, 1) as w:
        for n in range(100):
            w.proxy.observers.notify(Decided("whole", f"reason {n}"))
        page = w.page().decode()
        assert page.count("pdproxy_decisions_total{") == 33
        assert w.metric("pdproxy_decisions_total", choice="whole", reason="other") == 68


async def test_ready_shows_what_the_placement_has_to_say() -> None:
    async with placed_world(1, 1) as w:
        scripted(w).says = "placement scripted: nothing was measured yet"
        assert (await w.get("/ready")).json["details"] == [
            "placement scripted: nothing was measured yet"
        ]
