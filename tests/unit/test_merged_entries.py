"""One entry of an engine from those of several workers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdproxy.fleet.entries import EngineBreaker, EngineDrain, EngineEntry, EngineHealth, EngineLoad
from pdproxy.fleet.merged_entries import WorkerView, merged, merged_entry

UP = EngineHealth("up", None)
DRAIN = EngineDrain("admin", 1.0, 9.0, True, None)
PLAIN = EngineLoad(2, 20, 4.0)
"""Of an engine that only serves."""


def _entry(
    url: str = "http://e:1", state: str = "serving", pool: str = "one", **more: Any
) -> EngineEntry:
    fields: dict[str, Any] = {
        "health": UP,
        "breaker": EngineBreaker(0, 0.0, None, None),
        "drain": None,
        "load": EngineLoad(3, 30, None),
        **more,
    }
    return EngineEntry(
        id=url,
        url=url,
        pool=pool,
        role="decode",
        source="admin",
        also_wanted_by=[],
        state=state,
        since_s=1.0,
        models=[],
        version=None,
        block_size=None,
        pairs=None,
        labels={},
        **fields,
    )


@pytest.mark.parametrize(
    ("states", "found"),
    [
        (["serving", "serving"], "serving"),
        (["serving", "joining", "warming"], "joining"),
        (["warming", None], "warming"),
        (["drained", "drained"], "drained"),
        (["drained", "draining"], "draining"),
        (["drained", None], "draining"),
        (["serving", "drained"], "draining"),
    ],
)
def test_the_state_is_that_of_the_last_worker(states: list[str | None], found: str) -> None:
    drain = {"drained": DRAIN, "draining": msgspec.structs.replace(DRAIN, waits_for="kv")}
    each = {
        n: PLAIN if one is None else _entry(state=one, drain=drain.get(one))
        for n, one in enumerate(states)
    }
    shown = merged_entry(each)
    assert shown.state == found
    assert (shown.drain is None) == (found not in ("drained", "draining"))
    if shown.drain is not None:
        assert (shown.drain.waits_for is None) == (found == "drained")


def test_the_worst_health_is_shown_with_its_worker() -> None:
    down = EngineHealth("down", "refused")
    assert merged_entry({0: _entry(), 2: _entry(health=down)}).health == EngineHealth(
        "down", "worker 2: refused"
    )
    assert merged_entry({0: _entry(health=down), 1: _entry(health=down)}).health == down
    assert merged_entry({0: _entry(health=down), 1: PLAIN}).health.reason == "worker 0: refused"
    assert merged_entry({0: _entry(), 1: PLAIN}).health == UP


def test_breakers_and_drains_are_the_longest() -> None:
    """Loads are added up, also of workers where it only serves."""
    first = _entry(breaker=EngineBreaker(2, 0.0, None, None), drain=DRAIN, state="draining")
    second = _entry(
        breaker=EngineBreaker(5, 7.0, "slow", 1),
        drain=msgspec.structs.replace(DRAIN, left_s=20.0, since_s=3.0, waits_for="kv"),
        state="draining",
    )
    shown = merged_entry({0: first, 1: second, 2: PLAIN})
    assert shown.breaker == EngineBreaker(5, 7.0, "slow", 1)
    assert shown.drain == EngineDrain("admin", 3.0, 20.0, True, "kv")
    assert shown.load == EngineLoad(2 * 3 + 2, 2 * 30 + 20, 4.0)


def test_an_engine_that_is_left_in_one_worker_is_shown() -> None:
    """In its pool; one that is gone here, and serves there for a moment, is not."""
    leaving = _entry("http://a:1", "draining", "one", drain=DRAIN)
    views = {
        1: WorkerView({"http://b:1": PLAIN, "http://d:1": PLAIN}, [leaving]),
        2: WorkerView({"http://b:1": PLAIN, "http://c:1": PLAIN}, [leaving]),
    }
    own = [_entry("http://b:1"), _entry("http://c:1", pool="two")]
    found = merged(own, 0, views, ["one", "two"])
    assert [(one.url, one.state) for one in found] == [
        ("http://b:1", "serving"),
        ("http://a:1", "draining"),
        ("http://c:1", "serving"),
    ]
