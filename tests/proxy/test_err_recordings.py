"""What a plain engine was recorded to answer to bad requests is what the proxy answers, but for
differences listed here.
"""

from contextlib import AsyncExitStack

import pytest

from tests.fakes.client import Answer, request
from tests.fakes.world import World, world
from tests.sim.recordings.reading import Exchange, names, read
from tests.sim.recordings.stage import BLOCK
from tests.sim.shape import Seen, body_view, unlike

RECORDED = [name for name in names() if name.startswith("err_")]
WANTED = {
    "err_chat_kv_params_str": (
        "a client's `kv_transfer_params` is removed before any engine sees it: the request is "
        "served"
    ),
    "err_completion_kv_params_str": (
        "a client's `kv_transfer_params` is removed before any engine sees it: the request is "
        "served"
    ),
}
"""Recordings that are answered in another way, and why."""
_SETUP = {
    "max_model_len": 2048,
    "num_gpu_blocks": 512,
    "block_size": BLOCK,
    "add_bos": True,
    "enable_auto_tool_choice": False,
}


async def answer_to(w: World, exchange: Exchange) -> Answer:
    sent = exchange.sent
    headers = [(name, value) for name, value in sent.headers.items() if name != "content-length"]
    return await w.exchange(request(sent.method, sent.path, sent.body, headers))


def test_recordings_of_refusals_are_there():
    """The recordings are found, and each exception names one of them."""
    assert len(RECORDED) >= 48
    assert set(WANTED) <= set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
async def test_the_answer_is_the_recorded_one(name):
    """Status, content type and body are what the engine's were."""
    exchange = read(name)
    assert exchange.answer is not None
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(world(facts=_SETUP))
        answer = await answer_to(w, exchange)
    if name in WANTED:
        assert answer.status == 200
        return
    assert answer.status == exchange.answer.status
    assert exchange.answer.headers is not None
    assert answer.header("content-type") == exchange.answer.headers.get("content-type")
    wanted, got = (
        Seen(exchange.answer.status, exchange.answer.body),
        Seen(answer.status, answer.body),
    )
    found = unlike(body_view(wanted), body_view(got))
    assert not [line for line in found if not line.startswith("$.value.id:")], (
        "ids are the proxy's own"
    )
    if exchange.answer.status != 200:
        assert answer.body == exchange.answer.body
