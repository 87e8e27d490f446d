"""From an answering leg's first data to its end: what an attempt waits for meanwhile."""

from __future__ import annotations

import logging
from functools import partial

from pdproxy.kit.errors import Wait
from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.observe.events import DeadlinePassed
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.decode_request import is_framing_kept, reads_of
from pdproxy.upstream.connection import Leg

logger = logging.getLogger("pdproxy.kv")

COUNTS_GRACE = 1.0
"""Seconds that an answer waits for the prefill engine's own answer, if the KV came before that."""


async def counts_came_beside(attempt: Attempt, over: OneShotEvent) -> bool:
    """Wait for the prefill engine's answer beside the decode engine's data, since only it has the counts of its cache.

    `over` is set then. Return whether it has come: before the data, behind it, or at the same moment. The push comes before
    it, but the answer is on its way by then.
    """
    custody = attempt.custody
    if custody is None:
        return False
    try:
        async with attempt.resources.clock.within(COUNTS_GRACE):
            await over.wait()
    except TimeoutError:
        logger.info("%s has pushed KV, and not answered: the answer shows no counts of its cache", attempt.prefill_url)
    return not custody.promised


async def pass_on(attempt: Attempt, leg: Leg | None, url: str) -> None:
    """Pass a stream on to the client until it is over. `url`: of its engine.

    Raises:
        EngineError: it failed after its first data.
    """
    custody, resources = attempt.custody, attempt.resources
    relay, stream_to = attempt.relay, attempt.request.stream_to
    assert relay is not None
    direct = custody is None or (custody.handle.first is None and is_framing_kept(attempt))
    reads = reads_of(attempt, leg)
    attempt.stream_flows()
    relay.flow(stream_to(relay), reads, direct=direct)
    del stream_to
    attempt.keep_record()

    def passed(wait: Wait) -> None:
        resources.observers.notify(DeadlinePassed(wait.value, url))

    works = partial(resources.works, url, Wait.BETWEEN_TOKENS.value)
    await relay.watch(resources.clock, resources.deadlines.between_tokens, passed, works)
