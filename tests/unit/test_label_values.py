"""The values of labels that clients and engines choose: bounded for all processes together, however
many there are, and however often they are started again.
"""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.observe.description import OTHER, Label
from pdproxy.observe.events import Gaps, RequestEnded
from pdproxy.observe.label_values import MAX_LABEL, LabelValues
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.requests import MODEL, OUTCOMES, REQUESTS, TENANT, TENANT_TOKENS
from pdproxy.observe.snapshot import decode, encode
from pdproxy.workers.label_values import SharedLabelValues
from pdproxy.workers.share import WorkersMemory
from pdproxy.workers.shown_of_all import add_up

FEW = Label("few", text="a label of this test", most=8)
TWO = Label("two", text="another one", most=2)


def _in_process(work: Callable[[], object]) -> Any:
    """Return what a forked process returns."""
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writes, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        found = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(found)


@pytest.mark.parametrize("make", [LabelValues, lambda: SharedLabelValues().of_process()])
def test_the_first_ones_are_shown(make: Callable[[], LabelValues]) -> None:
    """They stay; a long one is not shown, and takes no place."""
    values = make()
    assert values.shown(TWO, "x" * (MAX_LABEL + 1)) == OTHER
    found = [values.shown(TWO, value) for value in ("a", "b\n", "c", "a", "c", "b\n")]
    assert found == ["a", "b\n", OTHER, "a", OTHER, "b\n"]
    assert [values.has(TWO, value) for value in ("a", "c", OTHER)] == [True, False, False]
    assert values.shown(FEW, "c") == "c"


def test_all_processes_show_the_same_ones() -> None:
    """Processes that see other values, one behind the other: each knows those of the ones before,
    and no process can add to what is full.
    """
    shared = SharedLabelValues()

    def seen(first: int) -> list[str]:
        values = shared.of_process()
        return [values.shown(FEW, str(number)) for number in range(first, first + 6)]

    assert _in_process(lambda: seen(0)) == ["0", "1", "2", "3", "4", "5"]
    assert _in_process(lambda: seen(4)) == ["4", "5", "6", "7", OTHER, OTHER]
    assert _in_process(lambda: seen(6)) == ["6", "7", *[OTHER] * 4]
    assert seen(0) == ["0", "1", "2", "3", "4", "5"]


def test_processes_that_add_at_the_same_time() -> None:
    """They agree on the values, whoever was first."""
    shared, pids, most = SharedLabelValues(), [], Label("many", text="many", most=40)
    for number in range(4):
        if (pid := os.fork()) == 0:
            chance, values = random.Random(number), shared.of_process()
            for _ in range(400):
                values.shown(most, str(chance.randrange(200)))
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    one, other = shared.of_process(), shared.of_process()
    every = [str(number) for number in range(200)]
    found = [value for value in every if one.shown(most, value) == value]
    assert len(found) == 40
    assert [value for value in reversed(every) if other.shown(most, value) == value] == found[::-1]


def test_half_a_record_counts_as_none() -> None:
    """A process that is killed while it writes leaves one: what comes behind is another value."""
    shared = SharedLabelValues()
    values = shared.of_process()
    assert values.shown(TWO, "a") == "a"
    os.write(shared._file, b'["two",2,"hal')
    assert values.shown(TWO, "b") == OTHER
    assert values.shown(TWO, "b") == "b"
    assert [shared.of_process().shown(TWO, value) for value in "abc"] == ["a", "b", OTHER]


def test_without_memory_no_value_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedLabelValues()
    values = shared.of_process()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert values.shown(TWO, "a") == OTHER
    assert values.shown(TWO, "a") == "a"


def _report(tenant: str, model: str) -> RequestEnded:
    return RequestEnded(
        request_id="r", endpoint="/v1/completions", model=model, outcome="ok", status=200, legs=[],
        queue_s=0.0, first_s=0.2, total_s=1.0, prompt_tokens=6, completion_tokens=1, gaps=Gaps(),
        tenant=tenant,
    )  # fmt: skip


def test_workers_that_are_started_again_make_no_more_series() -> None:
    """Each worker sees other tenants and models, and is killed: what is left of all of them has no
    more names than one process may show. No count is lost, and none decreases.
    """
    memory, past = WorkersMemory(2, 1), b""
    assert MODEL.most is not None
    assert TENANT.most is not None
    before: dict[tuple[str, ...], float] = {}
    lives, each = 6, TENANT.most // 4
    for life in range(lives):
        share = memory.of(0, lambda _: None)
        metrics = Metrics(values=share.label_values())
        for number in range(each):
            metrics.notify(_report(f"t{life}-{number}", f"m{life}-{number}"))
        past = add_up(past, encode(metrics.counts().without_levels()), [])
        tokens = decode(past).values[TENANT_TOKENS.name]
        assert all(tokens[labels] >= count for labels, count in before.items())
        before = tokens
    left = decode(past).values
    assert len(left[TENANT_TOKENS.name]) == TENANT.most + 1
    assert sum(left[TENANT_TOKENS.name].values()) == lives * each * 7
    assert len(left[REQUESTS.name]) == (MODEL.most + 1) * len(OUTCOMES)
    assert sum(left[REQUESTS.name].values()) == lives * each


def test_what_is_left_of_engines_that_are_gone() -> None:
    """Workers are killed while engines come and go, each with an address of its own: what dead
    workers have counted of an engine goes once no worker reports the engine any more.
    """
    past, living = b"", Metrics()
    for number in range(50):
        url, dead = f"http://engine-{number}:1", Metrics()
        for one in (dead, living):
            one.add_node(url, "decode")
        past = add_up(past, _counted(dead), [_counted(living)])
        assert [url in labels for labels in _of_nodes(past)].count(True) > 0
        living.drop_node(url)
    assert {labels[0] for labels in _of_nodes(past)} == {"http://engine-49:1"}
    again = Metrics()
    past = add_up(past, _counted(again), [])
    assert {labels[0] for labels in _of_nodes(past)} == {"http://engine-49:1"}, (
        "nobody else reports"
    )
    past = add_up(past, _counted(again), [_counted(living)])
    assert _of_nodes(past) == []


def _counted(metrics: Metrics) -> bytes:
    return encode(metrics.counts().without_levels())


def _of_nodes(past: bytes) -> list[tuple[str, ...]]:
    return [*decode(past).values["pdproxy_leg_failures_total"]]
