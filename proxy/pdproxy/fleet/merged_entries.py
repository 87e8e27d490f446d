"""One entry of an engine from those of several workers: each has its own view of whether the engine
serves. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pdproxy.fleet.entries import EngineBreaker, EngineDrain, EngineEntry, EngineHealth, EngineLoad
from pdproxy.observe.prompt_shares import PoolPrompts

_STATES = ("joining", "probing", "warming", "serving")
"""On its way in, an engine is as far as in the worker where it has come least far."""
_HEALTH = (
    "up",
    "slow_start",
    "kv_failing",
    "half_open",
    "excluded",
    "asleep",
    "stalled",
    "draining",
    "down",
)
"""From good to bad."""
_WAITS = ("requests", "kv", None)
Seen = EngineEntry | EngineLoad
"""What a worker has of an engine. A load: it serves, and there is nothing else to say."""


class WorkerView(msgspec.Struct, array_like=True, frozen=True):
    """What a worker has: the loads of engines that serve, by their URLs, the entries of all others,
    and how its prompts were served.
    """

    plain: dict[str, EngineLoad]
    entries: list[EngineEntry]
    prompts: list[PoolPrompts] = []

    def of(self) -> dict[str, Seen]:
        """Return what it has of all engines, by URL."""
        return {**self.plain, **{entry.url: entry for entry in self.entries}}


def merged(
    own: Sequence[EngineEntry], number: int, views: Mapping[int, WorkerView], pools: Sequence[str]
) -> list[EngineEntry]:
    """Return the engines of all workers, pool by pool. `number`: of the worker whose entries are
    `own`.
    """
    others = {worker: view.of() for worker, view in views.items()}
    found = [merged_entry({number: entry, **_having(entry.url, others)}) for entry in own]
    known = {entry.url for entry in own}
    leaving = {
        url: None
        for view in others.values()
        for url, entry in view.items()
        if isinstance(entry, EngineEntry) and url not in known
    }
    for url in leaving:
        there = {
            worker: entry
            for worker, entry in _having(url, others).items()
            if isinstance(entry, EngineEntry)
        }
        found.append(merged_entry(dict(there)))
    return sorted(found, key=lambda entry: pools.index(entry.pool))


def merged_prompts(own: Sequence[PoolPrompts], views: Iterable[WorkerView]) -> list[PoolPrompts]:
    """Return how the prompts of all workers were served, in the pools that are `own`."""
    found = {one.pool: one.served for one in own}
    for view in views:
        for one in view.prompts:
            if one.pool in found:
                found[one.pool] = found[one.pool].combined(one.served)
    return [PoolPrompts(pool, served) for pool, served in found.items()]


def _having(url: str, others: Mapping[int, Mapping[str, Seen]]) -> dict[int, Seen]:
    return {worker: view[url] for worker, view in others.items() if url in view}


def merged_entry(entries: Mapping[int, Seen]) -> EngineEntry:
    """Return one entry from those of the workers that have the engine, by their numbers. At least
    one is an entry.
    """
    known = [entry for entry in entries.values() if isinstance(entry, EngineEntry)]
    first = known[0]
    if len(entries) == 1:
        return first
    drains = [entry.drain for entry in known if entry.drain is not None]
    return msgspec.structs.replace(
        first,
        state=_state(entries, has_drain=bool(drains)),
        health=_health(entries),
        load=_load([one.load if isinstance(one, EngineEntry) else one for one in entries.values()]),
        breaker=_breaker([entry.breaker for entry in known]),
        drain=_drain(drains, is_over=len(drains) == len(entries)),
    )


def _state(entries: Mapping[int, Seen], *, has_drain: bool) -> str:
    states = [one.state if isinstance(one, EngineEntry) else "serving" for one in entries.values()]
    if has_drain:
        return "drained" if set(states) == {"drained"} else "draining"
    return min(states, key=_STATES.index)


def _health(entries: Mapping[int, Seen]) -> EngineHealth:
    each = {
        worker: one.health if isinstance(one, EngineEntry) else EngineHealth("up", None)
        for worker, one in entries.items()
    }
    worker, worst = max(each.items(), key=lambda item: _HEALTH.index(item[1].state))
    if worst.reason is None or len({one.state for one in each.values()}) == 1:
        return worst
    return EngineHealth(worst.state, f"worker {worker}: {worst.reason}")


def _load(each: Sequence[EngineLoad]) -> EngineLoad:
    windows = [one.window for one in each if one.window is not None]
    return EngineLoad(
        sum(one.requests for one in each),
        sum(one.prompt_bytes for one in each),
        max(windows, default=None),
    )


def _breaker(each: Sequence[EngineBreaker]) -> EngineBreaker:
    longest = max(each, key=lambda one: one.open_for_s)
    places = [one.places for one in each if one.places is not None]
    return EngineBreaker(
        max(one.failures for one in each),
        longest.open_for_s,
        longest.reason,
        min(places, default=None),
    )


def _drain(each: Sequence[EngineDrain], *, is_over: bool) -> EngineDrain | None:
    if not each:
        return None
    waits = min((one.waits_for for one in each), key=_WAITS.index)
    return msgspec.structs.replace(
        each[0],
        since_s=max(one.since_s for one in each),
        left_s=max(one.left_s for one in each),
        waits_for=waits if waits is not None or is_over else "requests",
    )
