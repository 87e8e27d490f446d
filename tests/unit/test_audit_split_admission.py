"""The audit's books, the rule of short prompts, and admission, without engines."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.fleet.audit import Auditor
from pdproxy.kit.errors import OverloadedError
from pdproxy.observe.events import Event, KvCounted, KvShortfall, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Evidence, NodeSpec, Role
from pdproxy.scheduling.split import why_alone
from pdproxy.serving.admission import Admission
from pdproxy.upstream.admin import Scrape, read_metrics
from pdproxy.wire.request import Alone, Route, parse
from tests.unit.test_transfer_nixl import recorded


class Heard:
    """Remembers events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        self.events.append(event)


def books() -> tuple[Auditor, Ledger, Heard]:
    """An auditor of one decode engine with blocks of 16."""
    ledger = Ledger([NodeSpec("d", Role.DECODE)], breaker_failures=3, breaker_cooldown=5)
    ledger.saw("d", Evidence(frozenset("m"), "1", 16, (), 0, 1.0))
    heard = Heard()
    return Auditor(ledger, Observers([heard])), ledger, heard


def scrape(external: float, local: float = 0.0, started: float = 1.0) -> Scrape:
    """A decode engine's counters."""
    return Scrape(started, 16, 0, 0, 0, {"external_kv_transfer": external, "local_cache_hit": local})


@given(st.lists(st.tuples(st.integers(0, 500), st.booleans()), max_size=30))
@settings(deadline=None)
def test_no_alarm_while_everything_arrives(steps: list[tuple[int, bool]]) -> None:
    """Counters that rise by at least what was sent, at the latest by the next scrape, never alarm."""
    auditor, ledger, heard = books()
    auditor.scraped(ledger.nodes[0], scrape(1000))
    external, late = 1000, 0
    for tokens, lags in steps:
        auditor.sent("d", tokens)
        external += late
        late = tokens if lags else 0
        external += 0 if lags else tokens
        auditor.scraped(ledger.nodes[0], scrape(external))
    for _ in range(2):
        auditor.scraped(ledger.nodes[0], scrape(external + late))
    assert not [event for event in heard.events if isinstance(event, KvShortfall)]
    moved = sum(event.moved for event in heard.events if isinstance(event, KvCounted))
    assert moved == sum(tokens // 16 * 16 for tokens, _ in steps)
    assert auditor.shortcomings() == []


@given(st.lists(st.integers(16, 500), min_size=1, max_size=20))
def test_what_never_arrives_is_counted_in_full(sent: list[int]) -> None:
    """Counters that stand still: after two scrapes all of it is missing, each token reported once."""
    auditor, ledger, heard = books()
    auditor.scraped(ledger.nodes[0], scrape(0))
    for tokens in sent:
        auditor.sent("d", tokens)
        auditor.scraped(ledger.nodes[0], scrape(0))
    for _ in range(2):
        auditor.scraped(ledger.nodes[0], scrape(0))
    total = sum(tokens // 16 * 16 for tokens in sent)
    assert auditor.missing() == {"d": total}
    assert sum(event.tokens for event in heard.events if isinstance(event, KvShortfall)) == total
    assert sum(event.missing for event in heard.events if isinstance(event, KvCounted)) == total
    assert sum(event.moved for event in heard.events if isinstance(event, KvCounted)) == 0


def test_a_surplus_does_not_hide_a_shortfall_for_ever() -> None:
    """What an engine counted beyond our requests is written off after two scrapes; a later shortfall shows."""
    auditor, ledger, _ = books()
    auditor.scraped(ledger.nodes[0], scrape(0))
    for _ in range(3):
        auditor.scraped(ledger.nodes[0], scrape(10_000))
    auditor.sent("d", 160)
    for _ in range(3):
        auditor.scraped(ledger.nodes[0], scrape(10_000))
    assert auditor.missing() == {"d": 160}


def test_cached_prompts_need_not_move_and_a_restart_starts_over() -> None:
    """The decode engine's own cache hits count as arrived; counters of a restarted engine begin anew."""
    auditor, ledger, heard = books()
    auditor.scraped(ledger.nodes[0], scrape(0))
    auditor.sent("d", 160)
    for _ in range(2):
        auditor.scraped(ledger.nodes[0], scrape(60, local=100))
    auditor.sent("d", 160)
    auditor.scraped(ledger.nodes[0], scrape(0, started=2.0))
    auditor.scraped(ledger.nodes[0], scrape(0, started=2.0))
    assert not [event for event in heard.events if isinstance(event, KvShortfall)]


def test_recorded_metrics_are_read() -> None:
    """The page of a real decode engine gives its start, block size and counters."""
    found = read_metrics(recorded("metrics_decode.txt").decode())
    assert found.block_size == 32
    assert found.started == 1.79521971725e09
    assert found.by_source == {"local_compute": 29, "local_cache_hit": 288, "external_kv_transfer": 4299}
    assert (found.running, found.waiting, found.kv_usage) == (0, 0, 0)


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
    assert (
        why_alone(parsed, parsed.prompts[0] if parsed.prompts else None, block_size=block, template_tokens=5) is alone
    )  # type: ignore[arg-type]


def test_short_chats() -> None:
    """A chat's template counts for each message; tools make a chat's length unknown."""

    def why(**fields: object) -> Alone | None:
        body = {"messages": [{"role": "user", "content": "hi"}] * 2, **fields}
        parsed = parse(Route.CHAT, json.dumps(body).encode())
        return why_alone(parsed, parsed.prompts[0], block_size=32, template_tokens=10)

    assert why() is Alone.SHORT_PROMPT
    assert why(messages=[{"role": "user", "content": "hi"}] * 3) is None
    assert why(tools=[]) is None


@given(st.lists(st.sampled_from(["enter", "leave", "cancel"]), max_size=40), st.integers(1, 3), st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_admission_keeps_its_bounds(steps: list[str], places: int, queue: int) -> None:
    """Never more than the places in use, never more than the queue waiting, and every place comes back."""

    async def run() -> None:
        admission = Admission(places, queue, 60, Observers([]))
        inside: list[asyncio.Task[None]] = []
        waiting: list[asyncio.Task[None]] = []
        for step in steps:
            if step == "enter":
                task = asyncio.ensure_future(admission.enter())
                await asyncio.sleep(0)
                if task.done() and task.exception():
                    assert isinstance(task.exception(), OverloadedError)
                    assert len(waiting) == queue
                else:
                    (inside if task.done() else waiting).append(task)
            elif step == "leave" and inside:
                inside.pop()
                admission.leave()
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
        for _ in inside:
            assert not closing.done()
            admission.leave()
            await asyncio.sleep(0)
        await asyncio.wait_for(closing, 1)
        with pytest.raises(OverloadedError):
            await admission.enter()

    asyncio.run(run())


async def test_a_place_given_to_one_that_is_just_cancelled_goes_on() -> None:
    """A place handed to a waiter in the moment of its cancellation is not lost."""
    admission = Admission(1, 5, 60, Observers([]))
    await admission.enter()
    first, second = (asyncio.ensure_future(admission.enter()) for _ in range(2))
    await asyncio.sleep(0)
    admission.leave()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.wait_for(second, 1)
    assert admission.inflight == 1
