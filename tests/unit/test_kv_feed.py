"""KV events on their way to the index: in order, in parts, bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdproxy.fleet import kv_events, kv_source, kv_sources
from pdproxy.fleet.kv_events import BLOCKS_AT_ONCE, Backlog, EventCounts, Feed
from pdproxy.fleet.kv_source import ReplayResult
from pdproxy.scheduling.prefix.block_index import BlockIndex
from pdproxy.wire.kv_events import Unreadable
from tests.fakes.kv_index import PlainIndex, raws, removed, stored
from tests.sim.raw import turns


class Stage:
    """A feed with its index, and a place."""

    def __init__(self) -> None:
        self.index = PlainIndex()
        self.counts = EventCounts()
        self.failures: list[Exception] = []
        self.feed = Feed(self.index, self.failures.append)
        self.resumed = 0
        self.backlog = Backlog(self.index.add_place(), self._resume, self.counts)
        self.other = Backlog(self.index.add_place(), counts=self.counts)

    def _resume(self) -> None:
        self.resumed += 1

    async def passed(self, *events: object) -> list[tuple[Any, ...]]:
        self.feed.put(self.backlog, raws(*events))
        await turns()
        return self.index.calls


async def test_events_come_in_order_with_what_they_say() -> None:
    stage = Stage()
    calls = await stage.passed(
        stored(1, 2, parent=9, medium="cpu", group_idx=3, kv_cache_spec_kind="mamba"),
        removed(1, medium="CPU", group_idx=3),
        {"type": "AllBlocksCleared"},
        stored(5),
        removed(5),
    )
    assert calls == [
        ("stored", 0, [1, 2], 9, list(range(8)), 4, "CPU", 3, False),
        ("removed", 0, [1], "CPU", 3),
        ("cleared", 0),
        ("stored", 0, [5], None, [0, 1, 2, 3], 4, "GPU", 0, True),
        ("removed", 0, [5], "GPU", 0),
    ]
    assert stage.counts.blocks == {"stored": 3, "removed": 2, "cleared": 1}
    assert stage.feed.bytes == 0


async def test_a_long_event_is_passed_in_parts_that_join() -> None:
    stage = Stage()
    count = 3 * BLOCKS_AT_ONCE + 5
    stage.feed.put(stage.backlog, raws(stored(*range(100, 100 + count), parent=7)))
    await turns(1)
    assert sum(len(call[2]) for call in stage.index.calls) <= BLOCKS_AT_ONCE
    await turns()
    assert len(stage.index.calls) > 3
    parent, at = 7, 0
    for _, _, hashes, before, ids, *_ in stage.index.calls:
        assert len(hashes) <= BLOCKS_AT_ONCE
        assert before == parent
        assert ids == list(range(at * 4, (at + len(hashes)) * 4))
        parent, at = hashes[-1], at + len(hashes)
    assert at == count


async def test_large_blocks_count_as_several() -> None:
    stage = Stage()
    stage.feed.put(stage.backlog, raws(stored(*range(100), size=1024)))
    await turns(500)
    parts = [len(call[2]) for call in stage.index.calls]
    assert max(parts) == BLOCKS_AT_ONCE // 17
    assert sum(parts) == 100
    assert all(len(call[4]) == 1024 * len(call[2]) for call in stage.index.calls)


async def test_a_long_removal_is_passed_in_parts() -> None:
    stage = Stage()
    count = 3 * BLOCKS_AT_ONCE + 5
    stage.feed.put(stage.backlog, raws(removed(*range(count), medium="CPU", group_idx=2)))
    await turns(1)
    assert sum(len(call[2]) for call in stage.index.calls) <= BLOCKS_AT_ONCE
    await turns()
    assert [one for call in stage.index.calls for one in call[2]] == list(range(count))
    assert {(*call[:2], *call[3:]) for call in stage.index.calls} == {("removed", 0, "CPU", 2)}
    assert max(len(call[2]) for call in stage.index.calls) <= BLOCKS_AT_ONCE
    assert stage.counts.blocks == {"removed": count}


@pytest.mark.parametrize("parent", [None, 7])
async def test_each_part_says_whether_its_event_begins_with_a_prompts_first_block(
    parent: int | None,
) -> None:
    """A report of blocks that are known must not look like blocks that were computed once more,
    whatever its length.
    """
    index = BlockIndex(4, 10_000, others_ask=True)
    place = index.add_place()
    failures: list[Exception] = []
    feed = Feed(index, failures.append)
    names = list(range(100, 2100))
    index.stored(place, [7], None, [9] * 4, 4, "GPU", 0, None, None, counts=True)
    for _ in range(2):
        feed.put(Backlog(place), raws(stored(*names, parent=parent, group_idx=0)))
        await turns()
    assert index.counters.repeated == 2000
    feed.put(Backlog(place), raws(removed(*names, medium="GPU", group_idx=0)))
    await turns()
    assert index.blocks(place) == (1 if parent is None else 2001)
    assert not failures


async def test_one_turn_of_the_loop_takes_a_bounded_number_of_blocks() -> None:
    stage = Stage()
    stage.feed.put(
        stage.backlog, raws(*(stored(*range(10 * at, 10 * at + 10)) for at in range(300)))
    )
    seen = []
    for _ in range(30):
        before = len(stage.index.calls)
        await turns(1)
        seen.append(sum(len(call[2]) for call in stage.index.calls[before:]))
    assert max(seen) <= BLOCKS_AT_ONCE + 10
    assert sum(seen) == 3000


async def test_places_take_turns() -> None:
    stage = Stage()
    stage.feed.put(stage.backlog, raws(*(stored(at) for at in range(1000))))
    stage.feed.put(stage.other, raws(stored(1)))
    await turns(1)
    assert ("stored", 1) in [call[:2] for call in stage.index.calls[:3]]


async def test_what_can_not_be_used_is_counted_and_the_rest_goes_on() -> None:
    stage = Stage()
    await stage.passed(
        {"type": "BlockMoved"},
        {"type": "BlockStored"},
        stored(1, token_ids=[1]),
        stored(2, more=1),
        stored(),
        stored(3),
    )
    assert stage.index.hashes == {2, 3}
    assert stage.counts.skipped == {
        "unknown_event": 1,
        "undecodable": 1,
        "inconsistent": 1,
        "unknown_field": 1,
    }


async def test_groups_that_keep_some_blocks_name_no_blocks_tokens() -> None:
    stage = Stage()
    ((_, _, hashes, _, ids, *_, counts),) = await stage.passed(
        stored(1, 2, token_ids=list(range(40)), kv_cache_spec_kind="sliding_window")
    )
    assert (hashes, ids, counts) == ([1, 2], [], False)


async def test_a_failure_of_the_index_is_reported_and_the_next_event_comes() -> None:
    stage = Stage()
    stage.index.fails = 1
    await stage.passed(stored(1), stored(2))
    assert stage.index.hashes == {2}
    assert len(stage.failures) == 1


async def test_what_waits_is_bounded_and_its_owner_is_called_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "BACKLOG_BYTES", 10_000)
    stage = Stage()
    assert stage.feed.room(stage.backlog)
    stage.feed.put(stage.backlog, raws(*(stored(at) for at in range(200))))
    assert not stage.feed.room(stage.backlog)
    assert stage.feed.room(stage.other)
    assert stage.resumed == 0
    await turns()
    assert stage.resumed == 1
    assert stage.feed.room(stage.backlog)


async def test_all_places_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "TOTAL_BYTES", 10_000)
    stage = Stage()
    stage.feed.put(stage.other, raws(*(stored(at) for at in range(200))))
    assert not stage.feed.room(stage.backlog)
    await turns()
    assert stage.resumed == 1


async def test_a_restart_drops_what_waits() -> None:
    stage = Stage()
    stage.feed.put(
        stage.backlog, raws(*(stored(*range(at * 1000, at * 1000 + 600)) for at in range(9)))
    )
    await turns(1)
    stage.feed.restart(stage.backlog)
    await turns()
    assert stage.index.blocks[0] == {}
    assert stage.index.calls[-1] == ("restart", 0)
    assert stage.feed.bytes == 0
    assert (await stage.passed(stored(1)))[-1][2] == [1]


def test_the_tables_of_metrics_have_what_the_code_counts() -> None:
    def names(pairs: tuple[tuple[str, str], ...]) -> set[str]:
        return {name for name, _ in pairs}

    assert names(kv_sources.REPLAYS) == {one.value for one in ReplayResult} | {"unavailable"}
    assert names(kv_sources.SKIPPED) == {one.value for one in Unreadable} | {
        "unknown_field",
        "inconsistent",
        "unknown_topic",
    }
    code = "".join(Path(found.__file__ or "").read_text() for found in (kv_source, kv_sources))
    for name in names(kv_sources.RESULTS) | names(kv_sources.CAUSES):
        assert f'"{name}"' in code
