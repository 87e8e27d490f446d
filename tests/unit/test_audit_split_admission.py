"""The audit's books, the rule of short prompts, and admission, without engines."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.deciding.local_admission import LocalAdmission, LocalPlace
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import LimitError, OverloadedError, PdproxyError
from pdproxy.observe.events import DeadlinePassed, Evicted, KvCounted, KvShortfall, Observers
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.split import may_be_too_long, why_alone
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.settings.limits import Deadlines, Limits, Overload
from pdproxy.upstream.metrics_page import Scrape, read_metrics
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone
from tests.fakes.clock import ManualClock
from tests.fakes.recorder import Recorder
from tests.fakes.registry import registry, unused_client
from tests.unit.test_transfer_nixl import recorded


def books() -> tuple[Auditor, Engine, Recorder]:
    """An auditor of one decode engine with blocks of 16."""
    engines, ledger = registry(EngineSpec("d", Role.DECODE))
    ledger.mark_up("d", Evidence(frozenset("m"), "1", 16, (), 0, 1.0))
    recorder = Recorder()
    return Auditor(engines, ledger, Observers([recorder])), engines["d"], recorder


def scrape(external: float, local: float = 0.0, started: float = 1.0) -> Scrape:
    """A decode engine's counters."""
    return Scrape(
        started, 16, 0, 0, 0, {"external_kv_transfer": external, "local_cache_hit": local}
    )


def moved(auditor: Auditor, tokens: int) -> None:
    """A leg with KV, from its begin to its end, that has shown data."""
    engine = auditor._engines["d"]
    auditor.asked(engine, tokens)
    auditor.over(engine, tokens, loaded=True)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 500),
            st.integers(0, 6),
            st.integers(0, 8),
            st.sampled_from(["ok", "left", "failed"]),
        ),
        max_size=30,
    )
)
@settings(deadline=None)
def test_no_alarm_while_everything_arrives(legs: list[tuple[int, int, int, str]]) -> None:
    """However many scrapes a leg lasts, and whenever in it (or up to two scrapes behind) the engine
    counts: no alarm.
    """
    auditor, engine, recorder = books()
    auditor.scraped(engine, scrape(1000))
    external = 1000
    for now in range(len(legs) + 12):
        for begin, (tokens, lasts, lag, how) in enumerate(legs):
            if now == begin:
                auditor.asked(engine, tokens)
            if how != "failed" and now == begin + min(lag, lasts + 2):
                external += tokens
            if now == begin + lasts:
                auditor.over(engine, tokens, loaded=how == "ok")
        auditor.scraped(engine, scrape(external))
    assert not [event for event in recorder.events if isinstance(event, KvShortfall)]
    found = sum(event.moved for event in recorder.events if isinstance(event, KvCounted))
    assert found == sum(tokens // 16 * 16 for tokens, _, _, how in legs if how == "ok")
    assert set(auditor.missing().values()) == {0}


@given(st.lists(st.integers(16, 500), min_size=1, max_size=20))
def test_what_never_arrives_is_counted_in_full(sent: list[int]) -> None:
    """Counters that stand still: after three scrapes all of it is missing, each token reported
    once.
    """
    auditor, engine, recorder = books()
    auditor.scraped(engine, scrape(0))
    for tokens in sent:
        moved(auditor, tokens)
        auditor.scraped(engine, scrape(0))
    for _ in range(2):
        auditor.scraped(engine, scrape(0))
    total = sum(tokens // 16 * 16 for tokens in sent)
    assert auditor.missing() == {"d": total}
    assert sum(event.tokens for event in recorder.events if isinstance(event, KvShortfall)) == total
    assert sum(event.missing for event in recorder.events if isinstance(event, KvCounted)) == total
    assert sum(event.moved for event in recorder.events if isinstance(event, KvCounted)) == 0


def test_a_surplus_does_not_hide_a_shortfall_for_ever() -> None:
    """What an engine counted beyond our requests is written off after two scrapes; a later
    shortfall shows.
    """
    auditor, engine, _ = books()
    auditor.scraped(engine, scrape(0))
    for _ in range(3):
        auditor.scraped(engine, scrape(10_000))
    moved(auditor, 160)
    for _ in range(3):
        auditor.scraped(engine, scrape(10_000))
    assert auditor.missing() == {"d": 160}


def test_an_unstreamed_answer_of_many_scrapes_is_no_surplus() -> None:
    """What an engine counted at a leg's begin is not written off before the leg's end, however long
    that takes.
    """
    auditor, engine, recorder = books()
    auditor.scraped(engine, scrape(0))
    auditor.asked(engine, 160)
    for _ in range(20):
        auditor.scraped(engine, scrape(160))
    auditor.over(engine, 160, loaded=True)
    for _ in range(5):
        auditor.scraped(engine, scrape(160))
    assert [type(event) for event in recorder.events] == [KvCounted]
    assert auditor.missing() == {"d": 0}


@pytest.mark.parametrize("again", [scrape(0, started=2.0), scrape(10), scrape(10, started=2.0)])
def test_cached_prompts_need_not_move_and_a_restart_starts_over(again: Scrape) -> None:
    """The engine's own cache hits count as arrived; a new start time, or counters that fall, begin
    a new account.
    """
    auditor, engine, recorder = books()
    auditor.scraped(engine, scrape(0))
    moved(auditor, 160)
    for _ in range(3):
        auditor.scraped(engine, scrape(60, local=100))
    moved(auditor, 160)
    auditor.asked(engine, 320)
    for _ in range(3):
        auditor.scraped(engine, again)
    auditor.over(engine, 320, loaded=False)
    for _ in range(3):
        auditor.scraped(engine, again)
    assert not [event for event in recorder.events if isinstance(event, KvShortfall)]
    moved(auditor, 160)
    for _ in range(3):
        auditor.scraped(engine, again)
    assert auditor.missing() == {"d": 160}, "the new account counts"


def test_a_leg_counts_for_the_engine_that_it_was_sent_to() -> None:
    """Not for the next one with its URL."""
    auditor, removed, _ = books()
    auditor.scraped(removed, scrape(0))
    auditor.asked(removed, 160)
    auditor._engines.remove("d")
    new = auditor._engines.add(removed.in_ledger.spec, unused_client("d"))
    auditor.scraped(new, scrape(0))
    auditor.over(removed, 160, loaded=True)
    for _ in range(4):
        auditor.scraped(new, scrape(0))
    assert auditor.missing() == {"d": 0}


def test_recorded_metrics_are_read() -> None:
    """The page of a real decode engine gives its start, block size and counters."""
    found = read_metrics(recorded("metrics_decode.txt"))
    assert found.block_size == 32
    assert found.started == 1.79521971725e09
    assert found.by_source == {
        "local_compute": 29,
        "local_cache_hit": 288,
        "external_kv_transfer": 4299,
    }
    assert (found.running, found.waiting, found.kv_usage) == (0, 0, 0)
    assert read_metrics(b"vllm:num_requests_running 2\n").waiting is None, (
        "not reported, and not none"
    )


def test_what_changes_as_a_core_works_is_read_by_rank() -> None:
    """Of a real page, and of one with two ranks; an engine without these metrics shows no
    progress.
    """
    (values,) = read_metrics(recorded("metrics_decode.txt")).progress.values()
    assert {29, 288, 4299} <= {*values}
    page = b"".join(
        b'vllm:generation_tokens_total{engine="%d",model_name="m"} %d\n' % (rank, rank + 5)
        for rank in (0, 1)
    )
    page += b'vllm:num_requests_running{engine="1",model_name="m"} 3\n'
    assert read_metrics(page).progress == {"0": (5,), "1": (6, 3)}
    assert read_metrics(b"vllm:num_requests_running 2\n").progress == {"": (2,)}
    assert read_metrics(b"process_start_time_seconds 5\n").progress == {}


@pytest.mark.parametrize(
    ("label", "ranks", "caches"),
    [("True", "0", True), ("True", "01", False), ("False", "0", False), ("None", "0", False)],
)
def test_whether_an_engine_finds_prompts_again(label: str, ranks: str, caches: bool) -> None:
    """Each rank has a cache of its own."""
    lines = [f'vllm:cache_config_info{{enable_prefix_caching="{label}"}} 1']
    lines += [f'vllm:num_requests_running{{engine="{rank}"}} 2' for rank in ranks]
    assert read_metrics("\n".join(lines).encode()).caches_prefixes is caches


@pytest.mark.parametrize(
    ("body", "block", "alone"),
    [
        ({"prompt": "x" * 13}, 16, Alone.SHORT_PROMPT),
        ({"prompt": "x" * 14}, 16, None),
        ({"prompt": [1] * 15}, 16, Alone.SHORT_PROMPT),
        ({"prompt": [1] * 16}, 16, None),
        ({"prompt": "x"}, None, None),
        ({"prompt": "x", "n": 2}, None, Alone.N),
    ],
)
def test_short_prompts(body: dict[str, object], block: int | None, alone: Alone | None) -> None:
    """A prompt is alone only if it is under a block for certain."""
    parsed = parse(Route.COMPLETIONS, json.dumps(body).encode())
    prompt: Any = parsed.prompts[0] if parsed.prompts else None
    assert why_alone(parsed, prompt, block_size=block, template_tokens=5) is alone


@pytest.mark.parametrize(
    ("prompt", "alone"),
    [("x" * 16, None), ("x", Alone.SHORT_PROMPT), (["x" * 16, "y" * 16], Alone.N)],
)
def test_several_answers(prompt: object, alone: Alone | None) -> None:
    """To one prompt, and where a decode engine keeps what it has loaded."""
    parsed = parse(Route.COMPLETIONS, json.dumps({"prompt": prompt, "n": 2}).encode())
    found = partial(why_alone, parsed, parsed.prompts[0], block_size=16, template_tokens=5)
    assert found(several=True) is alone
    assert found(several=False) is Alone.N


def test_short_chats() -> None:
    """A chat's template counts for each message; tools make a chat's length unknown."""

    def why(**fields: object) -> Alone | None:
        body = {"messages": [{"role": "user", "content": "hi"}] * 2, **fields}
        parsed = parse(Route.CHAT, json.dumps(body).encode())
        return why_alone(parsed, parsed.prompts[0], block_size=32, template_tokens=10)

    assert why() is Alone.SHORT_PROMPT
    assert why(messages=[{"role": "user", "content": "hi"}] * 3) is None
    assert why(tools=[]) is None


@pytest.mark.parametrize(
    ("route", "body", "tokens", "longest", "may"),
    [
        (Route.COMPLETIONS, {"prompt": "a" * 98}, None, 101, False),
        (Route.COMPLETIONS, {"prompt": "a" * 98}, None, 100, True),
        (Route.COMPLETIONS, {"prompt": "a" * 98}, 30, 31, False),
        (Route.COMPLETIONS, {"prompt": "a" * 98}, 30, 30, True),
        (Route.COMPLETIONS, {"prompt": [1] * 30}, None, 31, False),
        (Route.COMPLETIONS, {"prompt": [1] * 30}, None, 30, True),
        (Route.CHAT, {"messages": [{"role": "user", "content": "hi"}]}, None, 100, False),
        (
            Route.CHAT,
            {"messages": [{"role": "user", "content": "hi"}], "tools": []},
            None,
            100,
            True,
        ),
        (
            Route.CHAT,
            {"messages": [{"role": "user", "content": "hi"}], "chat_template": "x"},
            None,
            100,
            True,
        ),
        (
            Route.CHAT,
            {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "x"}},
            None,
            100,
            True,
        ),
        (
            Route.CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"arguments": "a" * 99}]}]},
            None,
            100,
            True,
        ),
        (
            Route.CHAT,
            {"messages": [{"role": "assistant", "reasoning_content": "a" * 99}]},
            None,
            100,
            True,
        ),
        (
            Route.CHAT,
            {"messages": [{"role": "user", "content": "hi"}], "tools": []},
            99,
            100,
            False,
        ),
    ],
)
def test_prompts_that_an_engine_may_find_too_long(
    route: Route, body: dict[str, object], tokens: int | None, longest: int, may: bool
) -> None:
    """An engine takes a prompt if one more token fits. A text's length is known only as a bound."""
    parsed = parse(route, json.dumps(body).encode())
    assert may_be_too_long(parsed, parsed.prompts[0], tokens, longest, 5) is may


def admitting(
    *observers: Recorder,
    places: int = 1,
    queue: int = 5,
    clock: Clock | None = None,
    clients: Clients | None = None,
) -> LocalAdmission:
    """LocalAdmission with so many places, and so long a queue."""
    limits = Limits(max_inflight=places, max_queue=queue)
    own = Clients() if clients is None else clients
    return LocalAdmission(
        limits, Deadlines(queue=60), Overload(), Observers(observers), clock or Clock(), own
    )


@given(
    st.lists(st.sampled_from(["enter", "leave", "cancel"]), max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=60)
def test_admission_keeps_its_bounds(steps: list[str], places: int, queue: int) -> None:
    """Never more than the places in use, never more than the queue waiting, and every place comes
    back.
    """

    async def run() -> None:
        admission = admitting(places=places, queue=queue)
        one = Client("one")
        inside: list[asyncio.Task[LocalPlace]] = []
        waiting: list[asyncio.Task[LocalPlace]] = []
        for step in steps:
            if step == "enter":
                task = asyncio.ensure_future(admission.enter(one))
                await asyncio.sleep(0)
                if task.done() and task.exception():
                    assert isinstance(task.exception(), OverloadedError)
                    assert len(waiting) == queue
                else:
                    (inside if task.done() else waiting).append(task)
            elif step == "leave" and inside:
                inside.pop().result().leave()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if waiting:
                    assert waiting[0].done(), "the one who waited longest is next"
                    inside.append(waiting.pop(0))
            elif step == "cancel" and waiting:
                task = waiting.pop()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert (admission.inflight, admission.waiting) == (len(inside), len(waiting))
            assert len(inside) <= places
        closing = asyncio.ensure_future(admission.close())
        await asyncio.sleep(0)
        for task in waiting:
            with pytest.raises(OverloadedError):
                await task
        for task in inside:
            assert not closing.done()
            task.result().leave()
            await asyncio.sleep(0)
        await asyncio.wait_for(closing, 30)
        with pytest.raises(OverloadedError):
            await admission.enter(one)

    asyncio.run(run())


async def test_the_wait_that_a_refusal_names_grows_while_no_request_ends() -> None:
    """Engines may be slower than they were: what a request took says nothing of them any more."""
    clock = ManualClock()
    admission, one = admitting(places=1, queue=1, clock=clock), Client("one")
    (await admission.enter(one)).leave(seconds=1.0, prompt=100, completion=10)
    place = await admission.enter(one)
    waiting = asyncio.ensure_future(admission.enter(one))
    told: list[float] = []
    for _ in range(2):
        await clock.advance(20)
        with pytest.raises(OverloadedError) as caught:
            await admission.enter(one)
        told.append(caught.value.retry_after or 0.0)
    assert told[1] > 2 * told[0] > 0
    place.leave()
    (await waiting).leave()


async def test_a_place_granted_to_a_cancelled_request_goes_to_the_next() -> None:
    """The request was cancelled after the grant, and before it ran."""
    admission = admitting()
    one = Client("one")
    place = await admission.enter(one)
    first, second = (asyncio.ensure_future(admission.enter(one)) for _ in range(2))
    await asyncio.sleep(0)
    place.leave()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.wait_for(second, 30)
    assert admission.inflight == 1


async def test_admission_ends_when_the_last_place_was_granted_to_a_cancelled_request() -> None:
    """The client left in the turn of the loop in which its request got the place: a shutdown does
    not wait for it.
    """
    admission = admitting()
    one = Client("one")
    place = await admission.enter(one)
    waiting = asyncio.ensure_future(admission.enter(one))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(admission.close())  # runs before the request does
    place.leave()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await asyncio.wait_for(closing, 30)
    assert (admission.inflight, admission.waiting) == (0, 0)


async def test_a_place_granted_before_the_shutdown_is_served() -> None:
    """Its request has not run since: it is in flight, and the shutdown waits for it. Nobody else
    gets in.
    """
    admission = admitting()
    one = Client("one")
    place = await admission.enter(one)
    granted, refused = [asyncio.ensure_future(admission.enter(one)) for _ in range(2)]
    await asyncio.sleep(0)
    place.leave()
    closing = asyncio.ensure_future(admission.close())
    second = await granted
    with pytest.raises(OverloadedError, match="shutting down"):
        await refused
    with pytest.raises(OverloadedError, match="shutting down"):
        await admission.enter(one)
    assert (admission.inflight, closing.done()) == (1, False)
    second.leave()
    await asyncio.wait_for(closing, 30)
    with pytest.raises(OverloadedError, match="shutting down"):
        await admission.enter(one)
    assert admission.inflight == 0, "a free place is not taken either"


async def test_a_place_granted_to_a_request_that_is_just_late_goes_to_the_next() -> None:
    """Its deadline passed in the turn of the loop in which it got the place: it is refused, and the
    place is not lost.
    """
    clock, heard = Clock(), Recorder()
    admission = admitting(heard, clock=clock)
    one = Client("one")
    place = await admission.enter(one)
    late = asyncio.ensure_future(admission.enter(one))
    await asyncio.sleep(0)
    ((timer,),) = clock._slots.values()
    following = asyncio.ensure_future(admission.enter(one))
    await asyncio.sleep(0)
    place.leave()
    timer.then()
    with pytest.raises(OverloadedError, match="no place came free in 60 s"):
        await late
    await asyncio.wait_for(following, 30)
    assert (admission.inflight, admission.waiting) == (1, 0)
    assert heard.events == [DeadlinePassed("queue")]


@pytest.mark.parametrize("has_left", [False, True])
async def test_a_request_that_gives_way_to_another_client_is_counted_unless_its_own_has_just_left(
    has_left: bool,
) -> None:
    heard = Recorder()
    admission = admitting(heard, queue=2)
    await admission.enter(Client("one"))
    waits, displaced = [asyncio.ensure_future(admission.enter(Client("one"))) for _ in range(2)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(admission.enter(Client("other")))
    if has_left:
        displaced.cancel()  # it ends behind the step in which it is displaced
    with pytest.raises(asyncio.CancelledError if has_left else LimitError):
        await displaced
    assert heard.events == ([] if has_left else [Evicted("queue")])
    assert admission.waiting == 2
    for task in (waits, other):
        task.cancel()
    await asyncio.wait([waits, other])


async def test_a_slow_reader_goes_as_soon_as_another_client_waits() -> None:
    """The request waits before shares are looked at: until then nobody has more than its share."""

    class Reader:
        def __init__(self) -> None:
            self.errors: list[PdproxyError] = []

        def evict(self, error: PdproxyError) -> None:
            self.errors.append(error)

    clients, reader = Clients(), Reader()
    admission = admitting(places=2, clients=clients)
    slow, other = clients.enter("slow"), clients.enter("other")
    place, _ = [await admission.enter(slow) for _ in range(2)]
    clients.mark_slow(slow, reader)
    own = asyncio.ensure_future(admission.enter(slow))
    await asyncio.sleep(0)
    assert reader.errors == [], "only its own request waits"
    waiting = asyncio.ensure_future(admission.enter(other))
    await asyncio.sleep(0)
    assert len(reader.errors) == 1
    place.leave()
    await waiting
    own.cancel()
