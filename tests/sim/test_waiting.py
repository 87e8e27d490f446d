"""The order of the requests that wait at an engine."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.memory import Attention, BlockPool
from pdproxy_lab.sim.request import EngineRequest, SamplingParams
from pdproxy_lab.sim.waiting import WaitingRequests, fits_whole

POOL = BlockPool(8, 16)


def request(name: str, *, priority: int = 0, blocks: int = 0, tokens: int = 16) -> ActiveRequest:
    """Its prompt has so many tokens."""
    params: dict[str, Any] = {"max_tokens": 1}
    asked = EngineRequest(
        id=name, prompt=(1,) * tokens, sampling=SamplingParams(**params), priority=priority
    )
    made = ActiveRequest(asked, Attention(POOL, 0), 0.0, [1] * tokens, 0, None, None)
    made.blocks = list(range(1, blocks + 1))
    return made


def order(waiting: WaitingRequests) -> list[str]:
    """Take all of them."""
    found = []
    while len(waiting):
        first = waiting.first
        waiting.remove(first)
        found.append(first.request.id)
    return found


def test_requests_that_hold_blocks_go_first() -> None:
    """Also before one that was preempted later: it needs blocks, and could wait for theirs for
    ever.
    """
    waiting = WaitingRequests()
    waiting.add(request("new"))
    waiting.put_back(request("loaded first", blocks=1))
    waiting.put_back(request("loaded next", blocks=1))
    waiting.put_back(request("preempted"))
    assert order(waiting) == ["loaded first", "loaded next", "preempted", "new"]


def test_new_requests_wait_by_priority_then_by_arrival() -> None:
    waiting = WaitingRequests()
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1)):
        waiting.add(request(name, priority=priority))
    assert order(waiting) == ["d", "a", "c", "b"]


def test_one_that_does_not_wait_cannot_be_removed() -> None:
    with pytest.raises(ValueError, match="not in"):
        WaitingRequests().remove(request("a"))


@pytest.mark.parametrize(("running", "fits"), [(0, True), (1, True), (2, False)])
def test_blocks_that_running_prompts_need_stay_free(running: int, fits: bool) -> None:
    """Seven blocks are free; the request needs four, running prompts three more."""
    others = (
        [request("r", tokens=48)]
        if running == 1
        else [request("r", tokens=48), request("s", tokens=16)]
    )
    assert fits_whole(request("a", tokens=64), others if running else [], POOL) is fits
